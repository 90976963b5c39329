"""How the requests of a batch come, go, move and change."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from tpsample.core.checks import describe
from tpsample.core.tensors import readable
from tpsample.request.batch_checks import (
    check_arranged,
    check_order,
    check_requests,
    check_rows,
)
from tpsample.request.entries import NO_REQUEST, STATE, Entry
from tpsample.request.params import SamplingParams
from tpsample.request.step_batch import StepBatch
from tpsample.request.table import RequestTable

Tokens = Sequence[Sequence[int]] | None


class ChangingRows(StepBatch):
    """The part of `SamplingBatch` that changes its rows, which are the slots of its table.

    The slot of a row is its index, until `drop`, `permute` or `arrange` moves rows. A change makes
    another version of the rows, so selections and masks of the rows before are refused.
    """

    def __init__(self, table: RequestTable) -> None:
        super().__init__(table)
        self.max_rows = table.slots
        self._dropped, self._drop_told = (-1, 0), False  # the version after it, and its first row

    @property
    def temperature(self) -> Tensor:
        """fp32 [B]; below 1e-5 the row is greedy. It may be written in place."""
        return self._table.row_temperature

    @property
    def seed(self) -> Tensor:
        """int64 [B], 64 bits. It may be written in place."""
        return self._table.row_seed

    @property
    def requests(self) -> tuple[SamplingParams, ...]:
        """The requests of the rows, in order. `update` replaces one."""
        return tuple([entry.params for entry in self._table.entries])

    def add(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> int:
        """Let a request join as the last row, and return its index.

        Raises:
            TypeError, ValueError: as `from_params`; or all `max_rows` rows are taken.
        """
        prompts = None if prompt_token_ids is None else [prompt_token_ids]
        tokens = prompts, [output_token_ids]
        checked = check_requests(self.rows, [params], *tokens, self.vocab_size)
        self._arrange(list(range(self.rows + 1)), checked)
        return self.rows - 1

    def drop(self, rows: int | Sequence[int]) -> None:
        """Let rows leave. The others close up and keep their order.

        Name all rows that leave in one call, ``batch.drop([0, 2])``. After ``batch.drop(0)`` row 2
        has become row 1.

        Raises:
            TypeError, ValueError: a row that is not there.
        """
        gone = set(check_rows("drop", rows, self.rows))
        self._warn_of_moved(gone)
        self._arrange([row for row in range(self.rows) if row not in gone], [])
        self._dropped = self._table.version, min(gone, default=self.rows)

    def _warn_of_moved(self, gone: set[int]) -> None:
        """Warn once of rows that leave behind others that left just before, so that they moved."""
        version, first = self._dropped
        if version != self._table.version or self._moving.has_stepped(version):
            return
        if readable(self.device) and not self._drop_told and max(gone, default=first) > first:
            self._drop_told = True
            warnings.warn(
                f"drop: rows {sorted(gone)} leave after row {first} has left, so they are not the "
                f"rows that had these numbers before; name all that leave in one call, such as "
                f"batch.drop([{first}, {max(gone)}])",
                stacklevel=3,
            )

    def permute(self, order: Sequence[int]) -> None:
        """Make row ``order[i]`` row i.

        Raises:
            TypeError, ValueError: `order` is not a permutation of the rows.
        """
        self._arrange(check_order(order, self.rows), [])

    def arrange(
        self,
        order: Sequence[int],
        joining: Sequence[SamplingParams] = (),
        *,
        prompt_token_ids: Tokens = None,
        output_token_ids: Tokens = None,
    ) -> None:
        """Let rows leave, join and move in one pass, as an engine's batch does between two steps.

            batch.arrange([2, 0, 4], [params])  # of 4 rows 1 and 3 leave, and one joins after 0

        Args:
            order: the row that each new row was: one of the batch's B rows, or B + i for the
                joining request i, which must be named. Rows that are not named leave.
            joining: requests that join.
            prompt_token_ids, output_token_ids: of the joining requests, as in `from_params`.

        Raises:
            TypeError, ValueError: as `from_params`; a row named twice, or one that is not there;
                or more than `max_rows` rows.
        """
        tokens = prompt_token_ids, output_token_ids
        checked = check_requests(self.rows, joining, *tokens, self.vocab_size)
        self._arrange(check_arranged(order, self.rows, len(checked)), checked)

    def update(
        self,
        row: int,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        output_token_ids: Sequence[int] | None = None,
        **fields: NoReturn,
    ) -> None:
        """Replace the request of a row, and its tokens so far if the request looks at them.

        Args:
            params: a whole request; a field by itself is refused with the call that sets it.

        Raises:
            TypeError, ValueError: as `from_params`; or tokens so far are needed and missing.
        """
        (row,) = check_rows("update", [row], self.rows)
        if fields:
            values: dict[str, object] = {**fields}
            got = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise TypeError(
                f"update: expected a whole SamplingParams, got {got}; pass "
                f"dataclasses.replace(batch.requests[{row}], {got})"
            )
        if isinstance(params, SamplingParams) and params.reads_output and output_token_ids is None:
            raise ValueError(
                f"output_token_ids: expected the tokens so far of row {row}, which penalties, "
                "bad_words and min_tokens refer to; pass [] if there are none"
            )
        prompts = None if prompt_token_ids is None else [prompt_token_ids]
        tokens = prompts, [output_token_ids or ()]
        self._load([row], check_requests(row, [params], *tokens, self.vocab_size))

    def put(
        self,
        slots: int | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        prompt_token_ids: Tokens = None,
        output_token_ids: Tokens = None,
    ) -> None:
        """Let requests take slots, whatever was in them. No other slot changes.

        Masks that are assigned to the batch, a row per slot, have to be assigned anew.

        Args:
            slots: one or several, each once.
            params: one request per slot.
            prompt_token_ids, output_token_ids: the tokens so far of each, as in `from_params`.

        Raises:
            TypeError, ValueError: as `from_params`; a slot named twice, or one that is not there.
        """
        rows, tokens = check_rows("put", slots, self.rows), (prompt_token_ids, output_token_ids)
        its = [params] if isinstance(params, SamplingParams) else params
        checked = check_requests(0, its, *tokens, self.vocab_size)
        if len(rows) != len(checked) or len(set(rows)) < len(rows):
            raise ValueError(
                f"put: expected as many requests as slots, each slot once, got {len(checked)} "
                f"requests for {describe(slots)}"
            )
        self._load(rows, checked)

    def free(self, slots: int | Sequence[int]) -> None:
        """Let requests leave their slots. A row of a selection that names such a slot has the
        status BAD_SLOT; a step of the whole batch is refused while it has one.

        Raises:
            ValueError: a slot that is not there.
        """
        rows = list(dict.fromkeys(check_rows("free", slots, self.rows)))
        self._load(rows, [Entry.of(NO_REQUEST, self.vocab_size)] * len(rows))

    def _state_slots(self) -> Tensor:
        return self._table.numbers[STATE, : self.rows]

    def _load(self, rows: list[int], entries: list[Entry]) -> None:
        """Replace the requests of some rows, and nothing of the others."""
        if rows:
            with self._thread:
                self._table.load(rows, entries)
                self._changed()

    def _arrange(self, order: list[int], joining: list[Entry]) -> None:
        """Keep these rows, in this order; an index from B on names a joining request."""
        if len(order) > self.max_rows:
            raise ValueError(
                f"params: {len(order)} rows exceed max_rows={self.max_rows}; drop rows, or build "
                "the batch with a larger max_rows"
            )
        with self._thread:
            self._table.arrange(order, joining)
            self._changed()

    @abstractmethod
    def _changed(self) -> None:
        """Note what follows from the rows as they are now."""
