"""A rank holds its own columns of the logits and no more, and sends few bytes."""

import pytest
import torch

from tests.support.cases import own_sampler
from tests.support.memory import cost_of
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams, verify

K = 3


def _costs(vocab_size: int, rows: int, request: dict) -> list[tuple[int, int]]:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))
    sampler = own_sampler(logits.unsqueeze(1), max_rows=64)
    batch = SamplingBatch.from_params(SamplingParams(seed=1, **request), vocab_size=vocab_size)
    drafts = torch.arange(rows * K).view(rows, K)
    draft = logits[sampler.shard.start : sampler.shard.stop].expand(rows, K, -1)
    given = torch.ones(rows, K + 1, 1), drafts, batch, 3
    return [
        cost_of(sampler, lambda m=method: verify(sampler, *given, method=m, draft=draft))
        for method in ("rejection", "block")
    ]


@pytest.mark.parametrize(
    "request_", [{"top_k": 40, "top_p": 0.9}, *long({})], ids=["filtered", "plain"]
)
def test_no_rank_holds_more_than_its_own_columns(request_):
    """The largest tensor has B · (K + 1) · V_local elements; the bytes do not depend on V."""
    rows, vocab_size, world_size = 4, 65536, 4
    own = rows * (K + 1) * vocab_size // world_size
    for found in run_ranks(world_size, _costs, vocab_size, rows, request_):
        for num_bytes, elements in found:
            assert own <= elements <= 1.1 * own
            assert 0 < num_bytes < rows * (K + 1) * (50_000 if request_ else 200)
