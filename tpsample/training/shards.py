"""The ranks that share an LM head in a trainer: what they must agree on, and their sums."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.agreement.held_rows import HeldRows, check_sliced, resolve_shards
from tpsample.core.checks import text_of
from tpsample.core.vocab_shard import VocabShard
from tpsample.errors import PeerLost, RankMismatch
from tpsample.ranks.ranks import require_equal


@dataclass(frozen=True)
class HeadRanks:
    """The ranks that hold the rows of an LM head, each its shard.

    Attributes:
        group: None for one rank alone.
        shard: the rows of this rank.
        vocab_size: of all ranks together.
    """

    group: dist.ProcessGroup | None
    shard: VocabShard
    vocab_size: int

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's tensor. Collective; `own` may be overwritten."""
        if self.group is not None:
            dist.all_reduce(own, group=self.group)
        return own

    def largest(self, own: Tensor) -> Tensor:
        """Return the largest number of each place over all ranks; NaN wins. Collective."""
        if self.group is None:
            return own
        nan = self.sum(own.isnan().int()) > 0
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.group)
        return own.masked_fill(nan, torch.nan)

    def owns(self, token_ids: Tensor) -> Tensor:
        """Return which ids are rows of this rank."""
        return (token_ids >= self.shard.start) & (token_ids < self.shard.stop)


def agreed(
    group: dist.ProcessGroup | None,
    shard: VocabShard | None,
    weight: Tensor | None,
    same: dict[str, Any],
    error: Exception | None,
    device: torch.device,
) -> HeadRanks:
    """Compare what the ranks were given, and return who holds which rows. Collective.

    Args:
        group: None for one rank alone.
        shard: the rows that this rank was said to hold; None where nobody says it.
        weight: [V_local, D]; None with an error.
        same: what must be equal on every rank, by argument.
        error: what is wrong on this rank.
        device: where tensors of this rank are, which NCCL needs.

    Raises:
        ValueError, TypeError: something is wrong, on one rank.
        RankMismatch: something is wrong or differs on one of several ranks; all raise it.
        PeerLost: a rank did not come within the timeout of the process group.
    """
    if group is None:
        if error is not None:
            raise error
        assert weight is not None
        vocab_size, (own,) = resolve_shards(None, [shard], [len(weight)])
        return HeadRanks(None, own, vocab_size)
    record = {
        "error": None if error is None else text_of(error),
        "same": same,
        "shard": None if error or shard is None else (shard.start, shard.stop),
        "held": None if error or weight is None else vars(HeldRows.of(weight)),
    }
    try:
        records = _gathered(record, group, device)
    except RuntimeError as lost:
        raise PeerLost(
            "kept_logprobs: not every rank has called it within the timeout of the process group; "
            "look for an error on the others, then take a new process group"
        ) from lost
    wrong = [f"rank {r}: {record['error']}" for r, record in enumerate(records) if record["error"]]
    if wrong:
        raise RankMismatch("; ".join(wrong)) from error
    require_equal([record["same"] for record in records])
    shards = [
        None if record["shard"] is None else VocabShard(*record["shard"]) for record in records
    ]
    held = [HeldRows(**record["held"]) for record in records]
    check_sliced(None, shards, held)
    vocab_size, resolved = resolve_shards(None, shards, [weight.rows for weight in held])
    return HeadRanks(group, resolved[group.rank()], vocab_size)


def _gathered(
    record: dict[str, Any], group: dist.ProcessGroup, device: torch.device
) -> list[dict[str, Any]]:
    """Return every rank's record, as JSON text. Collective.

    It takes the connections of the group itself, because another thread may sample over those of
    samplers meanwhile.
    """
    text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=group)
    longest = int(torch.cat(sizes).max())
    padded = torch.full((longest,), ord(" "), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text.tolist())) for text in texts]
