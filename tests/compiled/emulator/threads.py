"""The threads of some programs: which are where, barriers, warps, and how faults are told."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numba import njit

from tests.compiled.emulator.global_memory import GlobalMemory
from tests.compiled.emulator.report import FAILED, HELD, Fault, Options, Report
from tests.compiled.emulator.store_buffers import StoreBuffers
from tests.compiled.emulator.translation import Translation

Where: TypeAlias = Any
"""Threads: `slice(None)` for all, or an array of their indices."""
ALL = slice(None)
_REDUCTIONS = {
    "max": np.fmax, "min": np.fmin, "max.NaN": np.maximum, "min.NaN": np.minimum, "add": np.add,
}  # fmt: skip
_MODES = ("bfly", "idx", "up")


@njit(cache=True)
def _shuffled(register, index, b, c, mode):
    found = np.empty(len(index), register.dtype)
    for k in range(len(index)):
        lane, amount, last = index[k] % 32, np.int64(b[k % len(b)]) & 31, np.int64(c[k % len(c)])
        clamp, segment = last & 31, (last >> 8) & 31
        high = (lane & segment) | (clamp & ~segment)
        source = (lane & segment) | (amount & ~segment)
        if mode != 1:
            source = lane - amount if mode else lane ^ amount
        valid = source >= high if mode == 2 else source <= high
        found[k] = register[index[k] - lane + (source if valid else lane)]
    return found


@dataclass
class Launch:
    """A launch, which its programs share.

    Attributes:
        params: of the kernel, as bytes.
        early: whether it may have begun before the launch before it has ended.
        next_started: whether a launch behind it may have begun.
    """

    translation: Translation
    params: dict[str, bytes]
    grid: tuple[int, int, int]
    shared_bytes: int
    memory: GlobalMemory
    buffers: StoreBuffers | None
    options: Options
    report: Report
    coverage: np.ndarray
    early: bool
    next_started: bool = False


class Threads:
    """All threads of some programs of a grid, in the order of programs.

    Attributes:
        program, warp: of each thread: the place of its program here, its warp in the program.
        grid_program: of each thread, its program in the grid.
        epoch: of each program, how many barriers it has passed.
        total: how many threads.
        special: of each thread, its special registers.
    """

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        kernel, grid = launch.translation.kernel, launch.grid
        self.launch, self.options, self.report = launch, launch.options, launch.report
        self.name, self.instructions = kernel.name, kernel.instructions
        self.threads, self.count = kernel.threads, len(programs)
        self.total = self.threads * self.count
        self.lanes = np.arange(self.total)
        self.program, inside = np.divmod(self.lanes, self.threads)
        self.warp, self.grid_program = inside // 32, programs[self.program]
        places = zip("xyz", np.unravel_index(self.grid_program, grid, order="F"), grid, strict=True)
        special = {"%laneid": inside % 32, "%tid.x": inside, "%ntid.x": self.threads}
        for axis, place, size in places:
            special |= {f"%ctaid.{axis}": place, f"%nctaid.{axis}": size}
        shape = (self.total,)
        self.special = {
            name: np.broadcast_to(np.asarray(number, np.uint32), shape)
            for name, number in special.items()
        }
        self.epoch = np.zeros(self.count, np.int64)
        self.queue: dict[int, list[Where]] = {0: [ALL]}
        self.waiting: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        self.alive = np.full(self.count, self.threads)

    def index(self, where: Where) -> np.ndarray:
        return self.lanes if where is ALL else where

    def size(self, where: Where) -> int:
        return self.total if where is ALL else len(where)

    def each(self, where: Where, x: Any) -> np.ndarray:
        """Return a number of each thread, also where an operand is a constant."""
        return x if np.ndim(x) else np.full(self.size(where), x)

    def those(self, where: Where, predicate: np.ndarray, negated: bool, at: int) -> tuple:
        """Return the threads whose predicate holds, and the others; None in place of no thread."""
        chosen = predicate[where] != negated
        count = np.count_nonzero(chosen)
        self.launch.coverage[at] |= HELD * (count > 0) | FAILED * (count < len(chosen))
        if count in (0, len(chosen)):
            return (where, None) if count else (None, where)
        index = self.index(where)
        return index[chosen], index[~chosen]

    def fault(self, where: Where, at: int, what: str, place: int | None = None) -> NoReturn:
        """Raise, naming the instruction and, by its place among `where`, a thread.

        Raises:
            Fault: always.
        """
        text = self._told(at, what)
        if place is not None:
            thread = int(self.index(where)[place])
            program, inside = int(self.grid_program[thread]), thread % self.threads
            text += f"; program {program}, thread {inside}"
        raise Fault(text)

    def fault_if(self, bad: np.ndarray, where: Where, at: int, what: str) -> None:
        """Raise for the first of these threads whose access is bad.

        Raises:
            Fault: there is one.
        """
        if bad.any():
            self.fault(where, at, what, int(np.flatnonzero(bad)[0]))

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
        everyone = self.program[np.concatenate([each for _, each in waiting])]
        held = np.bincount(everyone, minlength=self.count)
        if whole and ((self.alive < self.threads) & (held > 0)).any():
            self.fault(where, at, "barrier after threads of the program have ended")
        full = held == (count or self.threads)
        if not full.any():
            return None
        if len({target for target, each in waiting if full[self.program[each]].any()}) > 1:
            self.doubt(at, "threads of one program meet at different barriers")
        if whole:
            self.epoch[full] += 1
        for target, each in waiting:
            go = each[full[self.program[each]]]
            if len(go):
                self.queue.setdefault(target, []).append(ALL if len(go) == self.total else go)
        kept = ((target, each[~full[self.program[each]]]) for target, each in waiting)
        self.waiting[number] = [(target, each) for target, each in kept if len(each)]
        return None

    def end(self, where: Where) -> None:
        """Threads have ended."""
        gone = np.bincount(self.program[where], minlength=self.count)
        self.alive -= gone
        for _, held in (each for waiting in self.waiting.values() for each in waiting):
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

    def _whole(self, where: Where, mask: Any, at: int) -> np.ndarray:
        if np.any(mask != 0xFFFFFFFF):
            self.fault(where, at, "a mask of some lanes")
        return self.warps(where, at)

    def shuffle(
        self, where: Where, mode: str, a: np.ndarray, b: Any, c: Any, mask: Any, at: int
    ) -> np.ndarray:
        """Take a register of another lane; b and c are as `shfl.sync` has them."""
        index = self._whole(where, mask, at).ravel()
        return _shuffled(a, index, np.atleast_1d(b), np.atleast_1d(c), _MODES.index(mode))

    def redux(self, where: Where, mode: str, a: np.ndarray, mask: Any, at: int) -> np.ndarray:
        rows = self.each(where, a).reshape(self._whole(where, mask, at).shape)
        return np.repeat(_REDUCTIONS[mode].reduce(rows, axis=1).astype(a.dtype), 32)
