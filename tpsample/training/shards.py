"""The ranks that share an LM head in a trainer: what they must agree on, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.agreement.held_rows import HeldRows, check_sliced, resolve_shards
from tpsample.core.digest import digest_bits
from tpsample.core.vocab_shard import VocabShard
from tpsample.errors import RankMismatch
from tpsample.ranks.ranks import SAME, Ranks, each_rank, gather_or_raise, require_equal

TOLERANCE = 1e-3
"""The part of the largest gradient by which the gradients of a row may differ between ranks."""


@dataclass(frozen=True)
class HeadRanks:
    """The ranks that hold the rows of an LM head, each its shard.

    Attributes:
        ranks: how they reach each other.
        shard: the rows of this rank.
        vocab_size: of all ranks together.
        number: the number of this call among the calls on which the ranks have agreed.
    """

    ranks: Ranks
    shard: VocabShard
    vocab_size: int
    number: int

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

    def compare_upstream(
        self, gradients: Sequence[Tensor], names: Sequence[str], error: Exception | None
    ) -> None:
        """Compare the gradients [N] of the scores, which backward receives. Collective.

        The last bits may differ, because sums on a GPU may differ from run to run.

        Raises:
            RankMismatch: they differ, or a rank brings an error or is in another call; all raise.
        """
        own = torch.empty(0) if error else torch.stack([*gradients])
        several = self.ranks.world_size > 1  # a lone rank does not wait for a digest of the device
        records = gather_or_raise(self.ranks, {"digest": several and digest_bits(own)}, error)
        if all(record == records[0] for record in records):
            return
        gathered = self.ranks.gather_tensor(own)  # [W, 2, N]
        largest = gathered.abs().nan_to_num(0, 0, 0).amax(dim=(0, 2))
        differ = (gathered - gathered[0]).abs() > TOLERANCE * largest.unsqueeze(1)
        differ |= gathered.isfinite() != gathered[0].isfinite()
        for which, row in differ.any(dim=0).nonzero()[:1].tolist():
            raise RankMismatch(
                f"gradient of {names[which]}: row {row}: {SAME}, got "
                f"{each_rank(gathered[:, which, row].tolist())}; compute the same loss on each"
            )

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
        shard: the caller's shard of this rank; None if there is none.
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
            return HeadRanks(ranks, own, vocab_size, 0)
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
    ranks.shared.begun += 1
    return HeadRanks(ranks, resolved[ranks.rank], vocab_size, ranks.shared.begun)
