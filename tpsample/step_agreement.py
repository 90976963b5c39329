"""A step that is wrong on one rank is wrong on all: how the others learn of it.

Where ranks meet on the host (CPU tensors; `Exchange.compares_steps`) they compare six integers
before anything of a step is sent:

    [arguments are right, rows, samples per row, digests of the batch's plan, seeds and positions]

and if one has an error a second gather brings its text. A rank that skipped a step shows by its
positions. Where they meet on the device the host
must not wait in every step: a rank that refuses one leaves the text in the store of the process
group, where the `check()` of the others finds it.

A rank that left a step its peers are in takes part in no other: its words would meet theirs of an
earlier step. It raises until `reset()`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.errors import RankMismatch
from tpsample.exchange.base import Exchange
from tpsample.exchange.ranks import Ranks, gather_or_raise
from tpsample.request.batch import SamplingBatch

_RECORD = ("arguments", "hidden_states rows", "num_samples", "batch", "seeds", "positions")


@dataclass(frozen=True)
class Checked:
    """A step whose arguments are right on this rank.

    Attributes:
        batch: for the rows of the step.
        positions: int64 [B].
        num_samples: draws per row.
    """

    batch: SamplingBatch
    positions: Tensor
    num_samples: int

    def record(self) -> list[int]:
        """What the ranks compare. Reads seeds and positions, so for CPU tensors."""
        values = [hash(tuple(tensor.tolist())) for tensor in (self.batch.seed, self.positions)]
        return [1, self.batch.rows, self.num_samples, plan_digest(self.batch), *values]


@dataclass(frozen=True)
class CheckedCall:
    """Another collective call whose arguments are right on this rank.

    Attributes:
        name: of the call.
        token_ids: int64, what it is about; equal on all ranks.
        size: a number that must be equal too.
    """

    name: str
    token_ids: Tensor
    size: int

    def record(self) -> list[int]:
        """What the ranks compare. Reads the token ids, so for CPU tensors."""
        ids = hash(tuple(self.token_ids.flatten().tolist()))
        return [1, len(self.token_ids), self.size, zlib.crc32(self.name.encode()), 0, ids]


class StepAgreement:
    """Compares the steps of a sampler's ranks.

    Args:
        ranks: of the sampler.
        exchange: what the words travel by; decides how ranks compare.
    """

    def __init__(self, ranks: Ranks, exchange: Exchange) -> None:
        self._ranks, self._exchange = ranks, exchange
        self.reset()

    def reset(self) -> None:
        """Forget what was left and count steps from 0 again; on all ranks."""
        self._left: str | None = None
        if self._exchange.compares_steps:
            roll = self._ranks.roll
            assert roll is not None
            roll.step = -1

    def settle(self, checked: Checked | CheckedCall | None, error: Exception | None) -> None:
        """Raise on every rank if the step is wrong on one, or if its ranks' steps differ.

        Args:
            checked: this rank's step; None if its arguments are wrong, and `error` says how.

        Raises:
            RankMismatch: with several ranks; the same text on each.
            Exception: `error`, on a rank alone or without a process group.
        """
        ranks = self._ranks
        if self._left is not None:
            raise RankMismatch(f"{self._left}; call reset() on every rank first")
        if not self._exchange.compares_steps:
            if error is not None and ranks.world_size > 1 and ranks.roll is not None:
                text = f"rank {ranks.rank}: {error}"
                self.leave(text, refused=True)
                raise RankMismatch(text) from error
            if error is not None:
                raise error
            return

        assert ranks.roll is not None and ranks.roll.step is not None
        ranks.roll.step += 1
        own = [0] * len(_RECORD) if checked is None else checked.record()
        records = ranks.gather_tensor(torch.tensor(own)).tolist()
        if not all(right for right, *_ in records):
            gather_or_raise(ranks, {}, error)
        for place, name in enumerate(_RECORD):
            values = [record[place] for record in records]
            if any(value != values[0] for value in values):
                each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise RankMismatch(f"{name}: {_EXPECTED.get(name, _SAME)}, got {each}")

    def leave(self, text: str, *, refused: bool) -> None:
        """Tell the peers, who may wait, that this rank is not in the step with them."""
        roll = self._ranks.roll
        if roll is not None:
            roll.say(text, refused=refused)
            self._left = text


_SAME = "must be the same on every rank"
_EXPECTED = {
    "batch": (
        "its requests, and which rows wait for a seed, must be the same on every rank, by digest"
    ),
    "seeds": f"{_SAME}, by digest",
    "positions": f"{_SAME}, by digest; a rank that skipped a step has others",
}


def plan_digest(batch: SamplingBatch) -> int:
    """What the host knows of a batch and all ranks must plan alike, in 32 bits."""
    filters, logprobs, controls = batch.filters, batch.logprobs, batch.controls
    plan: list[object] = [batch.rows, batch.host_stored, batch.unseeded]
    plan += [batch.kept_cap, batch.fixed_rounds, batch.params_digest]
    if controls is not None:
        plan += [controls.masked, controls.grammar_bitmask is None, controls.forced is None]
    if filters is not None:
        ways = [way.value for way in filters.first_way + filters.second_way]
        plan += [filters.host_rows, filters.host_top_k, ways]
    if logprobs is not None:
        plan += [logprobs.rows, logprobs.top, logprobs.chosen.shape[1], logprobs.host_processed]
    return zlib.crc32(repr(plan).encode())
