"""Some slots of a batch, named by a tensor on the device: what a step takes in place of the batch.

    rows = batch.select(slots)                  # [B], any order, any subset, -1 for padding
    out = sampler(hidden_states, rows, positions)
    rows.append(out.token_ids)

The host never reads the slots. What a row's slot says is read when the step is made, through one
index, so that a CUDA graph captured from `select` to `append` serves other slots, and requests that
came since, when it is replayed.

A row is not drawn, and no state moves for it, if

    its slot is -1                          padding; its status is OK
    there is no such slot, no request is
    in it, or an earlier row names it       an error of the caller; its status is BAD_SLOT

Its token is the sampler's `on_failed`. No such number is used as an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tpsample.core.digest import digest_bits
from tpsample.core.vocab_shard import VocabShard
from tpsample.request.batch_checks import check_appended, check_per_row, check_slots
from tpsample.request.controls.bits import num_words
from tpsample.request.controls.rows import ControlRows
from tpsample.request.controls.tables import ControlTables
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.seeds import SeedSource
from tpsample.request.slot_rows import SlotRows, Undrawn
from tpsample.request.slot_tables import SlotParameters
from tpsample.request.step_batch import StepBatch

MASKS = ("grammar_bitmask", "forced_token_ids")
"""The masks of a step's rows, as `ControlRows` takes them."""


