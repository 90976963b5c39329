"""Finishes the rows of a step whose logits its ranks stored: filters, kept sets, logprobs."""

from __future__ import annotations

from torch import Tensor

from tpsample.core import word
from tpsample.core.step_buffer import capturing
from tpsample.core.vocab_shard import VocabShard
from tpsample.errors import UnsupportedParameter
from tpsample.logits.filters import sample_filtered
from tpsample.logits.kept_sets import find_kept_sets
from tpsample.logits.logprobs import find_logprobs
from tpsample.logits.shard_logits import ShardLogits
from tpsample.output import Logprobs
from tpsample.ranks.ranks import Ranks
from tpsample.request.plan import BatchView
from tpsample.request.step import Step


def shard_logits(step: Step, shard: VocabShard, backend: str) -> ShardLogits:
    """Return the logits that a step stored on this rank, with the passes of its backend."""
    assert step.logits is not None
    rows = ShardLogits
    if backend == "triton":
        from tpsample.logits.shard_logits_triton import TritonShardLogits  # needs Triton

        rows = TritonShardLogits
    elif backend == "numba":
        from tpsample.logits.shard_logits_native import NativeShardLogits  # needs Numba

        rows = NativeShardLogits
    return rows.of(step.logits, step.batch, step.noise, first_id=shard.start)


def finish_logits(rows: ShardLogits, step: Step, ranks: Ranks) -> None:
    """Replace the unfiltered draws of filtered rows; add kept sets and logprobs. Collective.

    Args:
        rows: the logits of the rows that `step.batch.plan` stores.
        step: whose output holds an unfiltered draw of every row.
    """
    batch, out = step.batch, step.out
    assert out is not None
    filters = batch.plan.filters
    if filters is not None:
        filtered = rows.select(slice(0, len(filters.row_list)))
        fixed_rounds = batch.plan.fixed_rounds or capturing(batch.device)
        if fixed_rounds and batch.plan.kept_cap is not None:
            raise UnsupportedParameter(
                "kept_cap: not in a captured graph; capture a batch without it"
            )
        words = sample_filtered(filtered, filters, ranks, may_read=not fixed_rounds)
        filtered.write_tokens(words, filters.row_index, out)
        if batch.plan.kept_cap is not None:
            out.kept = find_kept_sets(filtered, filters, batch.plan.kept_cap, ranks)
    if batch.plan.logprobs is not None:
        out.logprobs = logprobs_of(rows, batch, ranks, out.token_ids)


def logprobs_of(rows: ShardLogits, batch: BatchView, ranks: Ranks, token_ids: Tensor) -> Logprobs:
    """Return the logprobs of the rows that ask for them. Collective.

    Args:
        rows: the logits of the rows that `batch.plan` stores.
        token_ids: int64 [B] or [B, num_samples], the tokens drawn; -1 in a row without.
    """
    asked, asking = batch.plan.logprobs, batch.plan.asking
    assert asked is not None and asking is not None
    sampled = token_ids[asked.row_index].view(len(asked.row_list), -1)
    if asked.asks is not None:  # a row that asks for nothing is reported as one without a token
        sampled = sampled.where(asked.asks.unsqueeze(1), word.NO_TOKEN)
    shown = rows.select(asking.places).shown(asked.processed)
    found = find_logprobs(shown, asked, asking.filters, asking.filtered, sampled, ranks)
    whole = Logprobs.none(batch.rows, found.token_ids.shape[1], token_ids.device)
    return whole.put(asked.row_index, found)
