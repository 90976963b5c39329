"""Kept sets that end among equal logits: the least ids are kept, whichever rank holds them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.filtered import Rows, V, assert_same, kinds_of_logits
from tests.support.ranks import run_ranks
from tpsample import KeptSets, LMHeadSampler, SampleOutput, SamplingParams
from tpsample.core.vocab_shard import VocabShard

KINDS = [kinds_of_logits()[name] for name in ("all-equal", "two-valued", "bf16")]
REQUESTS: list[dict[str, Any]] = [
    {"top_k": 300},
    {"top_k": 4, "ties": "keep"},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_k": 1100, "top_p": 0.6},
    {"top_k": 700, "top_p": 0.5, "ties": "keep"},
    {"top_k": 1050, "top_p": 0.7, "filter_order": "joint"},
    {"top_p": 0.5, "min_p": 0.4, "filter_order": "min_p_last"},
    {"temperature": 0.0},
]


def _step(rows: Rows, shards: list[VocabShard], backend: str) -> tuple[SampleOutput, KeptSets]:
    shard = shards[dist.get_rank()]
    sampler = LMHeadSampler(**rows.head(shard) | {"backend": backend})
    out = sampler(rows.hidden_states, rows.batch, rows.positions)
    assert out.kept is not None
    return out, out.kept


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("fixed", [False, True])
def test_any_order_of_the_ranks_keeps_the_least_ids(backend, fixed):
    """Ranks may hold the shards of a vocabulary in any order, and one of them is empty."""
    params = [SamplingParams(seed=seed, **fields) for seed, fields in enumerate(REQUESTS)]
    rows = Rows(KINDS, params, kept_cap=V, fixed_rounds=fixed)
    oracle, mask = rows.oracle(), rows.kept_mask()
    bounds = [0, 73, 73, 601, V]
    in_order = [VocabShard(*pair) for pair in pairwise(bounds)]
    orders = [[0, 1, 2, 3], [3, 1, 0, 2]][1 - fixed :]
    for order in orders:
        for out, kept in run_ranks(4, _step, rows, [in_order[i] for i in order], backend):
            assert_same(out, oracle)
            for row, (begin, size) in enumerate(zip(kept.offsets, kept.sizes, strict=False)):
                if not kept.whole[row] and rows.params[row].temperature:
                    found = kept.token_ids[begin : begin + size].sort().values
                    assert torch.equal(found, mask[row].nonzero().flatten()), rows.params[row]
    assert kept.whole.any() and (kept.sizes > 1).any() and kept.sizes.min() == 1
