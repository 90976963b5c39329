"""What a step does with the rows whose logits its ranks stored: filters, kept sets, logprobs."""

from __future__ import annotations

from torch import Tensor

from tpsample.core.step_buffer import capturing
from tpsample.errors import UnsupportedParameter
from tpsample.logits.filters import sample_filtered
from tpsample.logits.kept_sets import find_kept_sets
from tpsample.logits.logprobs import find_logprobs
from tpsample.logits.shard_logits import StoredRows
from tpsample.output import Logprobs, SampleOutput
from tpsample.ranks.integers import IntegerExchange
from tpsample.request.plan import BatchView


def finish_stored_rows(
    rows: StoredRows, batch: BatchView, integers: IntegerExchange, out: SampleOutput
) -> None:
    """Replace the unfiltered draws of filtered rows; add kept sets and logprobs. Collective.

    Args:
        rows: the logits of `batch.plan.stored`.
        out: what the plain plan drew for every row.
    """
    filters = batch.plan.filters
    if filters is not None:
        filtered = rows.select(slice(0, len(filters)))
        fixed_rounds = batch.plan.fixed_rounds or capturing(batch.device)
        if fixed_rounds and batch.plan.kept_cap is not None:
            raise UnsupportedParameter(
                "kept_cap: not in a captured graph; capture a batch without it"
            )
        words = sample_filtered(filtered, filters, integers, fixed_rounds=fixed_rounds)
        filtered.settle(words, filters.rows, out)
        if batch.plan.kept_cap is not None:
            out.kept = find_kept_sets(filtered, filters, batch.plan.kept_cap, integers)
    if batch.plan.logprobs is not None:
        out.logprobs = logprobs_of(rows, batch, integers, out.token_ids)


def logprobs_of(
    rows: StoredRows, batch: BatchView, integers: IntegerExchange, token_ids: Tensor
) -> Logprobs:
    """What the rows that ask for logprobs are told. Collective.

    Args:
        rows: the logits of `batch.plan.stored`.
        token_ids: int64 [B] or [B, num_samples], the tokens drawn; -1 in a row without.
    """
    asked, asking = batch.plan.logprobs, batch.plan.asking
    assert asked is not None and asking is not None
    sampled = token_ids[asked.index].view(len(asked.rows), -1)
    shown = rows.select(asking.places).shown(asked.processed)
    found = find_logprobs(shown, asked, asking.filters, asking.filtered, sampled, integers)
    return found.of_rows(asked.index, batch.rows)
