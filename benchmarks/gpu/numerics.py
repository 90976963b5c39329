"""Sections of the GPU check on numbers: noise, planted tails, the oracle, bitwise invariance.

Each takes the device and whether this is a dry run on a CPU. It yields its results as JSON values,
and raises if something is wrong; those that try one thing after another raise once, naming all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.lab.kernels import noise_kernel
from benchmarks.lab.problem import (
    Compared,
    Problem,
    make_sampler,
    make_weight,
    override_tile,
)
from benchmarks.lab.timing import one_line
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.backends.triton_.tile_table import Tile, all_tiles
from tpsample.core.weight_format import BF16
from tpsample.request.step import Inputs

MAX_ERROR = 1.1e-5
"""Of L in log2, for words up to E = 5.5; beyond, 1 - u runs out of bits and the mean counts."""

# (seed, planted id, its Gumbel noise, id of the head): noise that fp32 -log(-log(u)) never
# reaches, in layout tps-philox-v1 at position 0.
GOLDENS = (
    (481, 12239, 18.61, 5),
    (2, 84308, 17.27, 29),
    (345, 91596, 17.18, 34),
)

BLOCK = 4096
"""Words of a program of `noise_kernel`."""

MIXED = (0.0, 0.5, 1.0, 2.0)
"""Temperatures of rows, greedy included."""


def device_of(dry_run: bool) -> torch.device:
    """The GPU, or the CPU of a dry run."""
    if dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: no GPU here; --dry-run runs tiny sizes on a CPU")
    return torch.device("cuda", torch.cuda.current_device())


def noise(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Jitted noise of every 32-bit word against float64; of the smallest with all low halves."""
    stride, chunk = (2**14, 2**17) if dry_run else (1, 2**26)
    small = 16 if dry_run else 4096
    worst_error = far_error_sum = far_worst = 0.0
    for first in range(0, 2**32, stride * chunk):
        word = torch.arange(first, min(first + stride * chunk, 2**32), stride, device=device)
        error = _noise_error(word, (word * 40503 + (word >> 16)) & 0xFFFF)
        far = word >= 2**32 - 2**24
        worst_error = max(worst_error, float(torch.where(far, 0, error).max()))
        far_worst = max(far_worst, float(torch.where(far, error, 0).max()))
        far_error_sum += float(torch.where(far, error, 0).sum())

    # The far tail: every low half of the smallest words.
    lows = torch.arange(2**16, device=device)
    for first in range(0, small, 256):
        word = torch.arange(first, min(first + 256, small), device=device)
        word, low = (each.flatten() for each in torch.broadcast_tensors(word[:, None], lows))
        worst_error = max(worst_error, float(_noise_error(word, low).max()))

    far_mean = far_error_sum * stride * 2.0**-32
    _require(worst_error <= MAX_ERROR, f"noise is off by {worst_error:.3g} in log2")
    _require(far_mean < 1e-6, f"noise beyond E = 5.5 is off by {far_mean:.3g} on average")
    yield {
        "words": 2**32 // stride,
        "sup_error_log2_to_e_5.5": worst_error,
        "sup_error_log2_beyond": far_worst,
        "mean_error_log2_beyond": far_mean,
    }


def _noise_error(word: Tensor, low: Tensor) -> Tensor:
    """Return how far jitted L of words with given low halves is from float64."""
    value = torch.empty(word.shape, dtype=torch.float32, device=word.device)
    noise_kernel[(triton.cdiv(len(word), BLOCK),)](
        word_ptr=word,
        low_ptr=low,
        value_ptr=value,
        num_words=len(word),
        BLOCK=BLOCK,
    )
    u = word.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-48
    true = torch.log2(-torch.log1p(-u) / math.log(2))
    return (value.double() - true).abs().nan_to_num(nan=math.inf, posinf=math.inf)


