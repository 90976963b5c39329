"""Some slots of a batch, named by a tensor on the device: what a step takes in place of the batch.

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

from collections.abc import Mapping

from torch import Tensor

from tpsample.core.vocab_shard import VocabShard
from tpsample.request.batch_checks import check_slots
from tpsample.request.controls.tables import ControlTables
from tpsample.request.plan import BatchPlan
from tpsample.request.seeds import SeedSource
from tpsample.request.slot_batch import SlotBatch
from tpsample.request.slot_rows import SlotRows
from tpsample.request.slot_tables import SlotParameters
from tpsample.request.step_batch import StepBatch


class Selection(SlotBatch):
    """B rows of a batch, accepted wherever the batch is. `SamplingBatch.select` makes it.

    It means the slots that its tensor held when it was made, in memory of its own, which `select`
    may be told to use again.

    Args:
        batch: whose slots these are.
        num_rows: B.
        parameters, tables: by slot.
    """

    def __init__(
        self,
        batch: StepBatch,
        num_rows: int,
        parameters: SlotParameters,
        tables: ControlTables | None,
    ) -> None:
        rows = SlotRows(num_rows, batch.device)
        super().__init__(batch.vocab_size, rows, parameters, tables)
        self._batch = batch

    def take(
        self,
        slots: Tensor,
        parameters: SlotParameters,
        tables: ControlTables | None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> Selection:
        """Become these slots, without masks of its own.

        Args:
            slots: int32 or int64 [B].
            parameters: by slot.
            tables: controls by slot, or None.
            masks: those of the batch, with a row per slot.
        """
        self._parameters, self._tables, self.version = parameters, tables, self._batch.version
        self._by_slot = {} if masks is None else masks
        self._masks.clear()
        self._rows.resolve(slots, parameters.gate)
        return self

    def selects(self, batch: StepBatch) -> bool:
        """Return whether these are rows of a batch."""
        return self._batch is batch

    @property
    def unseeded(self) -> list[int]:  # type: ignore[override]
        """The slots of the batch that still wait for their seed."""
        return self._batch.unseeded

    @property
    def plan(self) -> BatchPlan:
        """The plan of the batch."""
        return self._batch.plan

    def for_rows(self, num_rows: int) -> Selection:
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got a "
                f"selection of {self.rows} slots; pad slots with -1"
            )
        if self.version != self._batch.version:
            raise ValueError(
                "batch: requests joined, left, moved or changed since this selection was made; "
                "call batch.select again"
            )
        return self

    def check_masks(self, num_rows: int) -> None:
        left = [name for name in self._by_slot if name not in self._masks]
        if left:
            self._batch.check_masks(self._batch.rows)
        if left and num_rows != self.rows:
            raise ValueError(
                f"batch.{left[0]}: has a row per slot, but a verification needs one per position; "
                "assign one to the selection"
            )
        super().check_masks(num_rows)

    def prepare(self, shard: VocabShard) -> None:
        self._batch.prepare(shard)

    def draw_seeds(self, source: SeedSource) -> None:
        self._batch.draw_seeds(source)

    def state(self) -> dict[str, object]:
        # Of rows that are not drawn only the status counts.
        undrawn, status = self._rows.undrawn
        slots = self._rows.index.where(~undrawn, -1 - status)
        return {"slots": slots, **super().state()}


def selection_of(
    batch: StepBatch,
    slots: Tensor,
    out: Selection | None,
    parameters: SlotParameters,
    tables: ControlTables | None,
    masks: Mapping[str, Tensor] | None = None,
) -> Selection:
    """Return a selection of a batch, in the memory of `out` if that is given.

    Raises:
        TypeError, ValueError: slots of another shape, dtype or device, or another kind of `out`.
    """
    check_slots(slots, batch.device)
    if out is None:
        out = Selection(batch, len(slots), parameters, tables)
    elif not isinstance(out, Selection):
        raise TypeError(f"out: expected a Selection, got {type(out).__name__}")
    elif not out.selects(batch):
        raise ValueError("out: expected an earlier selection of this batch, got another batch's")
    elif out.rows != len(slots):
        raise ValueError(
            f"out: expected an earlier selection of {len(slots)} rows, as slots has, got one of "
            f"{out.rows}"
        )
    return out.take(slots, parameters, tables, masks)
