"""The Triton kernel stores the logits of filtered rows, and nothing else (interpreter)."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.cases import uneven_shards
from tests.filtered import Rows, V, grid, kinds_of_logits
from tests.ranks import run_ranks
from tpsample import LMHeadSampler, SampleOutput, SamplingParams, VocabShard
from tpsample.exchange.base import Exchange
from tpsample.exchange.ranks import Ranks
from tpsample.kernels.tile import Tile
from tpsample.score import Head
from tpsample.triton_backend import TritonBackend

KINDS = kinds_of_logits()


def _mixed_rows(bias: torch.Tensor | None = None) -> Rows:
    """Plain, greedy, filtered and logprob rows side by side."""
    params = [SamplingParams(seed=1), SamplingParams(temperature=0.0), *grid()[3::61]]
    params += [SamplingParams(seed=4, top_p=0.7, logprobs=3, logprobs_mode="processed_logprobs")]
    params += [SamplingParams(temperature=0.0, logprobs=2)]
    return Rows([KINDS["zipf"], KINDS["two-valued"]], params, bias=bias)


def _sample(rows: Rows, num_samples: int | None) -> SampleOutput:
    shard = uneven_shards(V, dist.get_world_size())[dist.get_rank()]
    sampler = LMHeadSampler(**{**rows.head(shard), "backend": "triton"}, chunks=2)
    return sampler(rows.hidden_states, rows.batch, rows.positions, num_samples=num_samples)


@pytest.mark.parametrize("num_samples", [None, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_filtered_tokens_and_logprobs_are_the_oracles(world_size, num_samples):
    rows = _mixed_rows(bias=torch.linspace(-1, 1, V))
    oracle = rows.oracle(num_samples)
    for out in run_ranks(world_size, _sample, rows, num_samples, timeout_s=120):
        assert torch.equal(out.token_ids, oracle.token_ids)
        assert torch.equal(out.status, oracle.status)
        assert torch.equal(out.logprobs.token_ids, oracle.logprobs.token_ids)
        assert torch.equal(out.logprobs.ranks, oracle.logprobs.ranks)
        error = (out.logprobs.values - oracle.logprobs.values).nan_to_num(0)
        assert error.abs().max() < 2e-6


@pytest.mark.parametrize("block_v", [64, 512])
def test_only_stored_rows_are_written_and_all_of_them(block_v):
    """The shard starts within a group of four and ends within a tile; canaries lie around."""
    rows = _mixed_rows()
    batch, first, last = rows.batch, 5, 777
    tile = Tile(block_v=block_v, block_b=16, block_d=16, num_warps=1, num_stages=1)
    weight = rows.weight[first:last]
    exchange = Exchange(Ranks(), len(rows.params), 1, weight.device)
    backend = TritonBackend(
        weight, VocabShard(first, last), None, Head(), rounds=10, exchange=exchange, tile=tile
    )
    stored, width = len(batch.host_stored), last - first
    assert 0 < stored < len(rows.params)
    memory = torch.full((stored * width + 2 * width,), math.nan)
    backend._logits._flat = memory[width:-width]

    backend.begin(rows.hidden_states, batch, rows.positions, 1)
    backend.run(0, exchange.own_words(0)[: len(rows.params)])
    assert torch.equal(backend.stored_rows().logits, rows.logits[batch.stored][:, first:last])
    assert memory[:width].isnan().all() and memory[-width:].isnan().all()
