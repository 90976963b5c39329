"""The place where several ranks of one process meet. Each has a thread, and one runs at a time.

A rank runs until it has something to tell the others, hands that in and sleeps. When all have, each
goes on with what all handed in. Because two never run at once, they may launch kernels in the
Triton interpreter, which allows one launch at a time, and nothing depends on a scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Rendezvous:
    """Runs the ranks, and passes tensors between them.

    Attributes:
        running: whether a `run` is under way.
    """

    def __init__(self) -> None:
        self.running = False
        self._turn = threading.Condition()
        self._world_size = 0
        self._ended = 0
        self._round = 0
        self._handed_in: dict[int, Tensor] = {}
        self._all: list[Tensor] = []
        self._broken = False

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run bodies[rank]() of every rank, and return their results in rank order.

        Raises:
            Exception: a body raised it, that of the lowest rank; the others stop where they meet.
            RuntimeError: the ranks did not meet equally often.
        """
        self._world_size, self._ended, self._handed_in = len(bodies), 0, {}
        self._broken, self.running = False, True
        # These belong to a thread.
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def in_turn(body: Callable[[], T]) -> T:
            with self._turn:
                try:
                    with (
                        torch.cuda.stream(stream),
                        torch.inference_mode(inference),
                        torch.set_grad_enabled(grad),
                    ):
                        return body()
                except BaseException:
                    self._broken = True
                    raise
                finally:
                    self._ended += 1
                    self._broken |= bool(self._handed_in)  # someone waits for who has left
                    self._turn.notify_all()

        try:
            with ThreadPoolExecutor(len(bodies)) as threads:
                futures = [threads.submit(in_turn, body) for body in bodies]
            errors = [error for future in futures if (error := future.exception()) is not None]
            for error in errors:
                if not isinstance(error, _Stopped):
                    raise error
            if errors:
                raise RuntimeError("virtual ranks: they did not make the same calls")
            return [future.result() for future in futures]
        finally:
            self.running = False

    def gather(self, rank: int, own: Tensor) -> list[Tensor]:
        """Wait for all ranks, and return what each handed in, in rank order."""
        self._handed_in[rank] = own
        if self._ended:
            self._broken = True
        if len(self._handed_in) == self._world_size:
            self._all = [self._handed_in[each] for each in range(self._world_size)]
            self._handed_in = {}
            self._round += 1
            self._turn.notify_all()
            return self._all
        this_round = self._round
        self._turn.wait_for(lambda: self._round > this_round or self._broken)
        if self._round == this_round:
            raise _Stopped
        return self._all


class _Stopped(Exception):
    """Another rank failed or has left."""
