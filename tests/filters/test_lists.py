"""Rows whose kept tokens fit a list: sets, tokens and logprobs are those of a search."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.lab import calls
from tests.support.fields import OTHER_FILTERS, VALUES
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.filters import kept_sets

V = 3000
PROCESSED = {"logprobs_mode": "processed_logprobs"}
REQUESTS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "small": {"top_p": 1e-9, "logprobs": 20, **PROCESSED},
    "with min_p": {"top_p": 0.9, "min_p": 0.02, "logprobs": 3, **PROCESSED},
    "min_p last": {"top_p": 0.8, "min_p": 0.1, "filter_order": "min_p_last"},
    **{
        f"with {name}": {"top_p": 0.95, name: VALUES[name][0], "logprobs": 0, **PROCESSED}
        for name in OTHER_FILTERS
    },
    "logits": {"top_p": 0.7, "logprobs": 4, "logprobs_mode": "processed_logits"},
    "raw": {"top_p": 0.7, "logprobs": 4},
    "ties": {"top_p": 0.3, "ties": "keep"},
    "penalties": {"top_p": 0.7, "presence_penalty": 1.0, "logprobs": 4, **PROCESSED},
}


def _logits(few: bool) -> torch.Tensor:
    """Rows with a NaN, with nothing but masked tokens, with ties; and with infinite or far logits,
    if few tokens of a row are reported."""
    generator = torch.Generator().manual_seed(4)
    logits = 5 * torch.randn(9, V, generator=generator)
    logits[1, 7], logits[2] = torch.nan, -torch.inf
    if few:
        logits[3, [5, 2999]] = torch.inf
        logits[6] *= 1e4
    logits[4] = logits[4].round()
    logits[5, 40:] = -torch.inf
    logits[7, ::2] -= 1e6
    return logits


def _told(out: Any) -> list[Any]:
    """Return all numbers of an output, each list of them under its name."""
    found = [("token_ids", out.token_ids), ("status", out.status)]
    of_sets = "offsets", "token_ids", "sizes", "whole", "overflow", "log_masses"
    found += [(f"kept {name}", getattr(out.kept, name)) for name in of_sets if out.kept]
    of_logprobs = "token_ids", "values", "ranks", "entropies"
    found += [
        (f"logprobs {name}", getattr(out.logprobs, name)) for name in of_logprobs if out.logprobs
    ]
    return [(name, its.double().nan_to_num(7.0).tolist()) for name, its in found]


def _step(kind: str, kept_cap: int | None) -> tuple[Any, ...]:
    """Return what a step says by a list and by a search; the tokens of the definition; how many
    lists were taken, and how many exchanges each step took."""
    few, ranks = REQUESTS[kind].get("logprobs", 0) < 2, torch.distributed
    samples = 2 if kind == "with min_p" else None
    logits = _logits(few)
    its, of = (ranks.get_rank(), ranks.get_world_size()) if ranks.is_initialized() else (0, 1)
    shard = VocabShard.even(V, its, of)
    params = [SamplingParams(seed=row, **REQUESTS[kind]) for row in range(len(logits))]
    how: dict[str, Any] = {"vocab_size": V, "kept_cap": kept_cap}
    how["output_token_ids"] = [[row, 17, 17] for row in range(len(logits))]
    own = logits[:, shard.start : shard.stop].contiguous()
    weight = torch.empty(len(shard), 0)
    sampler = LMHeadSampler(weight, vocab_size=V, shard=shard, backend="numba")
    found, lists, cut_of_list = [], [], kept_sets._cut_of_list

    def listed(*given: Any) -> Any:
        lists.append(cut_of_list(*given))
        return lists[-1]

    for may in (kept_sets._may_list, lambda _: False):
        batch = SamplingBatch.from_params(params, **how)
        with (
            patch.object(kept_sets, "_cut_of_list", listed),
            patch.object(kept_sets, "_may_list", may),
            calls.exchanges() as taken,
        ):
            out = sampler.sample_logits(own, batch, 3, num_samples=samples)
        found.append((_told(out), len(taken)))
    batch = SamplingBatch.from_params(params, **how)
    right = reference.sample(logits, batch, 3, num_samples=samples).token_ids.tolist()
    return (*found, right, [each is not None for each in lists])


def _steps(kept_cap: int | None) -> dict[str, tuple[Any, ...]]:
    return {kind: _step(kind, kept_cap) for kind in REQUESTS}


@pytest.mark.parametrize("world_size", [1, 3, *long(2)])
@pytest.mark.parametrize("kept_cap", [None, 50])
def test_a_list_says_what_a_search_does(world_size, kept_cap):
    for steps in run_ranks(world_size, _steps, kept_cap):
        for kind, (listed, searched, right, lists) in steps.items():
            assert listed[0] == searched[0], kind
            assert listed[0][0][1] == right, kind
            assert all(lists), f"{kind}: these rows fit a list"
            by_cuts = kept_cap is not None or "logprobs_mode" in REQUESTS[kind]
            assert bool(lists) == (by_cuts and kind != "ties"), kind
            assert listed[1] < searched[1] if lists else listed[1] == searched[1], kind


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
@pytest.mark.parametrize("fixed_rounds", [False, True])
def test_a_share_of_nearly_all_keeps_no_token_without_mass(backend, fixed_rounds):
    """Its limit is the whole mass, rounded up."""
    params = [SamplingParams(seed=1, top_p=1 - 1e-13, logprobs=5, **PROCESSED)]
    how = {"kept_cap": 8, "fixed_rounds": fixed_rounds}
    logits = torch.tensor([[0.0, -1.0, -2.0, -40.0, -50.0, -60.0, -70.0, -torch.inf]])
    batch = SamplingBatch.from_params(params, vocab_size=8, **how)
    out = LMHeadSampler(torch.empty(8, 0), backend=backend).sample_logits(logits, batch, 3)
    assert out.kept.sizes.tolist() == reference.kept_mask(logits, batch).sum(dim=1).tolist() == [3]
    assert out.logprobs.values[0, 1:].isinf().tolist() == [False, False, False, True, True]
