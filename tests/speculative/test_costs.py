"""A rank holds its own columns of the logits and no more, and sends few bytes."""

import pytest
import torch

from tests.support.cases import own_shard
from tests.support.memory import Largest
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, verify

K = 3
METHODS = ("rejection", "block")


def _memory_and_bytes(vocab_size: int, rows: int, request: dict) -> list[tuple[int, int]]:
    shard = own_shard(vocab_size, even=True)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocab_size, generator=generator)[shard.start : shard.stop]
    sampler = LMHeadSampler(
        logits.unsqueeze(1), vocab_size=vocab_size, shard=shard, max_rows=64, backend="torch"
    )
    batch = SamplingBatch.from_params(SamplingParams(seed=1, **request), vocab_size=vocab_size)
    drafts = torch.arange(rows * K).view(rows, K)
    draft = logits.expand(rows, K, -1)
    found = []
    for method in METHODS:
        sampler.ranks.bytes_sent = 0
        with Largest() as largest:
            verify(
                sampler, torch.ones(rows, K + 1, 1), drafts, batch, 3, method=method, draft=draft
            )
        found.append((largest.elements, sampler.ranks.bytes_sent))
    return found


@pytest.mark.parametrize(
    "request_", [{"top_k": 40, "top_p": 0.9}, *long({})], ids=["filtered", "plain"]
)
def test_no_rank_holds_more_than_its_own_columns(request_):
    """The largest tensor has B · (K + 1) · V_local elements; the bytes do not depend on V."""
    rows, vocab_size, world_size = 4, 65536, 4
    own = rows * (K + 1) * vocab_size // world_size
    for found in run_ranks(world_size, _memory_and_bytes, vocab_size, rows, request_):
        for elements, num_bytes in found:
            assert own <= elements <= 1.1 * own
            assert 0 < num_bytes < rows * (K + 1) * (50_000 if request_ else 200)
