"""A SamplingBatch in the order of an engine's batch, whose rows have names.

An engine says before every step which requests are in its batch, in order. Requests that left are
dropped, new ones join and the others move, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.core.tensors import ordinary_tensors
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
        wanted: int64 [B, C], ids of its own that each row's request wants logprobs of, then -1.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.batch = SamplingBatch.from_params(
            [], vocab_size=vocab_size, device=device, max_rows=max_rows
        )
        self.names: list[Hashable] = []
        self._requests: dict[Hashable, EngineRequest] = {}
        self.ends, self.wanted = ends_and_wanted([], device)

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
        self._requests.update(zip(new, joining, strict=True))
        self._requests = {name: self._requests[name] for name in names}
        self.names = names
        requests = list(self._requests.values())
        self.ends, self.wanted = ends_and_wanted(requests, self.ends.device)
        return self.batch


def ends_and_wanted(
    requests: Sequence[EngineRequest | None], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the token that ends each request, and the ids whose logprobs it wants.

    Returns:
        int64 [B], and int64 [B, C] with -1 after the ids of a request that wants fewer.
    """
    ends = [0 if each is None else each.end for each in requests]
    wanted = [() if each is None else each.params.logprob_token_ids or () for each in requests]
    width = max(map(len, wanted), default=0)
    padded = [[*ids, *[-1] * (width - len(ids))] for ids in wanted]
    tensors = torch.tensor(ends, dtype=torch.int64), torch.tensor(padded, dtype=torch.int64)
    return (
        tensors[0].to(device, non_blocking=True),
        tensors[1].view(len(ends), width).to(device, non_blocking=True),
    )