class Selection(StepBatch):
    """B rows of a batch, accepted wherever the batch is. `SamplingBatch.select` makes it.

    It is a value: it means the slots that its tensor held when it was made. What is in those slots
    it finds when it is used, in memory of its own, which `select` may be told to use again.

    Args:
        batch: whose slots these are; a change of its rows is not followed.
        num_rows: B.
    """

    def __init__(self, batch: StepBatch, num_rows: int) -> None:
        self.vocab_size = batch.vocab_size
        self._batch, self._rows = batch, SlotRows(num_rows, batch.device)
        self._masks: dict[str, Tensor] = {}
        self._by_slot: Mapping[str, Tensor] = {}
        self._parameters: SlotParameters
        self._tables: ControlTables | None

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
        self._parameters, self._tables = parameters, tables
        self._by_slot = {} if masks is None else masks
        self._masks.clear()
        self._rows.resolve(slots, parameters.gate)
        return self

    def selects(self, batch: StepBatch, num_rows: int) -> bool:
        """Return whether these are so many rows of a batch."""
        return self._batch is batch and self.rows == num_rows

    @property
    def unseeded(self) -> list[int]:  # type: ignore[override]
        """The slots of the batch that still wait for their seed."""
        return self._batch.unseeded

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def device(self) -> torch.device:
        return self._rows.index.device

    @property
    def temperature(self) -> Tensor:
        return self._parameters.read(self._rows).temperature

    @property
    def seed(self) -> Tensor:
        return self._parameters.read(self._rows).seed

    @property
    def plan(self) -> BatchPlan:
        """The plan of the batch."""
        return self._batch.plan

    @property
    def stores_logits(self) -> bool:
        return self._parameters.stores_logits

    @property
    def undrawn(self) -> Undrawn:
        return self._rows.undrawn

    def for_rows(self, num_rows: int) -> Selection:
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got a "
                f"selection of {self.rows} slots; pad slots with -1"
            )
        return self

    def view(self, num_rows: int) -> BatchView:
        self.for_rows(num_rows)
        self.check_masks(num_rows)
        return self._view(self._rows)

    def with_drafts(self, draft_token_ids: Tensor) -> BatchView:
        check_per_row("draft_token_ids", draft_token_ids, torch.int64, self._rows.index, "K")
        times = draft_token_ids.shape[1] + 1
        self.check_masks(times * self.rows)
        drafts = draft_token_ids.to(torch.int32)
        view = self._view(self._rows.repeated(times))
        if view.controls is None or times == 1:
            return view
        return replace(view, controls=view.controls.with_drafts(drafts))

    def append(self, token_ids: Tensor) -> None:
        """Count the tokens of a step as output of their slots, on the device.

        Args:
            token_ids: int64 [B] or [B, n], as `SamplingBatch.append`; those of rows that were not
                drawn are passed over.
        """
        self.for_rows(check_appended(token_ids, self._rows.index))
        if self._tables is None or not self._tables.looks_at_output:
            return
        columns = token_ids.unsqueeze(1) if token_ids.ndim == 1 else token_ids
        rows = self._rows  # those that are not drawn have the idle slot of the tables
        slots = rows.scratch.pick("state slots", self._tables.slot_of, rows.index)
        for column in columns.unbind(dim=1):
            self._tables.append(slots, column)

    @property
    def grammar_bitmask(self) -> Tensor | None:
        """int32 [B, ceil(V / 32)] in the order of the rows, as `SamplingBatch.grammar_bitmask`.

        Without one, a row has the bits that the batch's own mask has for its slot.
        """
        return self._masks.get("grammar_bitmask")

    @grammar_bitmask.setter
    def grammar_bitmask(self, bitmask: Tensor | None) -> None:
        self._assign("grammar_bitmask", bitmask, torch.int32, num_words(self.vocab_size))

    @property
    def forced_token_ids(self) -> Tensor | None:
        """int64 [B] in the order of the rows, as `SamplingBatch.forced_token_ids`, or by slot."""
        return self._masks.get("forced_token_ids")

    @forced_token_ids.setter
    def forced_token_ids(self, forced: Tensor | None) -> None:
        self._assign("forced_token_ids", forced, torch.int64)

    def check_masks(self, num_rows: int) -> None:
        left = [name for name in self._by_slot if name not in self._masks]
        if left:
            self._batch.check_masks(self._batch.rows)
        if left and num_rows != self.rows:
            raise ValueError(
                f"batch.{left[0]}: has a row per slot, but a verification needs one per position; "
                "assign one to the selection"
            )
        for name, mask in self._masks.items():
            if len(mask) != num_rows:
                raise ValueError(
                    f"{name}: expected a row for each of the {num_rows} rows of the step, got "
                    f"{len(mask)}; assign another to the selection"
                )

    def prepare(self, shard: VocabShard) -> None:
        self._batch.prepare(shard)

    def draw_seeds(self, source: SeedSource) -> None:
        self._batch.draw_seeds(source)

    def state_digests(self) -> dict[str, int]:
        found = self._batch.state_digests()
        undrawn, status = self._rows.undrawn
        found["slots"] = digest_bits(torch.stack([self._rows.index, (undrawn * status).long()]))
        return found | {name: digest_bits(mask) for name, mask in self._masks.items()}

    def _view(self, rows: SlotRows) -> BatchView:
        view = view_of_slots(self._parameters, rows, self.vocab_size)
        return replace(view, controls=self._controls(rows), undrawn=rows.undrawn)

    def _controls(self, rows: SlotRows) -> ControlRows | None:
        masks = dict(self._masks)
        for name, by_slot in self._by_slot.items():
            if name not in masks:
                masks[name] = rows.pick_any(name, by_slot)
        if self._tables is None or not (self._tables.in_use or masks):
            return None
        slots = rows.scratch.pick("state slots", self._tables.slot_of, rows.index)
        return ControlRows(self._tables, slots, *(masks.get(name) for name in MASKS))

    def _assign(self, name: str, mask: Tensor | None, dtype: torch.dtype, *width: int) -> None:
        if mask is None:
            self._masks.pop(name, None)
            return
        check_per_row(name, mask, dtype, self._rows.index, *width)
        if self._tables is None:
            raise ValueError(f"{name}: this batch has no controls; see SamplingBatch.from_params")
        self._masks[name] = mask


def view_of_slots(parameters: SlotParameters, rows: SlotRows, vocab_size: int) -> BatchView:
    """Return what a step of these rows reads, but for controls."""
    values = parameters.read(rows)
    plan = BatchPlan.of_all(rows, vocab_size, values.filters, values.logprobs)
    return BatchView(values.temperature, values.seed, plan)


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
        out = Selection(batch, len(slots))
    elif not isinstance(out, Selection):
        raise TypeError(f"out: expected a Selection, got {type(out).__name__}")
    elif not out.selects(batch, len(slots)):
        raise ValueError(
            f"out: expected an earlier selection of {len(slots)} rows of this batch, as slots has, "
            f"got one of {out.rows}"
        )
    return out.take(slots, parameters, tables, masks)
