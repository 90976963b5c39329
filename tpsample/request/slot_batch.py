"""Rows that read tables by slot: those of a selection, and all those of an engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tpsample.request.batch_checks import check_appended, check_per_row
from tpsample.request.controls.bits import num_words
from tpsample.request.controls.rows import ControlRows
from tpsample.request.controls.tables import ControlTables
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.slot_rows import SlotRows, Undrawn
from tpsample.request.slot_tables import SlotParameters
from tpsample.request.step_batch import StepBatch

MASKS = ("grammar_bitmask", "forced_token_ids")
"""The masks of a step's rows, as `ControlRows` takes them."""


class SlotBatch(StepBatch):
    """B rows, each of which reads one slot of tables that the host does not look into.

    Args:
        rows: which slot each row reads.
        parameters: by slot.
        tables: controls by slot, or None.
    """

    def __init__(
        self,
        vocab_size: int,
        rows: SlotRows,
        parameters: SlotParameters,
        tables: ControlTables | None,
    ) -> None:
        self.vocab_size, self._rows = vocab_size, rows
        self._parameters, self._tables = parameters, tables
        self._masks: dict[str, Tensor] = {}
        self._by_slot: Mapping[str, Tensor] = {}  # masks with a row per slot

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def device(self) -> torch.device:
        return self._rows.index.device

    @property
    def temperature(self) -> Tensor:
        return self._parameters.temperature_of(self._rows)

    @property
    def seed(self) -> Tensor:
        return self._parameters.seed_of(self._rows)

    @property
    def stores_logits(self) -> bool:
        return self._parameters.stores_logits

    @property
    def undrawn(self) -> Undrawn | None:
        return self._rows.undrawn

    def view(self, num_rows: int) -> BatchView:
        self.for_rows(num_rows)
        self.check_masks(num_rows)
        return self._view(self._rows)

    def with_drafts(self, draft_token_ids: Tensor) -> BatchView:
        check_per_row("draft_token_ids", draft_token_ids, torch.int64, self._rows.index, "K")
        self.for_rows(self.rows)
        times = draft_token_ids.shape[1] + 1
        self.check_masks(times * self.rows)
        view = self._view(self._rows.repeated(times))
        if view.controls is None or times == 1:
            return view
        drafts = draft_token_ids.to(torch.int32)
        return replace(view, controls=view.controls.with_drafts(drafts))

    def append(self, token_ids: Tensor) -> None:
        """Count the tokens of a step as output of their slots, on the device.

        Args:
            token_ids: int64 [B] or [B, n], as `SamplingBatch.append`; those of rows that were not
                drawn are passed over.

        Raises:
            ValueError: another shape, dtype or device; or the batch has changed since `select`.
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
        for name, mask in self._masks.items():
            if len(mask) != num_rows:
                raise ValueError(
                    f"{name}: expected a row for each of the {num_rows} rows of the step, got "
                    f"{len(mask)}; assign another to the selection"
                )

    def state(self) -> dict[str, object]:
        found = self._parameters.state(self._rows) | self._row_masks(self._rows)
        if self._tables is not None:
            slots = self._tables.slot_of[self._rows.index]
            found["tokens so far"] = self._tables.token_digest[slots]
        return found

    def _view(self, rows: SlotRows) -> BatchView:
        values = self._parameters.read(rows)
        plan = BatchPlan.of_all(rows, self.vocab_size, values.filters, values.logprobs)
        undrawn = None if self.undrawn is None else rows.undrawn
        return BatchView(values.temperature, values.seed, plan, self._controls(rows), undrawn)

    def _controls(self, rows: SlotRows) -> ControlRows | None:
        masks = self._row_masks(rows)
        if self._tables is None or not (self._tables.in_use or masks):
            return None
        slots = rows.scratch.pick("state slots", self._tables.slot_of, rows.index)
        return ControlRows(self._tables, slots, *(masks.get(name) for name in MASKS))

    def _row_masks(self, rows: SlotRows) -> dict[str, Tensor]:
        """Return the masks of rows: their own, or those of their slots."""
        left = {name: mask for name, mask in self._by_slot.items() if name not in self._masks}
        return self._masks | {name: rows.pick_any(name, mask) for name, mask in left.items()}

    def _assign(self, name: str, mask: Tensor | None, dtype: torch.dtype, *width: int) -> None:
        if mask is None:
            self._masks.pop(name, None)
            return
        check_per_row(name, mask, dtype, self._rows.index, *width)
        if self._tables is None:
            raise ValueError(f"{name}: this batch has no controls; see SamplingBatch.from_params")
        self._masks[name] = mask
