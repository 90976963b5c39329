"""Filtered rows whose stored logits a screen left out, beside the same rows with all logits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.support.screening import stored_logits
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.core.row_noise import RowNoise, safe_temperature
from tpsample.local.backend import Backend
from tpsample.logits.filters import sample_filtered
from tpsample.logits.shard_logits import ShardLogits
from tpsample.ranks.process import ranks_of
from tpsample.reference import kept_rows


def sample_in_fixed_rounds(*arguments: Any) -> Tensor:
    """Sample while the host reads nothing."""
    return sample_filtered(*arguments, may_read=False)


WAYS = (sample_filtered, sample_in_fixed_rounds)


def stored(
    locals_: Sequence[Backend], hidden: Tensor, batch: SamplingBatch, num_samples: int, parts: int
) -> Tensor:
    """Run one step's local half on every shard; return its stored logits, side by side."""
    rows, found = hidden.shape[0], []
    for local in locals_:
        step = local.prepare(hidden, batch.view(rows), 40 + torch.arange(rows), num_samples)
        assert step.logits is not None
        step.logits.fill_(torch.nan)  # what a step forgets to write would be seen
        for part in range(parts):
            local.best_words(step, torch.zeros(num_samples * rows, dtype=torch.int64), part, parts)
        found.append(stored_logits(local, step))
    return torch.cat(found, dim=1)


def assert_same_draws(
    few: Tensor, every: Tensor, batch: SamplingBatch, num_samples: int, ways: Sequence[Any]
) -> None:
    """The kept sets and the words of filtered rows are the same, by some of WAYS.

    A logit that is there is exact, and one that is not is that of no kept token.
    """
    plan, rows = batch.plan, len(batch.plan.requests)
    assert plan.filters is not None
    there = few > -torch.inf
    same = (few == every) | (few.isnan() & every.isnan())
    assert (same | ~(there | few.isnan())).all(), "a stored logit is not exact"
    view, filters = batch.view(rows), plan.filters
    temperature, is_random = safe_temperature(batch.temperature[filters.row_index])
    first = len(plan.stored_list) if len(every) > len(plan.stored_list) else 0
    of_filters = slice(first, first + len(filters))
    kept = kept_rows(every[of_filters], temperature, filters) & is_random.unsqueeze(1)
    also = kept_rows(few[of_filters], temperature, filters) & is_random.unsqueeze(1)
    wrong = (kept != also).any(dim=1).nonzero().squeeze(1).tolist()
    assert not wrong, f"kept sets of filtered rows {wrong} differ"

    noise = RowNoise(batch.temperature, batch.seed, 40 + torch.arange(rows), num_samples, 10)
    for sample in ways:
        expected, found = (
            sample(
                ShardLogits.of(logits, view, noise).select(slice(0, len(filters))),
                filters,
                ranks_of("alone"),
            )
            for logits in (every, few)
        )
        wrong = (expected != found).any(dim=1).nonzero().squeeze(1).tolist()
        assert not wrong, f"{sample.__name__}: words of filtered rows {wrong} differ"


def shards_of(vocab_size: int, pick: random.Random) -> list[VocabShard]:
    """One to three shards of very different sizes."""
    cuts = sorted(pick.randrange(vocab_size + 1) for _ in range(pick.randrange(3)))
    bounds = [0, *cuts, vocab_size]
    return [VocabShard(a, b) for a, b in pairwise(bounds)]


def filtered(pick: random.Random, **others: object) -> SamplingParams:
    """A request with filters; a bound can serve most."""
    top_k, min_p = pick.choice([(0, 0.2), (1, 0.0), (3, 0.0), (7, 0.05), (20, 0.9), (40, 0.0)])
    return SamplingParams(
        temperature=pick.choice([0.1, 0.7, 1.0, 2.5]),
        top_k=top_k,
        top_p=pick.choice([1.0, 0.9, 0.5]),
        min_p=min_p,
        ties=pick.choice(["exact", "keep"]),
        filter_order=pick.choice(["sequential", "joint", "min_p_last"]),
        seed=pick.randrange(2**40),
        **others,  # type: ignore[arg-type]
    )
