"""The rows of a batch: how they join, leave, move and change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor

from tpsample.core.host_tensors import integers
from tpsample.core.ordinary_tensors import ordinary_tensors
from tpsample.core.vocab_shard import VocabShard
from tpsample.request.batch_checks import (
    CheckedRequest,
    check_arranged,
    check_order,
    check_requests,
    check_rows,
    token_lists,
)
from tpsample.request.controls.tables import ControlTables, needs_controls
from tpsample.request.host_rows import IDLE, NEEDS_APPEND, UNSEEDED, HostRows
from tpsample.request.params import SamplingParams
from tpsample.request.plan import BatchPlan
from tpsample.request.row_tensors import RowTensors
from tpsample.request.seeds import SeedSource
from tpsample.request.slot_tables import SlotTables
from tpsample.request.step_batch import StepBatch


class BatchRows(StepBatch):
    """The part of `SamplingBatch` that knows its rows.

    What follows from the rows' requests is replaced whole by `_replace` when a row changes. Masks,
    which are the caller's tensors, are then stale: they are of rows that the batch no longer has.
    """

    @ordinary_tensors
    def __init__(self, temperature: Tensor, seed: Tensor, *, vocab_size: int) -> None:
        """Make plain rows, with a temperature and a seed alone, over the caller's tensors."""
        self._tensors = RowTensors(temperature, seed)
        self._row_temperature, self._row_seed = temperature, seed
        self.vocab_size, self.max_rows = vocab_size, seed.shape[0]
        self._tables: ControlTables | None = None
        self._slots: SlotTables | None = None
        self._times_made = 0  # how often those were made
        self._masks: dict[str, Tensor] = {}
        self._stale: set[str] = set()
        self._single: CheckedRequest | None = None
        self._repeated: dict[int, Any] = {}  # batches of the single request, by number of rows
        self.unseeded: list[int] = []
        self._idle: list[int] = []  # slots without a request
        self.version = 0
        self._needs_append = False
        self._last_positions: Tensor | None = None  # of the last step, until tokens are appended
        self._host_rows: HostRows
        self._plan: BatchPlan | None
        self._last_plan: BatchPlan
        self._set_plan(BatchPlan.of([], vocab_size, seed.device))
        plain = HostRows.of([SamplingParams()] * self.max_rows, vocab_size)
        self._replace(plain.seeded())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy. Tensors that share memory do not do so in a pickle."""
        vars(self).update(state)
        self._view_rows(self.rows)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return (
            f"SamplingBatch({self.rows} rows of at most {self.max_rows}, "
            f"vocab_size={self.vocab_size}, on {self.device})"
        )

    @property
    def plan(self) -> BatchPlan:
        """What follows from the rows' requests. Of rows as slots it is made when it is read,
        because a selection has a plan of its own."""
        if self._plan is None:
            numbers = self._tensors.numbers
            self._plan = self._last_plan.of_requests(self._host_rows, numbers=numbers)
            self._last_plan = self._plan
        return self._plan

    @property
    def rows(self) -> int:
        """How many rows the batch has, B."""
        return self._row_seed.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._tensors.seed.device

    @property
    def requests(self) -> list[SamplingParams]:
        """Those of the rows."""
        return self._host_rows.requests

    @property
    def temperature(self) -> Tensor:
        """fp32 [B]; below 1e-5 the row is greedy. It may be written in place."""
        return self._row_temperature

    @property
    def seed(self) -> Tensor:
        """int64 [B], 64 bits. It may be written in place."""
        return self._row_seed

    def add(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
    ) -> int:
        """Let a request join as the last row, and return its index.

        Raises:
            TypeError, ValueError: as `from_params`; or all `max_rows` rows are taken.
        """
        self._require_list("add")
        tokens = [prompt_token_ids], [output_token_ids]
        self._join(check_requests(self.rows, [params], *tokens, self.vocab_size))
        return self.rows - 1

    def drop(self, rows: int | Sequence[int]) -> None:
        """Let rows leave. The others close up and keep their order.

        Raises:
            TypeError, ValueError: a row that is not there.
        """
        gone = set(check_rows("drop", rows, self.rows))
        self._require_list("drop")
        self._arrange([row for row in range(self.rows) if row not in gone], [])

    def permute(self, order: Sequence[int]) -> None:
        """Put row ``order[i]`` in place i.

        Raises:
            TypeError, ValueError: `order` is not a permutation of the rows.
        """
        self._require_list("permute")
        self._arrange(check_order(order, self.rows), [])

    def arrange(
        self,
        order: Sequence[int],
        joining: Sequence[SamplingParams] = (),
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        output_token_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Let rows leave, join and move in one pass, as an engine's batch does between two steps.

            batch.arrange([2, 0, 4], [params])  # of 4 rows 1 and 3 leave, and one joins behind 0

        Args:
            order: which row stands in each place: one of the batch's B rows, or B + i for the
                joining request i. Each of those must be named; rows that are not named leave.
            joining: requests that join.
            prompt_token_ids, output_token_ids: of the joining requests, as in `from_params`.

        Raises:
            TypeError, ValueError: as `from_params`; a row named twice, or one that is not there;
                or more than `max_rows` rows.
        """
        self._require_list("arrange")
        requests, count = list(joining), len(joining)
        prompts = token_lists("prompt_token_ids", prompt_token_ids, count)
        outputs = token_lists("output_token_ids", output_token_ids, count)
        checked = check_requests(self.rows, requests, prompts, outputs, self.vocab_size)
        self._arrange(check_arranged(order, self.rows, count), checked)

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
        self._require_list("update")
        if isinstance(params, SamplingParams) and params.reads_output and output_token_ids is None:
            raise ValueError(
                f"output_token_ids: expected the tokens so far of row {row}, which penalties, "
                "bad_words and min_tokens refer to; pass [] if there are none"
            )
        tokens = [prompt_token_ids or ()], [output_token_ids or ()]
        (checked,) = check_requests(row, [params], *tokens, self.vocab_size)
        self._load_rows([row], [checked])

    def prepare(self, shard: VocabShard) -> None:
        """Make the state of a shard, for a sampler that comes after tokens have been appended.

        Raises:
            TypeError: not a VocabShard.
            ValueError: a shard that reaches past V, or one whose counts are no longer known.
        """
        if not isinstance(shard, VocabShard):
            raise TypeError(f"shard: expected a VocabShard, got {shard!r}")
        if shard.stop > self.vocab_size:
            raise ValueError(f"shard: {shard} reaches past vocab_size={self.vocab_size}")
        if self._tables is not None:
            self._tables.state(shard)

    @ordinary_tensors
    def draw_seeds(self, source: SeedSource) -> None:
        """Give every row without a seed the next one of `source`."""
        if self.unseeded:
            self._tensors.write_seeds(self.unseeded, source.draw(len(self.unseeded)))
            self._host_rows, self.unseeded = self._host_rows.seeded(), []

    def _join(self, checked: list[CheckedRequest]) -> None:
        """Add rows behind the last."""
        self._arrange(list(range(self.rows + len(checked))), checked)

    def _load_rows(
        self, rows: Sequence[int], checked: Sequence[CheckedRequest], *, idle: bool = False
    ) -> None:
        """Replace the requests of some rows, and nothing of the others.

        Args:
            idle: these requests stand for none.
        """
        news = HostRows.of([each.params for each in checked], self.vocab_size, idle=idle)
        self._load(rows, checked, news)
        self._replace(self._host_rows.replaced(rows, news))

    def _load(
        self, rows: Sequence[int], requests: Sequence[CheckedRequest], news: HostRows
    ) -> None:
        """Start the tensors of some rows anew."""
        self._tensors.load(rows, news)
        if any(map(needs_controls, news.requests)):
            self._make_tables()
        if self._tables is not None:
            self._tables.load(rows, requests)
        if self._slots is not None:
            self._slots.load(rows, news)

    @ordinary_tensors
    def _arrange(self, order: list[int], checked: list[CheckedRequest]) -> None:
        """Keep these rows, in this order; from the rows there are on, they join."""
        rows, size = self.rows, len(order)
        if size > self.max_rows:
            raise ValueError(
                f"params: {size} rows exceed max_rows={self.max_rows}; drop rows, or build the "
                "batch with a larger max_rows"
            )
        joined = {}
        if checked:
            joined = {place: checked[row - rows] for place, row in enumerate(order) if row >= rows}
        if order[:rows] != list(range(rows)):
            self._move(order, list(joined))
        news = HostRows.of([each.params for each in checked], self.vocab_size)
        arranged = self._host_rows.joined_by(news).picked(order)
        if joined:
            places = list(joined)
            self._load(places, list(joined.values()), arranged.picked(places))
        self._replace(arranged)

    def _move(self, order: list[int], joined: list[int]) -> None:
        """Move the rows of the tensors: those that stay, those that join, then those not in use.

        Args:
            joined: the places of rows that join. Such a row is one that was not in use or has left,
                until its own values are written over it.
        """
        free = sorted(set(range(self.rows)).difference(order))
        free += range(self.rows, self.max_rows)
        moved = list(order)
        for place, row in zip(joined, free, strict=False):
            moved[place] = row
        moved += free[len(joined) :]
        (index,) = integers(moved, device=self.device)
        self._tensors.move(index)
        self._slots = None
        if self._tables is not None:
            self._tables.move(moved, index, free)

    @ordinary_tensors
    def _replace(self, rows: HostRows) -> None:
        """Replace everything that follows from the rows' requests."""
        self._host_rows, self.version = rows, self.version + 1
        count = len(rows.requests)
        if count != self.rows:
            self._view_rows(count)
        self.unseeded = list(compress(range(count), rows.selectors(UNSEEDED)))
        self._idle = list(compress(range(count), rows.selectors(IDLE)))
        self._needs_append, self._last_positions = 1 in rows.selectors(NEEDS_APPEND), None
        self._stale = set(self._masks)
        self._plan = None
        if self._slots is None:
            _ = self.plan  # now, because a step that is captured can send nothing to the device

    def _view_rows(self, count: int) -> None:
        """Make the tensors of so many rows, parts of those of all rows there is room for."""
        # Kept, because torch.compile would compile anew for every length of a list it looks at.
        self._row_temperature = self._tensors.temperature[:count]
        self._row_seed = self._tensors.seed[:count]

    def _set_plan(self, plan: BatchPlan) -> None:
        """Take the options of a plan for all plans to come."""
        self._plan, self._last_plan = plan, plan

    def _make_tables(self) -> ControlTables:
        if self._tables is None:
            self._tables = ControlTables(self.max_rows, self.vocab_size, self.device)
        return self._tables

    def _require_list(self, method: str) -> None:
        """Raise a ValueError if the rows share one request, so that none can change alone."""
        if self._single is not None:
            raise ValueError(
                f"{method}: this batch was built from one request for all rows; build it from a "
                "list of requests to change its rows"
            )
