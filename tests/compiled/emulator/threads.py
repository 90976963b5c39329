"""The threads of some programs: which are where, barriers, warps, and how faults are told."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numba import njit

from tests.compiled.emulator.report import Coverage, Fault, Options, Report
from tests.compiled.emulator.translation import Translation

Where: TypeAlias = Any
"""Threads: `slice(None)` for all, or an array of their indices."""
ALL = slice(None)
_REDUCTIONS: dict[str, Any] = {"max": np.max, "min": np.min, "add": np.sum}
_MODES = ("bfly", "idx", "up")


@njit(cache=True)
def _shuffled(register, index, b, c, mode):
    found = np.empty(len(index), register.dtype)
    for k in range(len(index)):
        lane, amount = index[k] % 32, np.int64(b[k]) & 31
        clamp, segment = np.int64(c[k]) & 31, (np.int64(c[k]) >> 8) & 31
        high = (lane & segment) | (clamp & ~segment)
        if mode == 0:
            source = lane ^ amount
        elif mode == 1:
            source = (lane & segment) | (amount & ~segment)
        else:
            source = lane - amount
        valid = source >= high if mode == 2 else source <= high
        found[k] = register[index[k] - lane + (source if valid else lane)]
    return found


class Threads:
    """All threads of some programs of a grid, in the order of programs.

    Attributes:
        program, warp: of each thread: the place of its program here, its warp in the program.
        epoch: of each program, how many barriers it has passed.
        total: how many threads.
    """

    def __init__(
        self,
        translation: Translation,
        grid: tuple[int, int, int],
        programs: np.ndarray,
        options: Options,
        report: Report,
        coverage: Coverage,
    ) -> None:
        kernel = translation.kernel
        self.name, self.instructions = kernel.name, kernel.instructions
        self.translation, self.options, self.report = translation, options, report
        self.threads, self.count = kernel.threads, len(programs)
        self.total = self.threads * self.count
        self.lanes = np.arange(self.total)
        self.program, inside = np.divmod(self.lanes, self.threads)
        self.warp = inside // 32
        self.tid_x, self.laneid = inside.astype(np.uint32), (self.lanes % 32).astype(np.uint32)
        self.nctaid_x, self.nctaid_y, self.nctaid_z = (np.uint32(size) for size in grid)
        self.ntid_x, of = np.uint32(self.threads), programs[self.program]
        self.grid_program = of
        self.ctaid_x = (of % grid[0]).astype(np.uint32)
        self.ctaid_y = (of // grid[0] % grid[1]).astype(np.uint32)
        self.ctaid_z = (of // (grid[0] * grid[1])).astype(np.uint32)
        self.epoch = np.zeros(self.count, np.int64)
        self.queue: dict[int, list[Where]] = {0: [ALL]}
        self.waiting: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        self.alive = np.full(self.count, self.threads)
        self._ways = coverage.ways

    def index(self, where: Where) -> np.ndarray:
        return self.lanes if where is ALL else where

    def size(self, where: Where) -> int:
        return self.total if where is ALL else len(where)

    def those(self, where: Where, predicate: np.ndarray, negated: bool, at: int) -> tuple:
        """Return the threads whose predicate holds, and the others; None in place of no thread."""
        chosen = predicate[where]
        count = np.count_nonzero(chosen)
        if count in (0, len(chosen)):
            holds = bool(count) != negated
            self._ways[at] |= 1 if holds else 2
            return (where, None) if holds else (None, where)
        self._ways[at] |= 3
        index = self.index(where)
        yes, no = index[chosen], index[~chosen]
        return (no, yes) if negated else (yes, no)

    def fault(self, where: Where, at: int, what: str, place: int | None = None) -> NoReturn:
        """Raise, naming the instruction and, by its place among `where`, a thread.

        Raises:
            Fault: always.
        """
        text = self._told(at, what)
        if place is not None:
            thread = int(self.index(where)[place])
            program = int(self.ctaid_x[thread]), int(self.ctaid_y[thread])
            text += f"; program {program}, thread {int(self.tid_x[thread])}"
        raise Fault(text)

    def doubt(self, at: int, what: str) -> None:
        """Note what is wrong, and go on."""
        self.report.doubts[self._told(at, what)] += 1

    def _told(self, at: int, what: str) -> str:
        i = self.instructions[at]
        return f"{self.name}, {i.source}, PTX line {i.line}: {what}: {i.text[:100]}"

    def arrive(self, where: Where, number: int, count: int, at: int) -> Where | None:
        """Have threads wait at a barrier; return those that go on at once, or None."""
        waiting, whole = self.waiting[number], count in (0, self.threads)
        if where is ALL and not waiting and whole:
            self.epoch += 1
            return where
        waiting.append((at + 1, self.index(where)))
        held = np.zeros(self.count, np.int64)
        for _, each in waiting:
            held += np.bincount(self.program[each], minlength=self.count)
        if whole and ((self.alive < self.threads) & (held > 0)).any():
            self.fault(where, at, "barrier after threads of the program have ended")
        full = held == (count or self.threads)
        if not full.any():
            return None
        if len({target for target, each in waiting if full[self.program[each]].any()}) > 1:
            self.doubt(at, "threads of one program meet at different barriers")
        if whole:
            self.epoch[full] += 1
        kept = []
        for target, each in waiting:
            go = full[self.program[each]]
            if go.any():
                part = each[go]
                self.queue.setdefault(target, []).append(ALL if len(part) == self.total else part)
            if not go.all():
                kept.append((target, each[~go]))
        self.waiting[number] = kept
        return None

    def end(self, where: Where) -> None:
        """Threads have ended."""
        gone = np.bincount(self.program[where], minlength=self.count)
        self.alive -= gone
        for waiting in self.waiting.values():
            for _, held in waiting:
                if gone[self.program[held]].any():
                    raise Fault(f"{self.name}: threads end while others wait at a barrier")

    def warps(self, where: Where, at: int) -> np.ndarray:
        """Return threads as [warps, 32].

        Raises:
            Fault: a warp is not whole.
        """
        index = self.index(where)
        if len(index) % 32 == 0:
            rows = index.reshape(-1, 32)
            if where is ALL or ((rows[:, 0] % 32 == 0) & (rows[:, 31] == rows[:, 0] + 31)).all():
                return rows
        self.fault(where, at, "a part of a warp at an instruction of whole warps")

    def shuffle(self, where: Where, mode: str, a: np.ndarray, b: Any, c: Any, at: int) -> Any:
        """Take a register of another lane; b and c are as `shfl.sync` has them."""
        self.warps(where, at)
        index = self.index(where)
        b, c = (np.broadcast_to(x, index.shape) for x in (b, c))
        return _shuffled(a, index, b, c, _MODES.index(mode))

    def redux(self, where: Where, mode: str, a: np.ndarray, at: int) -> np.ndarray:
        rows = np.broadcast_to(a, (self.size(where),)).reshape(self.warps(where, at).shape)
        return np.repeat(_REDUCTIONS[mode](rows, axis=1).astype(a.dtype), 32)
