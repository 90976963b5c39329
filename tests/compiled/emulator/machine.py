"""Executes a translated kernel for some programs of a grid at once, on CPU memory.

All threads that are at the same instruction execute it together, as arrays. The threads at the
lowest instruction go first, so branches meet again where the compiler meant them to.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from tests.compiled.emulator import arithmetic
from tests.compiled.emulator.approximations import Approximations, flushed
from tests.compiled.emulator.matrices import Matrices
from tests.compiled.emulator.operands import ARRAYS, VIEWS
from tests.compiled.emulator.regions import GlobalMemory
from tests.compiled.emulator.report import Coverage, Fault, Options, Report
from tests.compiled.emulator.store_buffers import StoreBuffers
from tests.compiled.emulator.threads import ALL, Where
from tests.compiled.emulator.translation import Translation

_PATIENCE = 5000
"""After so many blocks, threads at the highest instruction get a turn: some may wait for them."""


class Machine(Matrices):
    """Some programs of a launch.

    Args:
        params: of the kernel, as bytes.
        grid, programs: the shape of the grid, and which of its programs run here.
        early: whether the launch may have begun before the launch before it has ended.
    """

    def __init__(
        self,
        translation: Translation,
        params: dict[str, bytes],
        grid: tuple[int, int, int],
        programs: np.ndarray,
        memory: GlobalMemory,
        buffers: StoreBuffers | None,
        shared_bytes: int,
        options: Options,
        report: Report,
        coverage: Coverage,
        early: bool,
    ) -> None:
        super().__init__(translation, grid, programs, options, report, coverage)
        self.params, self.memory, self.buffers = params, memory, buffers
        self.approximate, self._coverage = Approximations(options), coverage
        self.unused = translation.unused
        self.random = None if options.order is None else np.random.default_rng(options.order)
        self.early = np.full(self.total, early)
        self.begin_shared(shared_bytes)
        self.begin_products()
        self._times: Counter[int] = Counter()

    def run(self) -> None:
        """Run all programs to their end.

        Raises:
            Fault: a kernel did what no GPU allows.
        """
        space = _space(self.translation, self.total)
        queue, turns = self.queue, 0
        with np.errstate(all="ignore"):
            while queue:
                at = min(queue)
                turns += len(queue) > 1
                if len(queue) > 1 and turns % _PATIENCE == 0:
                    at = max(queue)
                parts = queue.pop(at)
                where = parts[0] if len(parts) == 1 else self._joined(parts)
                self._times[at] += self.size(where)
                for target, threads in space[f"b{at}"](self, where):
                    if threads is None:
                        continue
                    if target == -1:
                        self.end(threads)
                    else:
                        queue.setdefault(target, []).append(threads)
                if self.buffers is not None:
                    self.buffers.pass_time()
        if any(self.waiting.values()):
            raise Fault(f"{self.name}: threads wait at a barrier that the others never reach")
        for at, times in self._times.items():
            self._coverage.ran[at : self.translation.blocks[at]] = True
            for opcode, count in self.translation.opcodes[at].items():
                self.report.executed[opcode] += count * times

    def _joined(self, parts: list[Where]) -> Where:
        found = np.sort(np.concatenate([self.index(part) for part in parts]))
        return ALL if len(found) == self.total else found

    def param(self, name: str, dtype: Any) -> Any:
        return np.frombuffer(self.params[name], dtype)[0]

    @staticmethod
    def globaltimer() -> np.uint64:
        """Return nanoseconds; a thread that polls lets others run."""
        time.sleep(1e-4)
        return np.uint64(time.monotonic_ns())


def _space(translation: Translation, total: int) -> dict[str, Any]:
    """Return the functions of a kernel's blocks, over registers of so many threads.

    Those of one launch are taken for the next one with as many threads.
    """
    if total not in translation.spaces:
        space = {"np": np, "N": arithmetic, "flushed": flushed, **translation.constants}
        of_class: dict[str, list[str]] = defaultdict(list)
        for name in translation.python.values():
            of_class[name[0]].append(name)
        for kind, names in of_class.items():
            space.update(zip(names, np.zeros((len(names), total), ARRAYS[kind]), strict=True))
        for name, suffix in translation.views:
            space[f"{name}_{suffix}"] = space[name].view(VIEWS[name[0]][suffix])
        exec(translation.code, space)
        translation.spaces[total] = space
    return translation.spaces[total]