def goldens(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Ids so unlikely that coarser noise never draws them must win where they are planted."""
    vocab_size = 16384 if dry_run else 131072
    chosen = [case for case in GOLDENS if case[1] < vocab_size]
    won, wrong = 0, []
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.full((vocab_size, 16), -60.0, dtype=dtype, device=device)
        for column, (_, planted, gumbel, head) in enumerate(chosen):
            weight[head, column] = 0.0
            weight[planted, column] = -(gumbel - 0.3)
        hidden = torch.eye(16, dtype=dtype, device=device)[: len(chosen)].contiguous()
        batch = SamplingBatch.from_params(
            [SamplingParams(seed=case[0]) for case in chosen], vocab_size=vocab_size, device=device
        )
        sampler = make_sampler(weight, len(chosen))
        got = sampler(hidden, batch, 0).token_ids.tolist()
        expected = [case[1] for case in chosen]
        if got != expected:
            wrong.append(f"{dtype}: got {got}, planted {expected}")
        won += len(chosen)
    _require(not wrong, "; ".join(wrong))
    yield {"planted_ids_that_won": won}


def oracle(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Ids against logits summed in float64; only near ties may differ."""
    vocab_size, hidden_size, rows = (1000, 64, 5) if dry_run else (128256, 4096, 256)
    weight = make_weight(vocab_size, hidden_size, device)
    problem = Problem.make(weight, rows, MIXED)
    sampler = make_sampler(weight, rows)
    compared = Compared()
    for step in range(1 if dry_run else 8):
        moved = dataclasses.replace(problem, positions=problem.positions + 1000 * step)
        compared += moved.sampled_by(sampler).check()
    yield {"vocab_size": vocab_size, **vars(compared)}


def invariance(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Best scores bit by bit, and ids, whatever the batch, row order or shard."""
    batches = (1, 2, 5) if dry_run else (1, 2, 16, 17, 64, 256)
    problem = _mixed_problem(device, dry_run)
    rows, vocab_size = problem.rows, problem.vocab_size
    expected = best_words(problem)
    wrong = []
    for batch in batches:
        for first in {0, rows - batch}:
            index = range(first, first + batch)
            if not torch.equal(best_words(problem.take(index)), expected[first : first + batch]):
                wrong.append(f"batch {batch} at row {first}")
    reversed_words = best_words(problem.take(range(rows - 1, -1, -1)))
    if not torch.equal(reversed_words, expected.flip(0)):
        wrong.append("rows in reverse order")

    # A greedy row's best score is its largest logit: the largest over the shards must be the same
    # bits. Odd bounds shift the tiles.
    greedy = problem.take([row for row in range(rows) if row % len(MIXED) == 0])
    whole = best_words(greedy) >> 20
    for parts in (2, 3, 8):
        bounds = [vocab_size * part // parts for part in range(parts + 1)]
        shards = [VocabShard(*pair) for pair in itertools.pairwise(bounds)]
        best = torch.stack(
            [
                best_words(
                    dataclasses.replace(greedy, weight=problem.weight[shard.start : shard.stop])
                )
                for shard in shards
            ]
        )
        if not torch.equal(best.amax(dim=0) >> 20, whole):
            wrong.append(f"{parts} shards")
    _require(not wrong, f"logits or ids differ: {'; '.join(wrong)}")
    yield {"batches": list(batches), "shards": [2, 3, 8]}


def tiles(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Best scores bit by bit, and ids, whatever the tile."""
    problem = _mixed_problem(device, dry_run)
    expected = best_words(problem)
    wrong = []
    for tile in tiles_to_try(dry_run):
        try:
            if not torch.equal(best_words(problem, tile), expected):
                wrong.append(f"{tile} changes a score")
        except Exception as error:  # too much shared memory, or a compiler that gives up
            wrong.append(f"{tile}: {one_line(error)}")
        yield {"tiles": [str(tile)]}
    _require(not wrong, "; ".join(wrong))


def _mixed_problem(device: torch.device, dry_run: bool) -> Problem:
    vocab_size, hidden_size, rows = (1000, 64, 5) if dry_run else (128256, 4096, 256)
    return Problem.make(make_weight(vocab_size, hidden_size, device), rows, MIXED)


def tiles_to_try(dry_run: bool) -> list[Tile]:
    """The table's bf16 tiles, and the same with another depth of the inner loop."""
    if dry_run:
        small = Tile(block_v=256, block_b=4, block_d=64, num_warps=1, num_stages=1)
        return [small, dataclasses.replace(small, block_v=128)]
    tiles = [tile for tile, weights in all_tiles() if weights is BF16]
    other = [dataclasses.replace(tile, block_d=32 if tile.block_d > 32 else 64) for tile in tiles]
    return [*tiles, *other]


def best_words(problem: Problem, tile: Tile | None = None) -> Tensor:
    """Each row's winning word, whose upper bits are the bits of its score."""
    sampler = make_sampler(problem.weight, problem.rows)
    if tile is not None:
        override_tile(sampler, tile)
    out = sampler.pipeline.start(Inputs(problem.hidden_states), problem.batch, problem.positions)
    words = sampler.exchange.collect(problem.rows).amax(dim=0)
    sampler.pipeline.finish(out)
    return words


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
