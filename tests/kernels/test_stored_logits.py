"""The Triton kernel stores the logits of filtered rows, and nothing else (interpreter)."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.filtered import Rows, V, assert_same, grid, kinds_of_logits
from tests.support.ranks import run_ranks
from tests.support.settings import settings_of
from tests.support.tiers import long
from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
)
from tpsample.local.tile_table import Tile
from tpsample.local.triton_backend import TritonBackend
from tpsample.logits.finish import shard_logits
from tpsample.request.step import Inputs

KINDS = kinds_of_logits()


def _mixed_rows(bias: torch.Tensor | None = None) -> Rows:
    """Plain, greedy, filtered and logprob rows side by side."""
    params = [SamplingParams(seed=1), SamplingParams(temperature=0.0), *grid()[3::122]]
    params += [SamplingParams(seed=4, top_p=0.7, logprobs=3, logprobs_mode="processed_logprobs")]
    params += [SamplingParams(temperature=0.0, logprobs=2)]
    return Rows([KINDS["zipf"], KINDS["two-valued"]], params, bias=bias)


def _by_the_kernels(rows: Rows, num_samples: int | None) -> SampleOutput:
    return rows.step(num_samples, backend="triton", chunks=2)


@pytest.mark.parametrize(
    ("world_size", "num_samples"), [(1, 2), *long((1, None), (3, None), (3, 2))]
)
def test_filtered_tokens_and_logprobs_are_the_oracles(world_size, num_samples):
    rows = _mixed_rows(bias=torch.linspace(-1, 1, V))
    for out in run_ranks(world_size, _by_the_kernels, rows, num_samples):
        assert_same(out, rows.oracle(num_samples))


def _controlled_rows() -> tuple[Rows, SamplingBatch]:
    """Requests with and without controls, some of them stored."""
    params = [
        SamplingParams(seed=1, repetition_penalty=1.3),
        SamplingParams(seed=2, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(seed=3, top_k=9, logit_bias={7: 2.5, 900: -4.0}, frequency_penalty=0.3),
        SamplingParams(seed=4, min_p=0.1),
        SamplingParams(seed=5, allowed_token_ids=list(range(90, 700)), logprobs=2),
    ]
    rows = Rows([KINDS["normal"]], params)
    tokens = [[7, 8, 9, 8], [100, 701], [], [5], [91]]
    batch = SamplingBatch.from_params(params, vocab_size=V, output_token_ids=tokens)
    return rows, batch


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_with_controls_the_processed_logits_are_stored_too(backend):
    rows, batch = _controlled_rows()
    sampler = LMHeadSampler(rows.weight, backend=backend, max_rows=8)
    view = batch.view(batch.rows)
    out = SampleOutput.empty(view.seed, None)
    step = sampler.begin(Inputs(rows.hidden_states), view, rows.positions, out)
    sampler.finish(step)
    stored = shard_logits(step, sampler.shard, sampler.backend)
    assert batch.plan.stored_list == [1, 2, 3, 4]
    processed = reference.processed_logits(rows.logits, batch)[batch.plan.stored_index]
    bounded = batch.plan.bounded if backend == "torch" else []  # they have few of their logits
    whole = [place for place in range(4) if place not in bounded]
    assert len(whole) >= 2
    raw = rows.logits[batch.plan.stored_index]
    assert torch.equal(stored.raw[whole], raw[whole])
    assert torch.equal(stored.logits[whole], processed[whole])
    assert not torch.equal(stored.logits[whole], stored.raw[whole])

    batch.drop(0)
    for name in ("grammar_bitmask", "forced_token_ids"):  # controls that come and go
        bits = torch.full((4, -(-V // 32)), -1, dtype=torch.int32)
        setattr(batch, name, bits if name == "grammar_bitmask" else torch.full((4,), -1))
        setattr(batch, name, None)
    out = sampler(rows.hidden_states[1:], batch, rows.positions[1:])
    expected = reference.sample(rows.logits[1:], batch, rows.positions[1:])
    assert_same(out, expected)


@pytest.mark.parametrize("block_v", [64, 512])
def test_only_stored_rows_are_written_and_all_of_them(block_v):
    """The shard starts within a group of four and ends within a tile; canaries lie around."""
    rows = _mixed_rows()
    batch, first, last = rows.batch, 5, 777
    tile = Tile(block_v=block_v, block_b=16, block_d=16, num_warps=1, num_stages=1)
    weight = rows.weight[first:last]
    shard = VocabShard(first, last)
    backend = TritonBackend(settings_of(weight, shard, max_rows=len(rows.params)))
    backend.tile = tile
    stored, width = len(batch.plan.stored_list), last - first
    assert 0 < stored < len(rows.params)
    memory = torch.full((stored * width + 2 * width,), math.nan)
    step = replace(
        backend.prepare(rows.hidden_states, batch.view(batch.rows), rows.positions, 1),
        logits=memory[width:-width].view(stored, width),
    )
    backend.best_words(step, torch.zeros(len(rows.params), dtype=torch.int64))
    logits = shard_logits(step, shard, "triton").logits
    assert torch.equal(logits, rows.logits[batch.plan.stored_index][:, first:last])
    assert memory[:width].isnan().all() and memory[-width:].isnan().all()
