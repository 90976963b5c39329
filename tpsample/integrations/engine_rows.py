"""A SamplingBatch in the order of an engine's batch, whose rows have names.

An engine says before every step which requests are in its batch, in order. Requests that left are
dropped, new ones join and the others move, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from tpsample.core.ordinary_tensors import ordinary_tensors
from tpsample.core.sealed import Sealed
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams


class EngineRequest(NamedTuple):
    """A request that joins, with its tokens so far.

    Attributes:
        end: the token that ends this request in the engine, for a step in which it has no token.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    end: int


class EngineRows(Sealed):
    """The batch of an engine, by the names of its rows.

    Attributes:
        batch: its rows are those of the last `arrange`.
        names: of the rows, in order.
        ends: int64 [B], the token that ends each row's request.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.batch = SamplingBatch.from_params(
            [], vocab_size=vocab_size, device=device, max_rows=max_rows
        )
        self.names: list[Hashable] = []
        self._end_of: dict[Hashable, int] = {}
        self.ends = torch.empty(0, dtype=torch.int64, device=device)

    @ordinary_tensors
    def arrange(
        self, names: Sequence[Hashable], load: Callable[[Hashable], EngineRequest]
    ) -> SamplingBatch:
        """Return the batch with these rows.

        Args:
            names: a name never stands for another request, and stands in a batch once.
            load: called for each row that was not in the batch of the step before, so also for
                one that sat out a step; it returns all tokens so far.
        """
        names = list(names)
        if names == self.names:
            return self.batch
        place = {name: row for row, name in enumerate(self.names)}
        new = [name for name in names if name not in place]
        joining = [load(name) for name in new]
        place.update((name, len(self.names) + index) for index, name in enumerate(new))
        self.batch.arrange(
            [place[name] for name in names],
            [request.params for request in joining],
            prompt_token_ids=[request.prompt_token_ids for request in joining],
            output_token_ids=[request.output_token_ids for request in joining],
        )
        ends = {**self._end_of, **{n: r.end for n, r in zip(new, joining, strict=True)}}
        self._end_of = {name: ends[name] for name in names}
        self.names = names
        self.ends = torch.tensor(list(self._end_of.values()), dtype=torch.int64).to(
            self.ends.device, non_blocking=True
        )
        return self.batch
