"""The rows of a call: those of a batch, or some slots of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tpsample.core.caller_warning import warn
from tpsample.core.checks import check_tensor, describe
from tpsample.core.row_noise import SeedSource
from tpsample.core.sealed import Sealed
from tpsample.core.tensors import KeepsTensors, bytes_of
from tpsample.core.vocab_shard import VocabShard
from tpsample.output import SampleOutput, VerifyOutput
from tpsample.request.controls.apply import ControlRows
from tpsample.request.controls.tables import num_words
from tpsample.request.moving_on import APPENDED_AGAIN, Mask, MovingOn, SteppedRows
from tpsample.request.plan import BatchPlan, BatchView, SlotRows, Undrawn
from tpsample.request.table import RequestTable

ReadSlots = Callable[[Tensor, RequestTable, SlotRows], None]
"""Its arguments are slots int64 [B], their table, and the rows that it fills; see `.selection`."""


class StepBatch(KeepsTensors, Sealed, ABC):
    """The rows of a call: the interface that its checks and its step use.

    Attributes:
        vocab_size: V.
        device: of all tensors.
        rows: B.
    """

    rows: int
    _FIXED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("vocab_size", "device", "rows", "max_rows"), "build a new batch"),
        **dict.fromkeys(
            ("requests", "plan", "unseeded", "capture_key"),
            "call update, add, drop or arrange to change the requests",
        ),
        "temperature": "it stays in its place; write batch.temperature[:] = values",
        "seed": "it stays in its place; write batch.seed[:] = values",
    }

    _names_slots = False  # whether the rows are slots of another batch, which may not be drawn
    _lacks_output = False  # whether rows look at their output, on a CPU, and came without any

    def __init__(
        self, table: RequestTable, options: dict[str, Any], moving: MovingOn | None = None
    ) -> None:
        self.vocab_size, self.device, self._table = table.vocab_size, table.device, table
        self._options = options  # kept_cap and fixed_rounds of `BatchPlan`
        self._assigned: dict[str, Mask] = {}
        self._moving = MovingOn() if moving is None else moving

    def __deepcopy__(self, memo: dict[int, Any]) -> StepBatch:
        with self._table.thread:
            return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        with self._table.thread:
            return vars(self)

    def _of_others(self, state: dict[str, Any]) -> dict[int, Any]:
        return {id(mask.tensor): mask.tensor for mask in state["_assigned"].values()}

    @property
    @abstractmethod
    def temperature(self) -> Tensor:
        """fp32 [B]; below 1e-5 the row is greedy."""

    @property
    @abstractmethod
    def seed(self) -> Tensor:
        """int64 [B], 64 bits."""

    @property
    @abstractmethod
    def plan(self) -> BatchPlan:
        """How a step treats the requests; ranks compare it."""

    @property
    def unseeded(self) -> list[int]:
        """The slots that still wait for their seed, which are the rows of a whole batch."""
        return self._table.unseeded

    @property
    def _stores_logits(self) -> bool:
        """Whether a step keeps logits of some of these rows on their ranks."""
        return self._table.stores_logits or self._options["kept_cap"] is not None

    @abstractmethod
    def _for_rows(self, num_rows: int, masked_rows: int | None = None) -> StepBatch:
        """Return the batch of so many rows.

        Args:
            masked_rows: rows that masks must have. Default: they are not looked at.

        Raises:
            ValueError: this one has other rows, or masks of other rows than it has now.
        """

    def prepare(self, shard: VocabShard) -> None:
        """Make the state of a shard, for a sampler that comes after tokens have been appended.

        Raises:
            TypeError: not a VocabShard.
            ValueError: a shard that reaches past V, or one whose counts are no longer known.
        """
        if not isinstance(shard, VocabShard):
            raise TypeError(f"shard: expected a VocabShard, got {describe(shard)}")
        if shard.stop > self.vocab_size:
            raise ValueError(f"shard: {shard} reaches past vocab_size={self.vocab_size}")
        with self._table.thread:
            if self._table.controls is not None:
                self._table.controls.state(shard)

    def _draw_seeds(self, source: SeedSource) -> None:
        """Give every row without a seed the next one of `source`."""
        with self._table.thread:
            if self._table.unseeded:
                self._table.draw_seeds(source)

    @abstractmethod
    def _read(self, times: int = 1) -> BatchView:
        """Return the view that a step reads, without any check, not even of the rows of masks.

        Args:
            times: how often each row is repeated, once per drafted position.
        """

    def _read_slots(self, read: ReadSlots | None = None) -> None:
        """Read the slots that the rows name, for a step that begins now.

        Args:
            read: how. Default: by operators of torch.
        """

    @property
    def _index(self) -> Tensor | None:
        """int64 [B], the slots that the rows of a selection read."""
        return None

    @property
    def _undrawn_rows(self) -> Undrawn | None:
        """The rows of a selection that are not drawn."""
        return None

    @abstractmethod
    def _state_slots(self) -> Tensor:
        """Return int64 [B], where the controls of each row are."""

    def _view_of(self, num_rows: int) -> BatchView:
        """Return the view that a step of `num_rows` rows reads.

        Raises:
            ValueError: the batch has another number of rows, or a grammar bitmask or forced ids do
                not fit the rows it has now.
        """
        with self._table.thread:
            rows = self._for_rows(num_rows, num_rows)
            rows._read_slots()
            return rows._read()

    def _with_drafts(self, draft_token_ids: Tensor, *, is_read: bool = False) -> BatchView:
        """Return the view of a verification: row b · (K + 1) + i is row b after i of its K drafts.

        Penalties, bad_words and min_tokens see these drafts, int64 [B, K] with -1 after a row's
        last, as output; the batch itself does not change. A grammar bitmask and forced ids must be
        of all B · (K + 1) rows.

        Args:
            is_read: whether `_read_slots` was called for these rows just now.

        Raises:
            ValueError: another shape or dtype, rows without a seed, or masks of other rows.
        """
        shape = self.rows, "K"
        check_tensor("draft_token_ids", draft_token_ids, (torch.int64,), shape, self.device)
        if self.unseeded:
            raise ValueError("batch: rows without a seed; draw them first, see draw_seeds")
        times = draft_token_ids.shape[1] + 1
        rows = self._for_rows(self.rows, times * self.rows)
        if not is_read:
            rows._read_slots()
        view = rows._read(times)
        if view.controls is None:
            return view
        controls = view.controls.after_drafts(draft_token_ids.to(torch.int32))
        return view._replace(controls=controls)

    def append(self, token_ids: Tensor | SampleOutput | VerifyOutput) -> None:
        """Count the tokens of a step as output of its rows, on the device.

        Args:
            token_ids: what the step or the verification returned, or int64 [B], or [B, n] for
                several tokens per row in order; an id outside [0, V), such as -1, is none. Those of
                rows that were not drawn are passed over.

        Raises:
            ValueError: another shape, dtype or device; the alternatives of `num_samples`; what a
                step wrote for rows that have moved since, or for a selection of the batch; or a
                selection of a batch that has changed, or of other slots than those of the step.
        """
        if isinstance(token_ids, (SampleOutput, VerifyOutput)):
            token_ids = token_ids.token_ids
        samples = self._moving.num_samples
        if samples > 1 and getattr(token_ids, "shape", ())[1:] == (samples,):
            raise ValueError(
                f"token_ids: got the {samples} samples of each row, which are alternatives and no "
                "text; append the one that goes on, such as out.token_ids[:, 0]"
            )
        shape = "Bn" if getattr(token_ids, "ndim", 1) == 2 else "B"
        check_tensor("token_ids", token_ids, (torch.int64,), shape, self.device, ", or [B, n]")
        with self._table.thread.changing():  # one at a time, in the batch and its selections
            self._note_append(token_ids)
            controls, moving = self._table.controls, self._moving
            if moving.needing_append is not None:
                moving.append(token_ids, self.vocab_size, of_slots=self._names_slots)
            if controls is not None and controls.looks_at_output:
                columns = token_ids.unsqueeze(1) if token_ids.ndim == 1 else token_ids
                controls.append(self._state_slots(), columns)
                # Rows of a whole batch are followed by their positions, in the next step.
                if self._names_slots and moving.counts_twice(token_ids):
                    warn(APPENDED_AGAIN)

    def _note_append(self, token_ids: Tensor) -> None:
        """Note that tokens [B, ...] are appended; a ValueError if they are of other rows."""

    def _note_tokens(self, token_ids: Tensor) -> None:
        """Note where a step of these rows writes its tokens."""
        self._moving.note_tokens(token_ids, self._table.moves, of_slots=self._names_slots)

    def _note_step(
        self, sampler: object, inputs: Tensor, positions: Tensor, now: bytes, num_samples: int
    ) -> None:
        """Warn once of each thing that should have changed since the last step; see `.moving_on`.

        Args:
            sampler: the sampler's pipeline.
            inputs: hidden states or logits [B, …].
            positions: int64 [B].
            now: the positions as bytes; empty where the host does not read them.
            num_samples: draws per row.
        """
        self._moving.num_samples = num_samples
        if not now:
            return
        slots, masks = b"", self._assigned
        index = self._index
        if index is not None:
            slots, masks = bytes_of(index), self._binding()
        now, table = slots + now, self._table
        written = 0 if slots else table.temperature._version + table.numbers._version
        if not masks and self._moving.has_moved(now, id(sampler), table.version, written):
            return
        rows = SteppedRows(id(sampler), inputs, positions, slots, self, masks, written)
        for text in self._moving.step(rows, now, self._table.version):
            warn(text)

    def _out_of_range(self) -> Iterator[tuple[str, str]]:
        """Yield a name and a warning for each number that was written and is out of its range."""
        for row, temperature in enumerate(self.temperature.tolist()):
            if not temperature >= 0:
                yield (
                    "temperature",
                    f"batch.temperature: row {row} has {temperature:.9g}, which counts as 0, so "
                    "the most likely token is taken; write 0 where that is meant",
                )

    @property
    def grammar_bitmask(self) -> Tensor | None:
        """int32 [B, ceil(V / 32)]: bit v % 32 of word v // 32 allows id v. None: no grammar.

        This is the layout of grammar engines; a row without a grammar has all bits set (-1). The
        tensor is kept by reference: write the next step's bits into it, or assign another. On a CPU
        one that binds a step at other positions as it was is warned of once; where it holds, assign
        it again. It is the same on every rank. After rows joined, left, moved or changed, assign it
        anew before the next step. For `verify` it has a row for each of the B · (K + 1) positions.
        Without one, a row of a selection has the bits that the mask of its batch has for its slot.
        """
        return self._own_mask("grammar_bitmask")

    @grammar_bitmask.setter
    def grammar_bitmask(self, bitmask: Tensor | None) -> None:
        self._assign("grammar_bitmask", bitmask)

    @property
    def forced_token_ids(self) -> Tensor | None:
        """int64 [B]: the only id a row may draw in the next step, -1 for any. None: no row's.

        A forced id overrides every other mask; one that is neither -1 nor in [0, V) leaves no id
        (EMPTY). The tensor is kept by reference, with rows as those of `grammar_bitmask`, and is
        assigned as that is.
        """
        return self._own_mask("forced_token_ids")

    @forced_token_ids.setter
    def forced_token_ids(self, forced: Tensor | None) -> None:
        self._assign("forced_token_ids", forced)

    def _assign(self, name: str, mask: Tensor | None) -> None:
        if mask is None:
            self._assigned.pop(name, None)
            return
        self._check_mask(name, mask, shown=name)
        if len(mask) < self.rows:
            raise ValueError(f"{name}: expected {self.rows} rows or more, got {describe(mask)}")
        self._table.make_controls()
        self._assigned[name] = Mask(mask, self._table.version)

    def _check_mask(self, name: str, mask: Tensor, *, shown: str) -> None:
        """Raise a ValueError unless a step can read a mask, which the message calls `shown`."""
        of_ids = name == "forced_token_ids"
        dtype, width = (torch.int64, ()) if of_ids else (torch.int32, (num_words(self.vocab_size),))
        check_tensor(shown, mask, (dtype,), ("B", *width), self.device)
        if mask.shape[-1] > 1 and mask.stride(-1) != 1:
            raise ValueError(
                f"{shown}: expected a contiguous last axis, got {describe(mask)} with strides "
                f"{mask.stride()}; call .contiguous()"
            )

    def _check_masks(self, num_rows: int) -> None:
        """Raise a ValueError if a mask has not `num_rows` rows, or was assigned for other rows.

        The caller may have resized or freed the tensor since it was assigned.
        """
        for name, mask in self._assigned.items():
            self._check_mask(name, mask.tensor, shown=f"batch.{name}")
            if mask.version != self._table.version:
                raise ValueError(
                    f"batch.{name}: rows of the batch joined, left, moved or changed since it was "
                    "assigned; assign it anew, or None"
                )
            if len(mask.tensor) != num_rows:
                raise ValueError(
                    f"batch.{name}: expected a row for each of the {num_rows} rows of the step, "
                    f"got {len(mask.tensor)}; assign another"
                )

    def _binding(self) -> dict[str, Mask]:
        """Return the masks that bind the rows, as they were assigned."""
        return self._assigned

    def _own_mask(self, name: str) -> Tensor | None:
        return self._assigned[name].tensor if name in self._assigned else None

    def _masks(self) -> dict[str, Tensor]:
        """Return the masks that bind the rows, by name."""
        return {name: mask.tensor for name, mask in self._assigned.items()}

    def _controls(self) -> ControlRows | None:
        """Return penalties and constraints of the rows, None if no row ever had some."""
        tables = self._table.controls
        if tables is None:
            return None
        masks = self._masks()
        if not (masks or tables.has_penalties or tables.has_bias or tables.has_masks):
            return None
        bitmask, forced = masks.get("grammar_bitmask"), masks.get("forced_token_ids")
        return ControlRows(tables, self._state_slots(), bitmask, forced)

    def _state(self) -> dict[str, object]:
        """Return what the ranks compare beside plan, seeds and temperatures, by name.

        The values are tensors with a row per row of the batch, or are compared by `str`.
        """
        state: dict[str, object] = dict(self._masks())
        if self._table.controls is not None:
            state["tokens so far"] = self._table.controls.token_digest[self._state_slots()]
        return state


def require_batch(batch: object) -> None:
    """Raise a TypeError unless a value is a batch, or a view of its rows."""
    if not isinstance(batch, (StepBatch, BatchView)):
        raise TypeError(
            f"batch: expected a SamplingBatch, got {type(batch).__name__}; "
            "see SamplingBatch.from_params"
        )
