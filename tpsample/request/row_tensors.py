"""The tensors of a batch's rows, which change and move together: temperature, seed and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpsample.core.host_tensors import ALIGNED, integers, reals
from tpsample.core.ordinary_tensors import ordinary_tensors
from tpsample.core.staging import Scratch
from tpsample.noise import signed64
from tpsample.request.filters import COLUMNS
from tpsample.request.host_rows import FILTERED, HostRows

WAITING = 0x54505F5741495421
"""The seed of a row that waits for one, an arbitrary number that nobody else writes."""


class RowTensors:
    """Tensors with a row for each that there is room for. They keep their place in memory.

    Attributes:
        temperature, seed: fp32 and int64 [room].
        numbers: int64 [room, 8], the columns of `RowFilters` by row, of rows that have filters;
            None until one has some. The room is rounded up to a multiple of ALIGNED.
    """

    def __init__(self, temperature: Tensor, seed: Tensor) -> None:
        self.temperature, self.seed = temperature, seed
        self.numbers: Tensor | None = None
        self._scratch = Scratch(seed.device)

    @ordinary_tensors
    def load(self, rows: Sequence[int], news: HostRows) -> None:
        """Write the requests of some rows."""
        send, requests = self._scratch.send, news.requests
        its_seeds = [WAITING if each.seed is None else signed64(each.seed) for each in requests]
        places, seeds = integers(rows, its_seeds, device=None)
        (temperatures,) = reals(
            [each.temperature for each in requests], device=None, dtype=torch.float32
        )
        index = send("rows", places)
        self.temperature.index_copy_(0, index, send("temperatures", temperatures))
        self.seed.index_copy_(0, index, send("seeds", seeds))
        if self.numbers is None and 1 in news.selectors(FILTERED):
            room = len(self.seed) + -len(self.seed) % ALIGNED
            self.numbers = self.seed.new_zeros(room, COLUMNS)
        if self.numbers is not None:
            packed = bytearray().join([its.packed for its in news.filters])
            numbers = torch.frombuffer(packed, dtype=torch.int64).view(-1, COLUMNS)
            self.numbers.index_copy_(0, index, send("numbers", numbers))

    def move(self, index: Tensor) -> None:
        """Put row ``index[i]`` in place i; int64 [room], a permutation."""
        self.temperature.copy_(self.temperature.index_select(0, index))
        self.seed.copy_(self.seed.index_select(0, index))
        if self.numbers is not None:
            self.numbers[: len(index)].copy_(self.numbers.index_select(0, index))

    def write_seeds(self, rows: Sequence[int], seeds: Tensor) -> None:
        """Give some rows their seeds, int64 on the host, unless the caller wrote others."""
        index = self._scratch.send("rows", integers(rows, device=None)[0])
        written = self.seed.index_select(0, index)
        seeds = written.where(written != WAITING, self._scratch.send("seeds", seeds))
        self.seed.index_copy_(0, index, seeds)
