"""Some slots of a batch, named by a tensor on the device. A step takes them in place of the batch.

    rows = batch.select(slots)                  # [B], any order, any subset, -1 for padding
    out = sampler(hidden_states, rows, positions)
    rows.append(out.token_ids)

The host never reads the slots. A CUDA graph captured from `select` to `append` serves other slots,
and requests that came since, when it is replayed. Outside a graph a selection is of the batch as it
was when `select` was called: after a request joined, left, moved or changed, it is refused.

A row is not drawn, and no state moves for it, if

    its slot is -1                          padding; its status is OK
    there is no such slot, no request is
    in it, or an earlier row names it       an error of the caller; its status is BAD_SLOT

Its token is the sampler's `on_failed`. No such number is used as an address.
"""

from __future__ import annotations

import copy

from torch import Tensor

from tpsample.core.checks import INDICES, check_tensor
from tpsample.core.tensors import readable
from tpsample.request.entries import STATE
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.rows import SlotRows, Undrawn
from tpsample.request.step_batch import StepBatch
from tpsample.request.table import RequestTable


class Selection(StepBatch):
    """B rows of a batch, accepted wherever the batch is. `SamplingBatch.select` makes it.

    It means the slots that its tensor held when it was made, in memory of its own, which `select`
    may be told to use again.

    Args:
        batch: whose slots these are; a batch of all slots in order is a selection of itself.
        table: of the batch.
        num_rows: B.
    """

    def __init__(self, batch: StepBatch, table: RequestTable, num_rows: int) -> None:
        super().__init__(table)
        self._batch, self.rows = batch, num_rows
        self._rows, self._version = SlotRows(num_rows, table.device), table.version

    @staticmethod
    def of(batch: StepBatch, slots: Tensor, out: Selection | None = None) -> Selection:
        """Return a selection of a batch, in the memory of `out` if that is given.

        Args:
            slots: int32 or int64 [B].

        Raises:
            TypeError, ValueError: slots of another shape, dtype or device, or another kind of
                `out`.
        """
        check_tensor("slots", slots, INDICES, "B", batch.device)
        if out is None:
            out = Selection(batch, batch._table, len(slots))
        elif not isinstance(out, Selection):
            raise TypeError(f"out: expected a Selection, got {type(out).__name__}")
        elif out._batch is not batch or out is batch:
            raise ValueError(
                "out: expected an earlier selection of this batch, got another batch's"
            )
        elif out.rows != len(slots):
            raise ValueError(
                f"out: expected an earlier selection of {len(slots)} rows, as slots has, got one "
                f"of {out.rows}"
            )
        return out.take(slots)

    def take(self, slots: Tensor) -> Selection:
        """Become these slots of the batch as it is now, without masks of its own."""
        self._version = self._table.version
        self._assigned.clear()
        self._rows.resolve(slots, self._table.gate)
        return self

    def __copy__(self) -> Selection:
        """Return a selection of the same batch, with memory and masks of its own."""
        shared = () if self._batch is self else (self._batch, self._table)
        return copy.deepcopy(self, {id(each): each for each in shared})

    @property
    def temperature(self) -> Tensor:
        """fp32 [B], read of the batch. To change one, write to the batch or to its tensors."""
        return self._table.temperature_of(self._rows)

    @property
    def seed(self) -> Tensor:
        """int64 [B], 64 bits, read of the batch as `temperature` is."""
        return self._table.seed_of(self._rows)

    @property
    def plan(self) -> BatchPlan:
        """The plan of the batch."""
        return self._batch.plan

    @property
    def undrawn(self) -> Undrawn | None:
        return None if self._batch is self else self._rows.undrawn

    def for_rows(self, num_rows: int) -> Selection:
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got a "
                f"selection of {self.rows} slots; pad slots with -1"
            )
        if self._version != self._table.version:
            raise ValueError(
                "batch: requests joined, left, moved or changed since this selection was made; "
                "call batch.select again"
            )
        return self

    def read(self, times: int = 1) -> BatchView:
        table = self._table
        rows = self._rows if times == 1 else self._rows.repeated(times)
        stores = table.stores_logits
        filters, logprobs = table.read(rows) if stores else (None, None)
        plan = BatchPlan(
            len(rows),
            self.vocab_size,
            self.device,
            filters,
            logprobs,
            fixed_rounds=not readable(self.device),
            stores_all=stores,
            numbers=(rows.numbers, rows.stored_numbers),
        )
        temperature, seed = table.temperature_of(rows), table.seed_of(rows)
        undrawn = None if self._batch is self else rows.undrawn
        return BatchView(temperature, seed, plan, self._controls(), undrawn)

    def _state_slots(self) -> Tensor:
        return self._rows.pick("state slots", self._table.numbers[STATE])

    def _append(self, num_rows: int, token_ids: Tensor) -> None:
        self.for_rows(num_rows)
        super()._append(num_rows, token_ids)

    def _by_slot(self) -> dict[str, Tensor]:
        """Return the masks of the batch, a row per slot, that no mask of these rows replaces. One
        without rows binds none."""
        its, own = self._batch._assigned, self._assigned
        if not its or its is own:
            return {}
        return {name: mask for name, (mask, _) in its.items() if name not in own and len(mask)}

    def _masks(self) -> dict[str, Tensor]:
        by_slot, own = self._by_slot(), super()._masks()
        return own | {name: self._rows.pick_any(name, mask) for name, mask in by_slot.items()}

    def check_masks(self, num_rows: int) -> None:
        left = list(self._by_slot())
        if left:
            self._batch.check_masks(self._batch.rows)
        if left and num_rows != self.rows:
            raise ValueError(
                f"batch.{left[0]}: has a row per slot, but a verification needs one per position; "
                "assign one to the selection"
            )
        super().check_masks(num_rows)

    def state(self) -> dict[str, object]:
        found = self._table.state(self._rows) | super().state()
        if self._batch is self:
            return found
        # Of rows that are not drawn only the status counts.
        undrawn, status = self._rows.undrawn
        return {"slots": self._rows.index.where(~undrawn, -1 - status), **found}
