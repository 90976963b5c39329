"""Asynchronous work, in groups that are committed and waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tests.compiled.emulator.accesses import Accesses
from tests.compiled.emulator.threads import Launch, Where

Effect: TypeAlias = Callable[[np.ndarray], None]
"""Lets the work of some threads, by their places among those that issued it, take effect."""


@dataclass
class _Work:
    """Work of some threads: the group of each, and the places of threads that still wait for it."""

    index: np.ndarray
    group: np.ndarray
    left: np.ndarray
    effect: Effect


class Pending(Accesses):
    """Work that takes effect when it is waited for, or at once, see `Options.late`.

    Attributes:
        groups: by kind of work, how many groups a thread has committed.
    """

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        super().__init__(launch, programs)
        self.groups = defaultdict[str, np.ndarray](lambda: np.zeros(self.total, np.int64))
        self._work = defaultdict[str, list[_Work]](list)

    def later(self, kind: str, index: np.ndarray, effect: Effect) -> None:
        every = np.arange(len(index))
        if self.options.late:
            self._work[kind].append(_Work(index, self.groups[kind][index], every, effect))
        else:
            effect(every)

    def commit(self, where: Where, kind: str) -> None:
        self.groups[kind][where] += 1

    def wait_for(self, where: Where, kind: str, left: Any, at: int) -> None:
        """Let the work of these threads take effect, but for their last `left` groups."""
        over = np.zeros(self.total, np.int64)
        over[where] = self.groups[kind][where] - left
        for work in self._work[kind]:
            done = work.group[work.left] < over[work.index[work.left]]
            if done.any():
                work.effect(work.left[done])
            work.left = work.left[~done]
        self._work[kind] = [work for work in self._work[kind] if len(work.left)]
