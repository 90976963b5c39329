"""The jitted pieces one by one against their PyTorch twins, and what kernels leave untouched."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tests.support.cases import Case
from tests.support.filtered import Rows, grid, kinds_of_logits
from tests.support.local_step import tile
from tests.support.settings import settings_of
from tests.support.tile_words import told
from tpsample import SamplingParams, Status, VocabShard, noise
from tpsample.backends.triton_.kernels.decode import decode, decode_kernel
from tpsample.backends.triton_.kernels.head import best_of_columns, pack
from tpsample.backends.triton_.kernels.noise import (
    NoiseRows,
    noise_tile,
    row_scale,
    store_row_noise,
)
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.core import word
from tpsample.core.row_noise import RowNoise
from tpsample.filters.finish import shard_logits

INF, NAN = math.inf, math.nan


@triton.jit
def row_probe(
    seed_ptr, position_ptr, temperature_ptr, stream_ptr, stride_stream, scale_ptr, num_rows,
    num_samples, B: tl.constexpr,
):  # fmt: skip
    rows = NoiseRows(num_rows, num_samples, stream_ptr, stride_stream, scale_ptr)
    offs_b = tl.program_id(0) * B + tl.arange(0, B)
    store_row_noise(rows, seed_ptr, position_ptr, temperature_ptr, offs_b)


def test_rows_get_the_streams_and_scales_of_the_oracle():
    """And what lies behind them stays."""
    case = Case.make(37, 6)
    samples, slots, canary = 3, 18, 0x5A5A5A5A
    streams = torch.full((4, slots + 4), canary, dtype=torch.int32)
    scale = torch.full((slots + 4,), -77.0)
    batch = case.batch
    row_probe[(2,)](
        batch.seed, case.positions, batch.temperature, streams, streams.stride(0), scale, 6,
        samples, B=4,
    )  # fmt: skip
    rows = RowNoise(batch.temperature, batch.seed, case.positions, samples)
    for word_index in range(3):
        expected = torch.cat([stream[word_index][:, 0] for stream in rows.streams])
        assert (
            streams[word_index, :slots].to(torch.int64) & 0xFFFFFFFF
        ).tolist() == expected.tolist()
    gain = torch.where(rows.random[:, 0], -1.0, 0.0).repeat(samples)
    assert torch.equal(streams[3, :slots].contiguous().view(torch.float32), gain)
    assert torch.equal(scale[:6], rows.scale[:, 0])
    assert (streams[:, slots:] == canary).all() and (scale[6:] == -77.0).all()


@triton.jit
def scale_probe(temperature_ptr, scale_ptr, N: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(scale_ptr + offs, row_scale(tl.load(temperature_ptr + offs))[0])


@pytest.mark.parametrize("power", [1.0, 2.0**-17, 2.0**99])
def test_the_scale_of_every_temperature_is_the_rounded_quotient(power):
    """Of every significand: an exponent changes no digit."""
    bits = torch.arange(2**23, dtype=torch.int32) | 0x3F800000
    temperature = bits.view(torch.float32) * power
    scale = torch.empty_like(temperature)
    scale_probe[(8,)](temperature, scale, N=2**20)
    rows = RowNoise(temperature, bits, bits, 1)
    assert torch.equal(scale, rows.scale.squeeze(1))


def test_finish_kernel_writes_its_rows_and_clears_its_words_alone():
    words = word.pack(torch.randn(3, 10), torch.arange(30).view(3, 10))
    words[:, 4] = 0
    memory = torch.cat([words, torch.full((3, 2), -77)], dim=1)
    tokens, status = torch.full((14,), -77), torch.full((9,), -77, dtype=torch.int32)
    seeds, out_seeds = torch.arange(9) + 2**60, torch.full((9,), -77)
    decode_kernel[(1,)](
        words_ptr=memory,
        stride_words_s=memory.stride(0),
        seed_ptr=seeds,
        undrawn_ptr=None,
        bad_ptr=None,
        filtered_ptr=None,
        place_ptr=None,
        token_ptr=tokens,
        status_ptr=status,
        out_seed_ptr=out_seeds,
        num_rows=5,
        num_filtered=0,
        num_samples=2,
        num_sources=3,
        BLOCK=8,
        OVERLAP=False,
    )
    assert torch.equal(out_seeds[:5], seeds[:5]) and (out_seeds[5:] == -77).all()
    assert (memory[:, :10] == 0).all() and (memory[:, 10:] == -77).all()
    expected, expected_status = word.decode(words.amax(dim=0).view(2, 5))
    assert tokens[:10].tolist() == expected.T.flatten().tolist()
    assert status[:5].tolist() == expected_status.amax(dim=0).tolist()
    assert status[4] == Status.EMPTY
    assert (tokens[10:] == -77).all() and (status[5:] == -77).all()


def test_the_lm_head_writes_its_words_alone():
    """Behind the words of the batch the buffer keeps what it held."""
    case, canary = Case.make(37, 5), 0x5A5A5A5A
    local = TritonBackend(settings_of(case.weight, VocabShard(0, 37), max_rows=16))
    local.tile = tile(128, 8, 64)
    words = torch.zeros(16, dtype=torch.int64)
    step = local.prepare(case.hidden_states, case.batch._view_of(5), case.positions, 1)
    words[5:] = canary
    local.best_words(step, words[:5])
    assert (words[:5] > 0).all() and (words[5:] == canary).all()


@pytest.mark.parametrize("block_v", [64, 512])
def test_only_stored_rows_are_written_and_all_of_them(block_v):
    """The shard starts within a group of four and ends within a tile; canaries lie around."""
    report = {"logprobs": 3, "logprobs_mode": "processed_logprobs"}
    params = [SamplingParams(seed=1), SamplingParams(temperature=0.0), *grid()[3::122]]
    params += [SamplingParams(seed=4, top_p=0.7, **report)]
    kinds = kinds_of_logits()
    rows = Rows([kinds["zipf"], kinds["two-valued"]], params)
    batch, first, last = rows.batch, 5, 777
    weight = rows.weight[first:last]
    shard = VocabShard(first, last)
    backend = TritonBackend(settings_of(weight, shard, max_rows=len(rows.params)))
    backend.tile = tile(block_v, 16, 16)
    stored, width = len(batch.plan.stored_list), last - first
    assert 0 < stored < len(rows.params)
    memory = torch.full((stored * width + 2 * width,), NAN)
    step = replace(
        backend.prepare(rows.hidden_states, batch._view_of(batch.rows), rows.positions, 1),
        logits=memory[width:-width].view(stored, width),
    )
    backend.best_words(step, torch.zeros(len(rows.params), dtype=torch.int64))
    logits = shard_logits(step, shard, "triton").logits
    assert torch.equal(logits, rows.logits[batch.plan.stored_index][:, first:last])
    assert memory[:width].isnan().all() and memory[-width:].isnan().all()


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("size", [64, 512])
def test_words_of_tiles_are_those_of_the_stored_logits(size, num_samples):
    """After the controls, at both edges of a shard, of rows with a NaN and without a number."""
    allowed = {"allowed_token_ids": [700]}
    biased = {"logit_bias": {6: 40.0, 776: -3.0}}
    fields = [{"seed": 3}, biased, {}, {"temperature": 0.0}, allowed, {"min_p": 0.1, "top_k": 3}]
    rows = Rows([kinds_of_logits()["zipf"]], [SamplingParams(top_p=0.7, **its) for its in fields])
    batch, first, last = rows.batch, 5, 777
    weight, shard = rows.weight[first:last].clone(), VocabShard(first, last)
    hidden_states = rows.hidden_states.clone()
    hidden_states[2] = NAN
    backend = TritonBackend(settings_of(weight, shard, max_rows=len(fields)))
    backend.tile = tile(size, 16, 16)
    step = backend.prepare(hidden_states, batch._view_of(batch.rows), rows.positions, num_samples)
    backend.best_words(step, torch.zeros(num_samples * len(fields), dtype=torch.int64))
    stored = shard_logits(step, shard, "triton")
    right = told(stored, size).tile_words
    assert stored.tile_words.size == size and right.best.shape[:2] == (5, num_samples)
    for found, expected in zip(stored.tile_words[:2], right[:2], strict=True):
        is_nan = word.key_of(expected) == word.KEY_NAN
        assert is_nan.any() and torch.equal(is_nan, word.key_of(found) == word.KEY_NAN)
        assert torch.equal(found[~is_nan], expected[~is_nan])
        tiles = (word.token_of(found) - first // 4 * 4) // size
        assert torch.equal(tiles, torch.arange(tiles.shape[-1]).expand_as(tiles))


@triton.jit
def noise_probe(stream_ptr, out_ptr, first_id, V: tl.constexpr, B: tl.constexpr):
    offs_b = tl.arange(0, B)
    r0 = tl.load(stream_ptr + offs_b * 3 + 0).to(tl.uint32)
    r1 = tl.load(stream_ptr + offs_b * 3 + 1).to(tl.uint32)
    r2 = tl.load(stream_ptr + offs_b * 3 + 2).to(tl.uint32)
    noise = noise_tile(first_id // 4 + tl.arange(0, V // 4), r0, r1, r2)
    tl.store(out_ptr + tl.arange(0, V)[:, None] * B + offs_b[None, :], noise)


@pytest.mark.parametrize("first_id", [0, 12, 2**20 - 256])
def test_jitted_noise_is_the_definition_bit_for_bit(first_id):
    seeds, positions = torch.tensor([0, 3, -1, 2**40 + 7]), torch.tensor([0, 9, 2**62, 1])
    stream = noise.row_stream(seeds.unsqueeze(1), positions.unsqueeze(1))
    out = torch.empty(256, 4)
    noise_probe[(1,)](torch.cat(stream[:3], dim=1), out, first_id, V=256, B=4)
    assert torch.equal(out.T, noise.tile_noise(stream, first_id, 256))


@triton.jit
def word_probe(score_ptr, id_ptr, word_ptr, token_ptr, status_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    packed = pack(tl.load(score_ptr + offs), tl.load(id_ptr + offs))
    tl.store(word_ptr + offs, packed)
    token_id, status = decode(packed)
    tl.store(token_ptr + offs, token_id)
    tl.store(status_ptr + offs, status)


def test_jitted_words_are_the_definition():
    special = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -NAN, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e-38]
    scores = torch.cat([torch.tensor(special), torch.randn(51)])
    ids = torch.cat([torch.tensor([0, 2**20 - 1]), torch.arange(62) * 16901]).to(torch.int32)
    packed, tokens = torch.empty(64, dtype=torch.int64), torch.empty(64, dtype=torch.int64)
    status = torch.empty(64, dtype=torch.int32)
    word_probe[(1,)](scores, ids, packed, tokens, status, N=64)
    assert torch.equal(packed, word.pack(scores, ids.long()))
    expected_tokens, expected_status = word.decode(packed)
    assert torch.equal(tokens, expected_tokens) and torch.equal(status, expected_status)
    assert tokens[:2].tolist() == [0, 2**20 - 1]
    assert status[5:8].tolist() == [Status.EMPTY, Status.NAN, Status.NAN]


@triton.jit
def best_probe(score_ptr, word_ptr, V: tl.constexpr, B: tl.constexpr):
    offs_v, offs_b = tl.arange(0, V), tl.arange(0, B)
    scores = tl.load(score_ptr + offs_v[:, None] * B + offs_b[None, :])
    best, token_id = best_of_columns(scores, offs_v)
    tl.store(word_ptr + offs_b, pack(best, token_id))


def test_best_word_of_a_column():
    columns = [
        ((-1.0, -0.0, 0.0, -2.0), 1),
        ((-1.0, 0.0, -0.0, -2.0), 1),
        ((-INF, -INF, -5.0, -5.0), 2),
        ((3.0, INF, INF, 3.0), 1),
        ((-INF, -INF, -INF, -INF), None),
        ((3.0, NAN, INF, 3.0), None),
        ((-INF, -INF, -INF, NAN), None),
        ((7.0, 7.0, 7.0, 7.0), 0),
    ]
    scores = torch.tensor([column for column, _ in columns]).T.contiguous()
    words = torch.empty(8, dtype=torch.int64)
    best_probe[(1,)](scores, words, V=4, B=8)
    expected = word.pack(scores, torch.arange(4)[:, None]).amax(dim=0)
    won = torch.tensor([token is not None for _, token in columns])
    assert torch.equal(words[won], expected[won])
    tokens, status = word.decode(words)
    assert tokens.tolist() == [-1 if token is None else token for _, token in columns]
    assert torch.equal(status, word.decode(expected)[1])
