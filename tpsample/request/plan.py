"""What follows from the requests of a batch, and what a step reads of a batch: both frozen.

A `BatchPlan` is made from the requests alone and replaced whole when they change, so nothing in it
can be of other rows. A `BatchView` is made for one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tpsample.core.digest import digest_text
from tpsample.core.host_tensors import integers
from tpsample.core.ordinary_tensors import ordinary_tensors
from tpsample.request.bounded_rows import bounded_places
from tpsample.request.controls.rows import ControlRows
from tpsample.request.filters import RowFilters
from tpsample.request.host_rows import ASKS_LOGPROBS, FILTERED, HostRows
from tpsample.request.logprob_rows import AskingRows, LogprobRows, stored_order
from tpsample.request.params import SamplingParams
from tpsample.request.row_kinds import RowKinds
from tpsample.request.slot_rows import SlotRows, Undrawn


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """How a step treats its rows, as far as the host knows it from their requests.

    Attributes:
        requests: of every row; none where the host does not know the rows.
        vocab_size: V.
        device: of the batch.
        kept_cap: most tokens of a kept set that a step reports; None reports none.
        fixed_rounds: a step with filters never waits for the device.
        stores_all: a step keeps every row's logits, whether the request needs them or not.
        filters: the rows with top_k, top_p or min_p; None if there are none.
        logprobs: the rows that ask for logprobs; None if there are none.
        stored_list, stored_index, stored_place: the rows whose logits a step keeps on their ranks,
            as `stored_order` returns them.
        asking: where the rows that ask for logprobs are among the stored ones.
    """

    requests: tuple[SamplingParams, ...]
    vocab_size: int
    device: torch.device
    kept_cap: int | None
    fixed_rounds: bool
    stores_all: bool
    filters: RowFilters | None
    logprobs: LogprobRows | None
    stored_list: list[int]
    stored_index: Tensor | None
    stored_place: Tensor | None
    asking: AskingRows | None
    num_rows: int
    _repeated: dict[int, BatchPlan] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    @ordinary_tensors
    def of(
        requests: Sequence[SamplingParams] | HostRows,
        vocab_size: int,
        device: torch.device,
        *,
        kept_cap: int | None = None,
        fixed_rounds: bool = False,
        numbers: Tensor | None = None,
    ) -> BatchPlan:
        """Make the plan of rows, and send its tensors to the device.

        Args:
            requests: of the rows, or the rows as the host knows them.
            numbers: the rows' filters on the device, as `RowFilters.of` takes them.
        """
        rows = requests if isinstance(requests, HostRows) else HostRows.of(requests, vocab_size)
        known, count = rows.requests, len(rows.requests)
        filters = RowFilters.of(rows.filters, rows.selectors(FILTERED), device, numbers)
        logprobs = LogprobRows.of(known, rows.selectors(ASKS_LOGPROBS), vocab_size, device)
        stored = stored_order(filters, logprobs, count, device)
        asking = None if logprobs is None else AskingRows.of(logprobs, filters, stored[0])
        options = (vocab_size, device, kept_cap, fixed_rounds, False)
        return BatchPlan(tuple(known), *options, filters, logprobs, *stored, asking, count)

    @staticmethod
    def of_all(
        rows: SlotRows,
        vocab_size: int,
        filters: RowFilters | None,
        logprobs: LogprobRows | None,
    ) -> BatchPlan:
        """Make the plan of rows that the host does not know. It sends nothing to the device.

        Args:
            filters, logprobs: of all rows, if any may have some.
        """
        num_rows, device = len(rows), rows.index.device
        stored: tuple[list[int], Tensor | None, Tensor | None] = [], None, None
        asking, stores_all = None, filters is not None or logprobs is not None
        if stores_all:
            stored = list(range(num_rows)), rows.places, rows.stored_places
        if logprobs is not None:
            asking = AskingRows.of(logprobs, filters, stored[0])
        options = (vocab_size, device, None, True, stores_all)
        return BatchPlan((), *options, filters, logprobs, *stored, asking, num_rows)

    def of_requests(
        self, requests: Sequence[SamplingParams] | HostRows, **changes: Any
    ) -> BatchPlan:
        """Make the plan of other rows with the same options, but for these changes."""
        options = {"kept_cap": self.kept_cap, "fixed_rounds": self.fixed_rounds} | changes
        return BatchPlan.of(requests, self.vocab_size, self.device, **options)

    def repeated(self, times: int) -> BatchPlan:
        """Return the plan of every row `times` times in a row; it reports no kept sets."""
        if times not in self._repeated:
            requests = [request for request in self.requests for _ in range(times)]
            self._repeated[times] = self.of_requests(requests, kept_cap=None)
        return self._repeated[times]

    @cached_property
    def storing_every_row(self) -> BatchPlan:
        """The plan that keeps the logits of all of these rows on their ranks, in order."""
        stored = stored_order(
            self.filters, self.logprobs, self.num_rows, self.device, stores_all=True
        )
        asking = None
        if self.logprobs is not None:
            asking = AskingRows.of(self.logprobs, self.filters, stored[0])
        listed, index, place = stored
        return replace(
            self,
            stores_all=True,
            stored_list=listed,
            stored_index=index,
            stored_place=place,
            asking=asking,
        )

    @cached_property
    def bounded(self) -> list[int]:
        """The places, among the stored rows, of those that need few of their logits.

        There are none where something else than a filter looks at the logits.
        """
        if self.filters is None or self.kept_cap is not None or self.stores_all:
            return []
        asking = () if self.logprobs is None else self.logprobs.row_list
        # The stored rows begin with the filtered ones, in the same order.
        return bounded_places(self.filters.row_list, set(asking), self.requests, self.vocab_size)

    @cached_property
    @ordinary_tensors
    def kinds(self) -> RowKinds:
        """The rows by how many of their logits a rank needs."""
        filtered = self.filters is not None and not self.stores_all
        replaced = set(self.filters.row_list) if self.filters is not None and filtered else set()
        return RowKinds.of(self.num_rows, self.stored_list, set(self.bounded), replaced)

    @cached_property
    @ordinary_tensors
    def drawn(self) -> Tensor | None:
        """int64, the rows whose words the local step has to find, in order; None for all.

        They are those without filters, unless something else than a filter looks at the words.
        """
        if self.filters is None or self.stores_all:
            return None
        filtered = set(self.filters.row_list)
        rows = [row for row in range(self.num_rows) if row not in filtered]
        return integers(rows, device=self.device)[0]

    @cached_property
    def text(self) -> str:
        """The plan as a text that is equal on ranks whose plans are, for ranks to compare."""
        rows = [f"row {row}: {request.text}" for row, request in enumerate(self.requests)]
        options = f"kept_cap={self.kept_cap}, fixed_rounds={self.fixed_rounds}"
        return "\n".join([*rows, options, f"storing {self.stored_list}"])

    @cached_property
    def digest(self) -> int:
        """64 bits of the text."""
        return digest_text(self.text)


@dataclass(frozen=True, eq=False)
class BatchView:
    """What a step reads of a batch: its rows, or each of them once per drafted position.

    Attributes:
        temperature: fp32 [B]; below 1e-5 the row is greedy.
        seed: int64 [B], 64 bits.
        plan: of these rows.
        controls: penalties and constraints of the rows; None if there are none.
        undrawn: the rows that are not drawn; None if all are.
    """

    temperature: Tensor
    seed: Tensor
    plan: BatchPlan
    controls: ControlRows | None = None
    undrawn: Undrawn | None = None

    @property
    def rows(self) -> int:
        """B."""
        return self.seed.shape[0]

    @property
    def stores_logits(self) -> bool:
        """Whether a step keeps logits of some of these rows on their ranks."""
        return self.plan.stored_index is not None

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.plan.vocab_size

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.seed.device

    def view(self, num_rows: int) -> BatchView:
        """Return this view.

        Raises:
            ValueError: it has another number of rows.
        """
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got {self.rows}"
            )
        return self

    def after_drafts(self, draft_token_ids: Tensor) -> BatchView:
        """Return B · (K + 1) rows: row b · (K + 1) + i is row b after i of its K drafts.

        Args:
            draft_token_ids: int64 [B, K], which penalties, bad_words and min_tokens see as output.
        """
        times = draft_token_ids.shape[1] + 1
        controls = self.controls
        return BatchView(
            self.temperature.repeat_interleave(times),
            self.seed.repeat_interleave(times),
            self.plan.repeated(times),
            None if controls is None else controls.after_drafts(draft_token_ids.to(torch.int32)),
        )
