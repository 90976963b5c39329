"""Some slots of a batch, named by a tensor on the device. A step takes them in place of the batch.

    rows = batch.select(slots)                  # [B], any order, any subset, -1 for padding
    out = sampler(hidden_states, rows, positions)
    rows.append(out.token_ids)

On a GPU the host never reads the slots. It knows them only if the caller passes them by `host=`.
Then a step does the work that these requests need. Without `host` it does the work that any request
of the batch may need. A CUDA graph that was captured from `select` to `append` may be replayed for
other slots and for later requests, so a capture ignores `host`. Outside a graph a selection belongs
to the batch as it was at `select`. After a request joined, left, moved or changed it is refused.

A row is not drawn, and no state moves for it, if

    its slot is -1                          padding; its status is OK
    there is no such slot, no request is
    in it, or an earlier row names it       an error of the caller; its status is BAD_SLOT

The token of such a row is the sampler's `on_failed`. Its slot number is never used as an address:
the row reads slot S, which never has a request.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tpsample.core.checks import INDICES, check_tensor, describe, is_integer, lists_in_order
from tpsample.core.tensors import (
    ALIGNED,
    HasViews,
    Scratch,
    capturing,
    ordinary_tensors,
    readable,
)
from tpsample.request.entries import ASKS, STATE, TOP
from tpsample.request.filters import LogprobRows, RowFilters
from tpsample.request.moving_on import Mask
from tpsample.request.plan import BatchPlan, BatchView, SlotRows, Undrawn
from tpsample.request.row_filter import keeps_all
from tpsample.request.step_batch import ReadSlots, StepBatch
from tpsample.request.table import RequestTable

PADDING = -1
"""The slot number of a row that is padding."""

MOST_PLANS = 16
"""Plans that are kept, by the slots that steps have named since the requests last changed."""


class Selection(HasViews, StepBatch):
    """B rows of a batch, accepted wherever the batch is. `SamplingBatch.select` makes it.

    It means the slots that the tensor held at `select`. A step reads copies in the selection's own
    memory. With `out=` the next selection uses this memory again, so that its step allocates none.

    Args:
        batch: whose slots these are.
        table: of the batch.
        num_rows: B.
    """

    _names_slots = True
    _version: int | None  # of the table that it was taken of
    _known: list[int] | None = None  # the slots that rows read, where the host knows them
    _has_stepped = _was_reselected = False
    _is_resolved = False  # whether `_slot_rows` has been filled for these slots

    @ordinary_tensors
    def __init__(self, batch: StepBatch, table: RequestTable, num_rows: int) -> None:
        super().__init__(table, batch._options, batch._moving)
        self._batch, self.rows, self._scratch = batch, num_rows, Scratch(self.device)
        numbers = self._numbers = torch.arange(num_rows, device=self.device)
        self._stored_numbers = numbers.to(torch.int32)
        self._named, self._first = torch.empty_like(numbers), torch.empty_like(table.occupancy)
        self._padded = numbers.new_zeros(num_rows + -num_rows % ALIGNED)  # the index of the rows
        none = torch.zeros_like(numbers, dtype=torch.bool)
        self._columns = numbers.to(torch.float32), torch.empty_like(numbers)
        self._skipped = Undrawn(none, none.clone())
        self._view()

    def __setstate__(self, state: dict[str, Any]) -> None:
        StepBatch.__setstate__(self, state)
        self._view()

    def _of_others(self, state: dict[str, Any]) -> dict[int, Any]:
        batch = state["_batch"]  # which has been loaded, with tables of its own
        tables = {id(state["_table"]): batch._table, id(state["_moving"]): batch._moving}
        return super()._of_others(state) | tables | {id(batch): batch}

    @ordinary_tensors
    def _view(self) -> None:
        index = self._padded[: self.rows]
        self._slot_rows = SlotRows(index, self._skipped, *self._columns)
        # By name of a column, torch's count of writes when the last copy was made.
        self._versions: dict[str, int] = {}
        self._repeats: dict[int, Selection] = {}  # the rows of a verification, by positions

    @staticmethod
    def of(
        batch: StepBatch, slots: Tensor, out: Selection | None = None, host: Any = None
    ) -> Selection:
        """Return what `SamplingBatch.select` does, which has the arguments and the errors."""
        check_tensor("slots", slots, INDICES, "B", batch.device)
        known = None if host is None else _numbers_of(host, slots)
        if out is None:
            out = Selection(batch, batch._table, len(slots))
        elif not isinstance(out, Selection):
            raise TypeError(f"out: expected a Selection, got {type(out).__name__}")
        elif out._batch is not batch:
            raise ValueError(
                "out: expected an earlier selection of this batch, got another batch's"
            )
        elif out.rows != slots.shape[0]:
            raise ValueError(
                f"out: expected an earlier selection of {len(slots)} rows, as slots has, got one "
                f"of {out.rows}"
            )
        return out.take(slots, known)

    def take(self, slots: Tensor, known: list[int] | None = None) -> Selection:
        """Become a selection of these slots of the batch as it is now, without masks of its own.

        If several rows name an occupied slot, only the first of them reads it:

            slots    3  -1   0   3  99     slots 0 and 3 of S = 5 are occupied
            index    3   5   0   5   5
        """
        vars(self)["_version"] = None  # of no table until the end, because an exception may come
        self._assigned.clear()
        self._versions.clear()
        self._named.copy_(slots)
        vars(self).update(  # at once, because each assignment checks its name
            _known=None if known is None else self._table.slots_read_by(known),
            _was_reselected=self._has_stepped,
            _has_stepped=False,
            _is_resolved=False,
            _version=self._table.version,
        )
        return self

    def _read_slots(self, read: ReadSlots | None = None) -> None:
        rows, versions = self._slot_rows, self._versions
        if read is None:
            _ = self.temperature, self.seed
        else:
            self._refuse_written()
            read(self._named, self._table, rows)
            versions.update(temperature=rows.temperature._version, seed=rows.seed._version)
        vars(self)["_is_resolved"] = True

    @property
    def _resolved(self) -> SlotRows:
        """The rows of the selection, computed on first use. A step on a GPU has computed them
        before, by a kernel."""
        if self._is_resolved:
            return self._slot_rows
        none, (index, (undrawn, bad), *_) = self._table.slots, self._slot_rows
        index.copy_(self._named).clamp_(PADDING, none).remainder_(none + 1)
        first = self._first.copy_(self._table.occupancy)
        first.scatter_reduce_(0, index, self._numbers, "amin")
        winner = self._scratch.pick("winner", first, index)
        torch.ne(winner, self._numbers, out=undrawn)
        torch.ne(self._named, PADDING, out=bad).logical_and_(undrawn)
        index.masked_fill_(undrawn, none)
        vars(self)["_is_resolved"] = True  # last, because an exception may come anywhere
        return self._slot_rows

    @property
    def _index(self) -> Tensor:
        return self._resolved.slots

    @property
    def _undrawn_rows(self) -> Undrawn:
        return self._resolved.undrawn

    def _repeated(self, times: int) -> Selection:
        """Return a selection that repeats each row `times` times, in memory that is kept."""
        repeated, known = self._repeats.get(times), self._known
        if repeated is None:
            repeated = Selection(self._batch, self._table, self.rows * times)
            if not capturing(self.device):  # what a graph makes is there in its replays alone
                self._repeats[times] = repeated
        vars(repeated).update(
            _is_resolved=True,
            _known=None if known is None else [slot for slot in known for _ in range(times)],
        )
        targets, sources = (
            (rows.slots, *rows.undrawn, rows.temperature, rows.seed)
            for rows in (repeated._slot_rows, self._resolved)
        )
        for target, source in zip(targets, sources, strict=True):
            target.view(self.rows, times).copy_(source.unsqueeze(1))
        return repeated

    def _pick_any(self, name: str, table: Tensor) -> Tensor:
        """Return the entry of a table [n, …] for each row; the last entry for an undrawn row.

        A mask may have fewer rows than there are slots, but every drawn row's slot is below n.
        """
        inside = self._scratch.take("inside", torch.int64, self.rows)
        torch.clamp(self._index, max=len(table) - 1, out=inside)
        return self._scratch.pick(name, table, inside)

    def __copy__(self) -> Selection:
        """Return a selection of the same batch, with memory and masks of its own."""
        of_batch = self._batch, self._table, self._moving
        return copy.deepcopy(self, {id(shared): shared for shared in of_batch})

    @property
    def temperature(self) -> Tensor:
        """fp32 [B], read of the batch. To change one, write to the batch."""
        return self._copy_of("temperature", self._table.temperature)

    @property
    def seed(self) -> Tensor:
        """int64 [B], 64 bits, read of the batch as `temperature` is."""
        return self._copy_of("seed", self._table.seed)

    def _copy_of(self, name: str, table: Tensor) -> Tensor:
        """Return a column of the table for each row, unless a caller wrote to the last copy."""
        self._refuse_written(name)
        out: Tensor = getattr(self._resolved, name)
        torch.index_select(table, 0, self._index, out=out)
        self._versions[name] = out._version
        return out

    def _refuse_written(self, *names: str) -> None:
        """Raise a ValueError if a caller wrote to the last copy of a column: nothing reads that."""
        for name in names or tuple(self._versions):
            before = getattr(self._slot_rows, name)._version
            if self._versions.pop(name, before) != before:
                raise ValueError(
                    f"selection.{name}: is a copy of the batch's, so nothing reads what was "
                    f"written to it; write batch.{name}[slots] = values"
                )

    @property
    def plan(self) -> BatchPlan:
        """The plan of the batch."""
        return self._batch.plan

    def _for_rows(self, num_rows: int, masked_rows: int | None = None) -> Selection:
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got a "
                f"selection of {self.rows} slots; pad slots with -1"
            )
        self._table.require_places()
        if self._version != self._table.version:
            raise ValueError(
                "batch: requests joined, left, moved or changed since this selection was made; "
                "call batch.select again"
            )
        if masked_rows is not None and (self._assigned or self._batch._assigned):
            self._check_masks(masked_rows)
        return self

    def _read(self, times: int = 1) -> BatchView:
        vars(self).update(_has_stepped=True, _was_reselected=False)
        rows = self if times == 1 else self._repeated(times)
        plan = rows._plan_that_stores() if rows._stores_logits else rows._plain_plan
        _, undrawn, temperature, seed = rows._slot_rows
        return BatchView(temperature, seed, plan, self._controls(), undrawn)

    @cached_property
    def _plain_plan(self) -> BatchPlan:
        """The plan of rows without filters and logprobs."""
        return BatchPlan(self.rows, self.vocab_size, self.device)

    def _plan_that_stores(self) -> BatchPlan:
        """Return the plan of rows that may have filters or logprobs."""
        table, kept_cap = self._table, self._options["kept_cap"]
        reads = readable(self.device)
        slots = self._index.tolist() if reads else None if capturing(self.device) else self._known
        if slots is not None:
            fixed = self._options["fixed_rounds"] and not reads
            key, plans = (fixed, *slots), table.plans
            if key not in plans:
                if len(plans) == MOST_PLANS:
                    plans.clear()
                of_slots = slots, table.entries_of(slots)
                plans[key] = table.plan(*of_slots, kept_cap=kept_cap, fixed_rounds=fixed)
            return plans[key]
        return BatchPlan(
            self.rows,
            self.vocab_size,
            self.device,
            *self._filtered(),
            kept_cap=kept_cap,
            fixed_rounds=True,
            stores_all=True,
            numbers=(self._numbers, self._stored_numbers),
        )

    def _filtered(self) -> tuple[RowFilters | None, LogprobRows | None]:
        """Return the filters and logprobs of all rows, None where no slot has some."""
        table, filters, rows = self._table, None, self._numbers
        (row_filters, top, in_processed_mode), every = table.batch_features, list(range(self.rows))
        numbers = self._scratch.pick("numbers", table.numbers, self._padded, dim=1)
        if row_filters or self._options["kept_cap"] is not None:
            kinds = [keeps_all(self.vocab_size), *row_filters]
            filters = RowFilters(rows, every, numbers, kinds, known=False)
        if top < 0:
            return filters, None
        bits = self._scratch.take("bits", torch.bool, TOP - ASKS, self.rows)
        asks, processed, as_logits = torch.ne(numbers[ASKS:TOP, : self.rows], 0, out=bits)
        chosen = self._scratch.pick("chosen", table.chosen, self._index)
        top_of = numbers[TOP, : self.rows]
        modes = [in_processed_mode] * self.rows
        return filters, LogprobRows(
            every, rows, top, top_of, chosen, modes, processed, as_logits, asks
        )

    def _state_slots(self) -> Tensor:
        return self._scratch.pick("state slots", self._table.numbers[STATE], self._index)

    def _note_append(self, token_ids: Tensor) -> None:
        self._for_rows(len(token_ids))
        if self._was_reselected and self._table.controls is not None:
            raise ValueError(
                "token_ids: select(out=) took other slots since the step that these are of; append "
                "each step's tokens before the next select"
            )
        vars(self)["_has_stepped"] = False

    def _binding(self) -> dict[str, Mask]:
        return self._batch._assigned | self._assigned

    def _by_slot(self) -> dict[str, Tensor]:
        """Return the masks of the batch, one row per slot, that this selection does not override.
        A mask without rows is left out."""
        assigned, own = self._batch._assigned, self._assigned
        masks = {name: mask.tensor for name, mask in assigned.items() if name not in own}
        return {name: mask for name, mask in masks.items() if len(mask)}

    def _masks(self) -> dict[str, Tensor]:
        if not self._assigned and not self._batch._assigned:
            return {}
        by_slot, own = self._by_slot(), super()._masks()
        return own | {name: self._pick_any(name, mask) for name, mask in by_slot.items()}

    def _check_masks(self, num_rows: int) -> None:
        left = list(self._by_slot())
        if left:
            self._batch._check_masks(self._batch.rows)
        if left and num_rows != self.rows:
            raise ValueError(
                f"batch.{left[0]}: has a row per slot, but a verification needs one per position; "
                "assign one to the selection"
            )
        super()._check_masks(num_rows)

    def _state(self) -> dict[str, object]:
        undrawn, bad = self._undrawn_rows
        # Of rows that are not drawn only the status counts.
        return {"slots": self._index.where(~undrawn, -1 - bad.long()), **super()._state()}


def _numbers_of(host: Any, slots: Tensor) -> list[int]:
    """Return the slots as the host has them.

    Raises:
        TypeError, ValueError: no integers, a wrong number of them, or on a CPU other values than in
            `slots`.
    """
    elsewhere = isinstance(host, Tensor) and host.device.type != "cpu"  # to read it would wait
    listed = host.tolist() if hasattr(host, "tolist") and not elsewhere else host
    if elsewhere or not lists_in_order(listed) or not all(map(is_integer, listed := list(listed))):
        raise TypeError(
            "host: expected the numbers of slots as a list, an array or a tensor on the host, got "
            f"{describe(host)}"
        )
    numbers = [int(number) for number in listed]
    if len(numbers) != slots.shape[0] or (readable(slots.device) and numbers != slots.tolist()):
        raise ValueError(
            f"host: expected the {slots.shape[0]} numbers that slots has, got {describe(numbers)}; "
            "leave it out where the host does not have them"
        )
    return numbers
