"""Positions, tokens so far and masks have to move on from one step to the next.

A token that was drawn by such a mistake looks like any other. So each step of a batch is compared
with the step before it, and a mistake is warned of once. The comparison reads tensors on the host.
On a GPU that would wait, so nothing is compared there. A step at the same positions may be a trial
of the same step, which is no mistake.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tpsample.core.row_noise import GREEDY_BELOW
from tpsample.core.tensors import bytes_of, capturing, readable

_ALL = b"\xff"
"""Bytes of a mask that forbids nothing, whose numbers are all -1."""


LOOKS = 3
"""How many steps look at numbers that were written in place, because an engine may always do so."""


class HasNoise(Protocol):
    """The part of a batch that decides the noise of its rows."""

    @property
    def seed(self) -> Tensor:
        """int64 [B]."""

    @property
    def temperature(self) -> Tensor:
        """fp32 [B]."""

    def _out_of_range(self) -> Iterator[tuple[str, str]]:
        """Yield a name and a warning for each number that is out of its range."""


class SteppedRows(NamedTuple):
    """A step as its batch sees it.

    Attributes:
        sampler: the `id` of the sampler's pipeline. A target and its drafter share a batch, and
            draw at the same positions on purpose.
        inputs: hidden states or logits [B, …].
        positions: int64 [B].
        slots: the slots of a selection, as bytes; empty for a whole batch.
        batch: the source of seeds and temperatures, which are read only where they are needed.
        masks: the masks that bind the rows, by name.
        written: a number that changes when seeds or temperatures are written in place.
    """

    sampler: int
    inputs: Tensor
    positions: Tensor
    slots: bytes
    batch: HasNoise
    masks: dict[str, Mask]
    written: int


class Mask:
    """A grammar bitmask or forced ids, as the caller assigned them.

    Attributes:
        tensor: the caller's, by reference.
        version: of the table that it was assigned to.
    """

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor, self.version = tensor, version
        self._at = self._seen = b""
        self._is_looked_at = readable(tensor.device)

    def is_left_over(self, now: bytes) -> bool:
        """Return whether the mask binds a second step, at other positions, with the same bits.

        Only the first two steps are compared, because a grammar engine may write the same bits
        again. A mask that forbids nothing is never left over.
        """
        if not self._is_looked_at:
            return False
        if not self._at:
            self._at, self._seen = now, bytes_of(self.tensor)
        elif now != self._at:
            self._is_looked_at = False
            return self._seen == bytes_of(self.tensor) and bool(self._seen.strip(_ALL))
        return False


class Drawn(NamedTuple):
    """The tokens of a step.

    Attributes:
        token_ids: the tensor that they are in, as long as the caller has it.
        moves: how often rows had moved by then.
        of_slots: whether a selection took the step.
        is_counted: whether they were appended.
    """

    token_ids: weakref.ref[Tensor]
    moves: int
    of_slots: bool
    is_counted: bool = False


class MovingOn:
    """The last step of a batch, and what was appended since.

    Attributes:
        num_samples: draws per row of the last step.
        needing_append: int64, the rows of the batch whose logits depend on their tokens so far;
            None on a GPU, or if there are none. Appends to selections are not followed.
        known: int64, how many tokens each of these rows had when its request came. A step at an
            earlier position is a chunk that does not end them, whose token is dropped.
    """

    needing_append: Tensor | None
    known: Tensor | None

    def __init__(self) -> None:
        self.num_samples, self.needing_append, self.known = 1, None, None
        self._drawn: Drawn | None = None
        self._is_captured = False
        self._warned: set[str] = set()
        self._version = self._written = -1
        self._looks = LOOKS
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_drawn": None}  # a copy of the batch has drawn nothing

    def note_tokens(self, token_ids: Tensor, moves: int, *, of_slots: bool) -> None:
        """Note where a step writes its tokens. Replays of a captured step cannot be seen, so after
        a capture nothing is checked any more."""
        self._is_captured = self._is_captured or capturing(token_ids.device)
        self._drawn = Drawn(weakref.ref(token_ids), moves, of_slots)

    def check_rows(self, token_ids: Tensor, moves: int) -> None:
        """Raise a ValueError for tokens of the last step if its rows are no longer the batch's."""
        drawn = self._drawn
        if drawn is None or self._is_captured or drawn.token_ids() is not token_ids:
            return
        if drawn.of_slots:
            raise ValueError(_OF_A_SELECTION)
        if drawn.moves != moves:
            raise ValueError(_MOVED)

    def counts_twice(self, token_ids: Tensor) -> bool:
        """Note that tokens are appended; return whether they are those of the last step for a
        second time, which is told once."""
        drawn = self._drawn
        if drawn is None or self._is_captured or drawn.token_ids() is not token_ids:
            return False
        self._drawn = drawn._replace(is_counted=True)
        return drawn.is_counted and self._is_new("appends")

    def forget(self) -> None:
        """Begin anew, because rows joined, left, moved or changed."""
        self._first = self._last = self._seeds = b""
        self._sampler = self._first_sampler = self._times = 0
        self._first_inputs: Tensor | None = None  # a column of them
        self._positions: Tensor | None = None  # of the last step
        self._appended: Tensor | None = None  # int64 [B], how many tokens since

    def has_stepped(self, version: int) -> bool:
        """Return whether a step was noted since the rows changed."""
        return version == self._version

    def has_moved(self, now: bytes, sampler: int, version: int, written: int) -> bool:
        """Note a step without masks, and return True, if its positions show that it moved on.

        They do if they differ from those of the last and of the first step, as nearly always.
        Otherwise return False, so that `step` looks closer.

        Args:
            now: the slots of a selection and the positions, as bytes.
            sampler, written: as in `SteppedRows`.
            version: of the table.
        """
        if (
            now in (self._last, self._first)
            or version != self._version
            or self.needing_append is not None
        ):
            return False
        if written != self._written and self._looks:
            return False
        self._last, self._sampler, self._times = now, sampler, 0
        return True

    def step(self, rows: SteppedRows, now: bytes, version: int) -> list[str]:
        """Note another step, and return the texts of its warnings.

        Args:
            now, version: as in `has_moved`.
        """
        if version != self._version:
            self._version = version
            self.forget()
        return [text for name, text in self._mistakes(rows, now) if self._is_new(name)]

    def append(self, token_ids: Tensor, vocab_size: int, *, of_slots: bool) -> None:
        """Note that tokens [B] or [B, n] on a CPU are appended to a batch with needing_append rows.

        Args:
            of_slots: whether they are appended to a selection.
        """
        if of_slots or (self._positions is not None and len(token_ids) != len(self._positions)):
            self._positions = self._appended = None  # rows joined or left since the step
        elif self._positions is not None:
            there = (token_ids >= 0) & (token_ids < vocab_size)
            count = there.sum(dim=1) if there.ndim == 2 else there.long()
            self._appended = count if self._appended is None else self._appended + count

    def _is_new(self, name: str) -> bool:
        new = name not in self._warned
        self._warned.add(name)
        return new

    def _mistakes(self, rows: SteppedRows, now: bytes) -> Iterator[tuple[str, str]]:
        if not self._first or (rows.written != self._written and self._looks):
            self._looks -= bool(self._first)
            if (pair := _same_noise(rows)) is not None:
                yield "seeds", _SAME_NOISE.format(*pair)
            yield from rows.batch._out_of_range()
        self._written = rows.written
        if not self._first:
            self._first, self._first_inputs = now, rows.inputs[..., :1].detach().clone()
            self._first_sampler, self._seeds = rows.sampler, bytes_of(rows.batch.seed)
        elif now == self._last and rows.sampler == self._sampler:
            self._times += 1
            if self._times > 1 and self._draws_again(rows):
                yield "positions", _POSITIONS
        elif now == self._first and self._last != now and rows.sampler == self._first_sampler:
            first = self._first_inputs
            same = first is not None and torch.equal(first, rows.inputs[..., :1])
            if not same and self._draws_again(rows):
                yield "positions", _POSITIONS
        if now != self._last:
            self._times = 0
        self._last, self._sampler = now, rows.sampler

        for name, mask in rows.masks.items():
            if mask.is_left_over(now):
                yield name, _LEFT_OVER.format(name)
        if rows.slots:  # other rows than those of the last step
            self._positions = None
        elif self.needing_append is not None:
            yield from self._missing_or_twice(rows)

    def _draws_again(self, rows: SteppedRows) -> bool:
        """Return whether the seeds are those of the last look, and a row is random.

        The seeds are kept for the next look. After the warning was given nothing is compared.
        """
        if "positions" in self._warned:
            return False
        before, self._seeds = self._seeds, bytes_of(rows.batch.seed)
        return before == self._seeds and bool((rows.batch.temperature >= GREEDY_BELOW).any())

    def _missing_or_twice(self, rows: SteppedRows) -> Iterator[tuple[str, str]]:
        appended = self._appended
        if self._positions is not None:
            moved = rows.positions - self._positions
            if appended is None:
                assert self.known is not None
                ended = self._positions[self.needing_append] >= self.known
                if bool((moved > 0).all()) and bool(ended.any()):
                    yield "appends", _NOT_APPENDED
            elif bool((appended > moved)[self.needing_append].any()):
                yield "appends", _APPENDED_TWICE
        self._positions, self._appended = rows.positions.clone(), None


