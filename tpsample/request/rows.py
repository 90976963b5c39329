"""The rows of a step that a tensor of slots names: the slot that each row reads, on the device.

A row is not drawn if it names no slot, a slot without a request, or one that an earlier row names.
It reads the last slot, in which no request ever is. All results lie in memory that the rows keep,
so a step that uses rows again allocates nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core.tensors import ALIGNED, HasViews, Scratch, ordinary_tensors
from tpsample.core.word import Status

OPEN, SHUT = 2**62, -1
"""The gate of a slot that may be drawn, above the number of any row; and of one that may not."""

PADDING = -1
"""The slot of a row that nobody wants."""


class Undrawn(NamedTuple):
    """The rows of a step that are not drawn.

    Attributes:
        rows: bool [B].
        status: int32 [B], of such a row; those of the others mean nothing.
    """

    rows: Tensor
    status: Tensor


class SlotRows(HasViews):
    """B rows, and memory for what they read of their slots.

    Attributes:
        index: int64 [B], the slot that each row reads; S if it is not drawn.
        inside: int64 [B], the same, but 0 if the row is not drawn, because every table has a first
            row, and masks have no more rows than slots are in use.
        undrawn: the rows that are not drawn.
        numbers, stored_numbers: int64 and int32 [B], 0 … B - 1.
        scratch: of what a step reads.
    """

    @ordinary_tensors
    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._padded = torch.zeros(num_rows + -num_rows % ALIGNED, dtype=torch.int64, device=device)
        self.numbers = torch.arange(num_rows, device=device)
        self.stored_numbers = self.numbers.to(torch.int32)
        self._view()
        self.inside = torch.zeros_like(self.index)
        self.undrawn = Undrawn(
            torch.zeros(num_rows, dtype=torch.bool, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )
        self.scratch = Scratch(device)

    def _view(self) -> None:
        self.index = self._padded[: len(self.numbers)]

    def __len__(self) -> int:
        return self.index.shape[0]

    @ordinary_tensors
    def repeated(self, times: int) -> SlotRows:
        """Return the rows with each standing `times` times in a row, in memory of their own."""
        found = SlotRows(len(self) * times, self.index.device)
        its, others = ((rows.index, rows.inside, *rows.undrawn) for rows in (found, self))
        for each, other in zip(its, others, strict=True):
            each.copy_(other.repeat_interleave(times))
        return found

    def resolve(self, slots: Tensor, gate: Tensor) -> None:
        """Find the slot of each row.

        Of the rows that name a slot the first goes through its gate, if it is open:

            slots    3  -1   0   3  99     gates of S = 5 slots: 0 and 3 are open
            index    3   5   0   5   5

        Args:
            slots: int32 or int64 [B], any numbers; none is used as an address.
            gate: int64 [S + 1].
        """
        none, (undrawn, status) = len(gate) - 1, self.undrawn
        index = self.index.copy_(slots).clamp_(PADDING, none).remainder_(none + 1)
        first = self.scratch.take("first", torch.int64, none + 1).copy_(gate)
        first.scatter_reduce_(0, index, self.numbers, "amin")
        torch.ne(self.scratch.pick("winner", first, index), self.numbers, out=undrawn)
        torch.ne(slots, PADDING, out=status).mul_(int(Status.BAD_SLOT))
        index.masked_fill_(undrawn, none)
        torch.remainder(index, max(none, 1), out=self.inside)

    def pick(self, name: str, table: Tensor) -> Tensor:
        """Return what a table [S + 1, …] holds for each row."""
        return self.scratch.pick(name, table, self.index)

    def pick_any(self, name: str, table: Tensor) -> Tensor:
        """Return what a table [S, …] holds for each row; any slot's where the row is not drawn."""
        return self.scratch.pick(name, table, self.inside)

    def pick_columns(self, name: str, table: Tensor) -> Tensor:
        """Return the columns that rows have in a table [n, S + 1], as `columns_of` pads them."""
        return self.scratch.pick(name, table, self._padded, dim=1)
