"""Rows that a rejection decides beside rows that it leaves to the threshold, in fixed rounds."""

from typing import Any

import pytest
import torch

from tests.support.filtered import Rows, V, kinds_of_logits, masked
from tests.support.stored import on_virtual_ranks
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams
from tpsample.logits.shard_logits import ShardLogits
from tpsample.logits.shard_logits_triton import TritonShardLogits

# The interpreter computes with the NaN of a row as a GPU does, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

KINDS = kinds_of_logits()


def _mixture_of_ways(num_rows: int) -> Rows:
    """Every way of a row beside the others, flat rows that 8 scores rarely decide among them."""
    requests: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"top_p": 0.01, "temperature": 50.0},
        {"top_k": 20},
        {"top_k": 400, "top_p": 0.9},
        {"top_k": 400, "top_p": 0.02, "temperature": 50.0, "ties": "keep"},
        {"top_k": 2, "temperature": 50.0, "ties": "keep"},
        {"top_k": 30, "top_p": 0.05, "temperature": 50.0},
        {"top_k": 2, "top_p": 0.01, "temperature": 50.0, "filter_order": "joint"},
        {"min_p": 0.99, "temperature": 3.0},
        {"top_p": 0.3, "min_p": 0.9, "temperature": 9.0, "filter_order": "min_p_last"},
        {"top_p": 1e-6, "min_p": 0.05},
    ]
    picked = [requests[i % len(requests)] for i in range(num_rows)]
    return Rows([KINDS["normal"]], [SamplingParams(seed=i, **r) for i, r in enumerate(picked)])


@pytest.mark.parametrize(
    ("backend", "world_size", "num_samples"),
    [
        ("torch", 1, None),
        ("torch", 3, 2),
        ("triton", 2, None),
        *long(("triton", 1, None), ("triton", 1, 2), ("triton", 3, 2)),
    ],
)
def test_decided_and_undecided_rows_of_one_step(monkeypatch, backend, world_size, num_samples):
    """Each has its own token, where a rejection decides some of them and leaves others."""
    decided = _noted_decisions(monkeypatch)
    rows = _mixture_of_ways(11 if backend == "triton" else 33)
    rows.bias = masked(30, 500)
    oracle = rows.oracle(num_samples)
    batch = SamplingBatch.from_params(rows.params, vocab_size=V, fixed_rounds=True)
    for out in on_virtual_ranks(rows.logits, batch, backend, world_size, num_samples):
        assert torch.equal(out.token_ids, oracle.token_ids)
        assert torch.equal(out.status, oracle.status)
    assert len(decided) == world_size
    few = rows.batch.plan.filters.by_top_words
    assert decided[0][few].all() and few.any()
    assert decided[0][~few].any() and not decided[0][~few].all()


def _noted_decisions(monkeypatch) -> list[torch.Tensor]:
    """A list that grows by what each rejection decides."""
    decided: list[torch.Tensor] = []
    first_kept = {kind: kind.first_kept for kind in (ShardLogits, TritonShardLogits)}

    def noted(self, *arguments):
        words, its = first_kept[type(self)](self, *arguments)
        decided.append(its)
        return words, its

    for kind in first_kept:
        monkeypatch.setattr(kind, "first_kept", noted)
    return decided
