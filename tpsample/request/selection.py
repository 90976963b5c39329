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
from tpsample.core.word import NO_TOKEN, Status
from tpsample.request.batch_checks import check_appended, check_per_row, check_slots
from tpsample.request.controls.bits import num_words
from tpsample.request.controls.rows import ControlRows
from tpsample.request.controls.tables import ControlTables
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.seeds import SeedSource
from tpsample.request.slot_tables import SlotParameters
from tpsample.request.step_batch import StepBatch

MASKS = ("grammar_bitmask", "forced_token_ids")
"""The masks of a step's rows, as `ControlRows` takes them."""

DRAWN = -1
"""The verdict on a row that is drawn."""


class Selection(StepBatch):
    """B rows of a batch, accepted wherever the batch is. `SamplingBatch.select` makes it.

    It is a value: it means the slots that its tensor held when it was made. What is in those slots
    it finds when it is used.

    Args:
        batch: whose slots these are; a change of its rows is not followed.
        parameters: by slot.
        tables: controls by slot, or None.
        slots: int32 or int64 [B].
        masks: those of the batch, with a row per slot.
    """

    def __init__(
        self,
        batch: StepBatch,
        parameters: SlotParameters,
        tables: ControlTables | None,
        slots: Tensor,
        masks: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_slots(slots, batch.device)
        self.vocab_size = batch.vocab_size
        self._batch, self._parameters, self._tables = batch, parameters, tables
        self._index, self._verdict = resolve(slots, parameters.live)
        self._masks: dict[str, Tensor] = {}
        self._by_slot = {} if masks is None else masks

    @property
    def unseeded(self) -> list[int]:  # type: ignore[override]
        """The slots of the batch that still wait for their seed."""
        return self._batch.unseeded

    @property
    def rows(self) -> int:
        return self._index.shape[0]

    @property
    def device(self) -> torch.device:
        return self._index.device

    @property
    def temperature(self) -> Tensor:
        return self._parameters.read(self._index).temperature

    @property
    def seed(self) -> Tensor:
        return self._parameters.read(self._index).seed

    @property
    def plan(self) -> BatchPlan:
        """The plan of the batch."""
        return self._batch.plan

    @property
    def stores_logits(self) -> bool:
        return self._parameters.stores_logits

    @property
    def verdict(self) -> Tensor:
        return self._verdict

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
        return self._view(self._index, self._verdict)

    def with_drafts(self, draft_token_ids: Tensor) -> BatchView:
        check_per_row("draft_token_ids", draft_token_ids, torch.int64, self._index, "K")
        times = draft_token_ids.shape[1] + 1
        self.check_masks(times * self.rows)
        drafts = draft_token_ids.to(torch.int32)
        index, verdict = (x.repeat_interleave(times) for x in (self._index, self._verdict))
        view = self._view(index, verdict)
        if view.controls is None or times == 1:
            return view
        return replace(view, controls=view.controls.with_drafts(drafts))

    def append(self, token_ids: Tensor) -> None:
        """Count the tokens of a step as output of their slots, on the device.

        Args:
            token_ids: int64 [B] or [B, n], as `SamplingBatch.append`; those of rows that were not
                drawn are passed over.
        """
        rows = check_appended(token_ids, self._index)
        self.for_rows(rows)
        if self._tables is None:
            return
        columns = token_ids.unsqueeze(1) if token_ids.ndim == 1 else token_ids
        known = columns.where((self._verdict == DRAWN).unsqueeze(1), NO_TOKEN)
        slots = self._tables.slot_of[self._index]
        for column in known.unbind(dim=1):
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
        found["slots"] = digest_bits(torch.stack([self._index, self._verdict.long()]))
        return found | {name: digest_bits(mask) for name, mask in self._masks.items()}

    def _view(self, index: Tensor, verdict: Tensor) -> BatchView:
        view = view_of_slots(self._parameters, index, self.vocab_size)
        return replace(view, controls=self._controls(index), verdict=verdict)

    def _controls(self, index: Tensor) -> ControlRows | None:
        if self._tables is None:
            return None
        masks = dict(self._masks)
        for name, by_slot in self._by_slot.items():
            if name not in masks:
                masks[name] = by_slot[index.clamp(max=len(by_slot) - 1)]
        grammar, forced = (masks.get(name) for name in MASKS)
        found = ControlRows(self._tables, self._tables.slot_of[index], grammar, forced)
        return found if found.changes_logits else None

    def _assign(self, name: str, mask: Tensor | None, dtype: torch.dtype, *width: int) -> None:
        if mask is None:
            self._masks.pop(name, None)
            return
        check_per_row(name, mask, dtype, self._index, *width)
        if self._tables is None:
            raise ValueError(f"{name}: this batch has no controls; see SamplingBatch.from_params")
        self._masks[name] = mask


def view_of_slots(parameters: SlotParameters, index: Tensor, vocab_size: int) -> BatchView:
    """Return what a step of these slots reads, int64 [B], but for controls."""
    rows = parameters.read(index)
    plan = BatchPlan.of_all(len(index), vocab_size, index.device, rows.filters, rows.logprobs)
    return BatchView(rows.temperature, rows.seed, plan)


def resolve(slots: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Return which slot each row reads, int64 [B], and the verdict on it, int32 [B].

    A row that is not drawn reads the last one, in which no request ever is.

    Args:
        slots: int32 or int64 [B], any numbers.
        live: bool [S + 1].
    """
    none, row = live.shape[0] - 1, torch.arange(slots.shape[0], device=slots.device)
    named = slots.to(torch.int64)
    index = named.where((named >= 0) & (named < none), none)
    first = torch.full_like(live, slots.shape[0], dtype=torch.int64)
    first.scatter_reduce_(0, index, row, "amin")
    drawn = live[index] & (first[index] == row)
    status = torch.where(named == -1, int(Status.OK), int(Status.BAD_SLOT))
    verdict = status.masked_fill(drawn, DRAWN).to(torch.int32)
    return index.where(drawn, none), verdict