class Rebuilt:
    """Notices that a batch is built anew for each step, without its output. One per sampler."""

    def __init__(self) -> None:
        self._batch: weakref.ref[object] | None = None
        self._seeds, self._positions, self._times = b"", torch.empty(0), 0

    def is_forgetful(self, batch: object, seed: Tensor, positions: Tensor) -> bool:
        """Return whether a third new batch in a row continues the batch before it.

        Args:
            batch: a batch whose rows look at their output, and have none yet.
        """
        last = None if self._batch is None else self._batch()
        seeds = bytes_of(seed)
        goes_on = batch is not last and seeds == self._seeds
        goes_on = goes_on and torch.equal(positions, self._positions + 1)
        self._times = self._times + 1 if goes_on else 0
        self._batch, self._seeds = weakref.ref(batch), seeds
        self._positions = positions.clone()
        return self._times == 2


def _same_noise(rows: SteppedRows) -> tuple[int, int] | None:
    """Return the first two random rows that have the same seed and position."""
    seen: dict[tuple[int, int], int] = {}
    columns = rows.batch.seed.tolist(), rows.positions.tolist(), rows.batch.temperature.tolist()
    for row, (seed, position, temperature) in enumerate(zip(*columns, strict=True)):
        if temperature >= GREEDY_BELOW and seen.setdefault((seed, position), row) != row:
            return seen[seed, position], row
    return None


