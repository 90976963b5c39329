"""Executes a translated kernel for some programs of a grid at once, on CPU memory.

All threads that are at the same instruction execute it together, as arrays. The threads at the
lowest instruction go first, so branches meet again where the compiler meant them to.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tests.compiled.emulator.approximations import Approximations
from tests.compiled.emulator.report import RAN, Fault
from tests.compiled.emulator.tensor_memory import TensorMemory
from tests.compiled.emulator.threads import ALL, Launch, Where

_PATIENCE = 5000
"""After so many blocks, threads at the highest instruction get a turn: some may wait for them."""


class Machine(TensorMemory):
    """Some programs of a launch."""

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        super().__init__(launch, programs)
        self.approximate = Approximations(launch.options)

    def run(self) -> None:
        """Run all programs to their end.

        Raises:
            Fault: a kernel did what no GPU allows.
        """
        translation, queue, turns = self.launch.translation, self.queue, 0
        space, coverage = translation.space(self.total), self.launch.coverage
        with np.errstate(all="ignore"):
            while queue:
                turns += len(queue) > 1
                patient = len(queue) == 1 or turns % _PATIENCE
                at = min(queue) if patient else max(queue)
                where = self._joined(queue.pop(at))
                stop = translation.blocks[at]
                coverage[at:stop] |= RAN
                self.report.instructions += (stop - at) * self.size(where)
                for target, threads in space[f"b{at}"](self, where):
                    if threads is not None and target == -1:
                        self.end(threads)
                    elif threads is not None:
                        queue.setdefault(target, []).append(threads)
                if self.launch.buffers is not None:
                    self.launch.buffers.pass_time()
        if any(self.waiting.values()):
            raise Fault(f"{self.name}: threads wait at a barrier that the others never reach")
        self.require_free()
        self.launch.next_started |= bool(self.early.any())

    def _joined(self, parts: list[Where]) -> Where:
        if len(parts) == 1:
            return parts[0]
        found = np.sort(np.concatenate([self.index(part) for part in parts]))
        return ALL if len(found) == self.total else found

    def param(self, name: str, dtype: Any) -> Any:
        return np.frombuffer(self.launch.params[name], dtype)[0]

    @staticmethod
    def globaltimer() -> np.uint64:
        """Return nanoseconds; a thread that polls lets others run."""
        time.sleep(1e-4)
        return np.uint64(time.monotonic_ns())
