"""The ranks that share an LM head in a trainer: what they must agree on, and their sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.agreement.held_rows import HeldRows, check_sliced, resolve_shards
from tpsample.core.vocab_shard import VocabShard
from tpsample.ranks.ranks import Ranks, gather_or_raise, require_equal


@dataclass(frozen=True)
class HeadRanks:
    """The ranks that hold the rows of an LM head, each its shard.

    Attributes:
        ranks: how they reach each other.
        shard: the rows of this rank.
        vocab_size: of all ranks together.
    """

    ranks: Ranks
    shard: VocabShard
    vocab_size: int

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's tensor. Collective; `own` may be overwritten."""
        return self.ranks.sum_tensor(own)

    def largest(self, own: Tensor) -> Tensor:
        """Return the largest number of each place over all ranks; NaN wins. Collective."""
        if self.ranks.world_size == 1:
            return own
        nan = self.sum(own.isnan().int()) > 0
        self.ranks.all_reduce(own, dist.ReduceOp.MAX)
        return own.masked_fill(nan, torch.nan)

    def owns(self, token_ids: Tensor) -> Tensor:
        """Return which ids are rows of this rank."""
        return (token_ids >= self.shard.start) & (token_ids < self.shard.stop)


def agreed(
    ranks: Ranks,
    shard: VocabShard | None,
    weight: Tensor | None,
    same: dict[str, Any],
    error: Exception | None,
) -> HeadRanks:
    """Compare what the ranks were given, and return who holds which rows. Collective.

    Args:
        ranks: in a call; see `Ranks.during`.
        shard: the rows that this rank was said to hold; None where nobody says it.
        weight: [V_local, D]; None with an error.
        same: what must be equal on every rank, by argument.
        error: what is wrong on this rank.

    Raises:
        ValueError, TypeError: something is wrong, on one rank.
        RankMismatch: something is wrong or differs on one of several ranks; all raise it.
        PeerLost: a rank did not come within the timeout of the process group, or fell.
    """
    record: dict[str, Any] = {}
    if error is None:
        assert weight is not None
        if ranks.world_size == 1:
            vocab_size, (own,) = resolve_shards(None, [shard], [len(weight)])
            return HeadRanks(ranks, own, vocab_size)
        bounds = None if shard is None else (shard.start, shard.stop)
        record = {"same": same, "shard": bounds, "held": vars(HeldRows.of(weight))}
    records = gather_or_raise(ranks, record, error)
    require_equal([record["same"] for record in records])
    shards = [
        None if record["shard"] is None else VocabShard(*record["shard"]) for record in records
    ]
    held = [HeldRows(**record["held"]) for record in records]
    check_sliced(None, shards, held)
    vocab_size, resolved = resolve_shards(None, shards, [weight.rows for weight in held])
    return HeadRanks(ranks, resolved[ranks.rank], vocab_size)