_POSITIONS = (
    "positions: the rows draw again at positions at which they have drawn before, with the same "
    "seeds, so with the same noise; pass the index of the token being generated, the number of "
    "tokens before it, which differs from step to step"
)
_SAME_NOISE = (
    "batch: rows {} and {} have the same seed and position, so they draw the same noise; give each "
    "request a seed of its own, as SamplingParams.fork does, or None"
)
_LEFT_OVER = (
    "batch.{0}: what was assigned for an earlier step binds a step at other positions, unchanged; "
    "assign that of each step before it, the same tensor again where it holds, or None"
)
_NOT_APPENDED = (
    "batch: a step at later positions, and no token was appended since the last one, so penalties, "
    "bad_words and min_tokens do not see it; call batch.append(out.token_ids) after each step, and "
    "let a drafter draw of copy.copy(batch) and append its drafts to that"
)
_APPENDED_TWICE = (
    "batch: more tokens were appended since the last step than positions have moved on, so "
    "penalties, bad_words and min_tokens count some twice; append each step's tokens once"
)
APPENDED_AGAIN = (
    "token_ids: those of the last step were appended before, so penalties, bad_words and "
    "min_tokens count them twice; append each step's tokens once"
)
_OF_A_SELECTION = (
    "token_ids: expected those of a step of the whole batch, got those of a selection, whose rows "
    "have an order of their own; call append of the selection"
)
_MOVED = (
    "token_ids: expected those of the rows as they are, got those of a step before rows left or "
    "moved; append each step's tokens before rows move, or pick those of the rows that are there, "
    "such as token_ids[order]"
)
REBUILT = (
    "batch: built anew for each step, and without output_token_ids, so penalties, bad_words and "
    "min_tokens see no output; keep one batch and append to it, or pass output_token_ids="
)
