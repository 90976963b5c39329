"""A SamplingBatch in the order of an engine's batch, whose rows have names.

An engine says before every step which requests are in its batch, in order. Requests that left are
dropped, new ones join and the others move, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsample.core.checks import check_int, describe, lists_in_order
from tpsample.core.sealed import Sealed
from tpsample.core.tensors import ordinary_tensors
from tpsample.request.batch import SamplingBatch
from tpsample.request.controls.tables import padded
from tpsample.request.params import SamplingParams
from tpsample.request.selection import Selection


class EngineRequest(NamedTuple):
    """A request that joins, with its tokens so far.

    Attributes:
        end: the token that ends this request in the engine, for a step in which it has no token.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    end: int


class StepRows(NamedTuple):
    """The rows of a step.

    Attributes:
        batch: the rows, as the sampler takes them.
        names: of their requests.
        ids: int64 [B, 1 + C]: the token that ends each request, ids of its own that it wants
            logprobs of, then -1.
    """

    batch: SamplingBatch | Selection
    names: Sequence[Hashable]
    ids: Tensor

    @property
    def ends(self) -> Tensor:
        """The token that ends each request, int64 [B]."""
        return self.ids[:, 0]

    @staticmethod
    def of(
        batch: SamplingBatch, names: Sequence[Hashable], requests: Sequence[EngineRequest | None]
    ) -> StepRows:
        """Return the rows of these requests; a slot may have none."""
        ids = [
            (0,) if r is None else (r.end, *(r.params.logprob_token_ids or ())) for r in requests
        ]
        width = max(map(len, ids), default=1)
        table = padded(ids, -1, width, torch.int64).view(len(ids), width)
        return StepRows(batch, names, table.to(batch.device, non_blocking=True))


class EngineRows(Sealed):
    """The batch of an engine, by the names of its rows.

    Attributes:
        rows: those of the last `arrange`.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        kept_cap: int | None = None,
    ) -> None:
        how: dict[str, Any] = {"max_rows": max_rows, "kept_cap": kept_cap}
        self._batch = SamplingBatch.from_params([], vocab_size=vocab_size, device=device, **how)
        self.rows = StepRows.of(self._batch, [], [])
        self._requests: dict[Hashable, EngineRequest] = {}

    @ordinary_tensors
    def arrange(
        self,
        names: Sequence[Hashable],
        load: Callable[[Hashable], EngineRequest],
        anew: Collection[Hashable] = (),
    ) -> StepRows:
        """Let the batch have these rows, and return them.

        Args:
            names: a name stands in a batch once.
            load: called for each row that was not in the batch of the step before, so also for
                one that sat out a step; it returns all tokens so far.
            anew: names that stand for another request than in the step before.

        Raises:
            TypeError, ValueError: names without an order, what is no `EngineRequest`, or as
                `SamplingBatch.arrange`; the rows stay as they were.
        """
        if not lists_in_order(names):
            raise TypeError(f"names: expected a list of the rows' names, got {describe(names)}")
        names = list(names)
        if names == self.rows.names and not anew:
            return self.rows
        before = self._requests
        joining = {name: load(name) for name in names if name not in before or name in anew}
        for name, request in joining.items():
            if not isinstance(request, EngineRequest):
                raise TypeError(
                    f"load: expected an EngineRequest of {describe(name)}, got {describe(request)}"
                )
            check_int("end", request.end, -(2**63), 2**63 - 1)
        known = before | joining
        row_of = {name: row for row, name in enumerate((*before, *joining))}
        self._batch.arrange(
            [row_of[name] for name in names],
            [request.params for request in joining.values()],
            prompt_token_ids=[request.prompt_token_ids for request in joining.values()],
            output_token_ids=[request.output_token_ids for request in joining.values()],
        )
        self._requests = {name: known[name] for name in names}
        self.rows = StepRows.of(self._batch, names, list(self._requests.values()))
        return self.rows
