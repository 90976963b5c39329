"""What tpsample is compared with: samplers over stored logits, and the time to read the weight.

Every baseline multiplies with cuBLAS in bf16, stores the logits and samples from them, as serving
engines do; FlashSampling alone samples in the product. None divides by a temperature (all rows have
T = 1), which favours the baselines. Each stands for what a user can run:

    softmax + exponential race  PyTorch alone: vLLM with VLLM_USE_FLASHINFER_SAMPLER=0, gpt-fast
    Gumbel argmax               one pass of noise and argmax: vLLM's own sampler kernel (its V2
                                runner), with our noise
    FlashInfer                  vLLM with VLLM_USE_FLASHINFER_SAMPLER=1, SGLang with
                                --sampling-backend flashinfer
    FlashSampling               fused_mm_sample_triton of its repository, one rank

The last two are of packages that have to be at hand: see `benchmarks.third_party`. Samplers with
top_k, top_p and min_p are in `benchmarks.filter_baselines`. On several ranks
`benchmarks.whole_logits` makes whole rows of logits first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import third_party
from benchmarks.problem import Problem
from tpsample import noise, reference
from tpsample.core import word
from tpsample.core.interpreted import interpreted

RACE = "softmax + exponential race"
GUMBEL = "Gumbel argmax"

READ_PROGRAMS_PER_SM = (4, 8, 16)
"""Grids of the read kernel that are tried; the fastest one is the limit."""

_BLOCK_V = 1024
_READ_BLOCK = 2048


def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels run here: on a GPU, or in the interpreter."""
    return device.type == "cuda" or interpreted()


def logits_samplers(problem: Problem) -> dict[str, Callable[[Tensor], Tensor]]:
    """Samplers of logits [B, V] to ids [B], by name; those that are at hand."""
    samplers = {RACE: softmax_race, GUMBEL: gumbel_argmax(problem)}
    if third_party.usable(third_party.FLASHINFER, problem.weight.device):
        samplers[third_party.FLASHINFER] = third_party.flashinfer_sample
    return samplers


def notes(device: torch.device) -> list[str]:
    """What a reader has to know about the baselines of a run without filters."""
    return [
        *how_they_run(device, torch.bfloat16),
        f"{RACE} draws anew at every replay of its graph; nothing compares its ids.",
        f"{GUMBEL} launches three tiny kernels beside its own, which zero the words and take the "
        "ids from them; its time includes them.",
        *third_party.notes(device),
    ]


def how_they_run(device: torch.device, dtype: torch.dtype) -> list[str]:
    """What a reader has to know about any baseline with a weight of this dtype."""
    lines = [
        f"Baselines multiply in {text_of(dtype)} with the vendor's library, store the logits and "
        "sample from them without dividing by a temperature (T = 1)."
    ]
    if device.type != "cuda":
        lines.append(
            f"On a CPU nothing is compiled, and no cache is flushed between steps; torch had "
            f"{torch.get_num_threads()} of {os.cpu_count()} cores."
        )
    return lines


def text_of(dtype: torch.dtype) -> str:
    """Return a dtype in the words of a page, such as bf16."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def compiled(fn: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """`fn` through torch.compile on a GPU, as it is on a CPU."""
    if device.type != "cuda":
        return fn
    torch.compiler.reset()  # else the limit on recompilations makes the ninth shape run eagerly
    return torch.compile(fn, dynamic=False)


def single_rank(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Every baseline on one rank: hidden states to ids."""
    hidden, weight = problem.hidden_states, problem.weight
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, sample in logits_samplers(problem).items():
        if name == RACE:
            steps[name] = partial(compiled(_matmul_race, weight.device), hidden, weight)
        else:
            steps[name] = partial(_matmul_then, sample, hidden, weight)
    if third_party.usable(third_party.FLASHSAMPLING, weight.device):
        steps[third_party.FLASHSAMPLING] = third_party.flash_sampling(hidden, weight)
    return steps


def softmax_race(logits: Tensor) -> Tensor:
    """Draw as engines do: the first of independent exponential clocks, at rates p, to ring.

    This is the law of torch.multinomial, which makes more passes over the probabilities.
    """
    probabilities = logits.float().softmax(dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(dim=-1)


def _matmul_race(hidden: Tensor, weight: Tensor) -> Tensor:
    return softmax_race(hidden @ weight.T)


def _matmul_then(sample: Callable[[Tensor], Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
    return sample(hidden @ weight.T)


def gumbel_argmax(problem: Problem) -> Callable[[Tensor], Tensor]:
    """One pass of Gumbel-max over stored logits, with the sampler's own noise."""
    device, rows, vocab_size = problem.weight.device, problem.rows, problem.vocab_size
    if not has_triton(device):
        batch, positions = problem.batch, problem.positions
        return lambda logits: reference.scores(logits, batch, positions).argmax(dim=1)

    import triton

    from benchmarks.baseline_kernels import ROUNDS, gumbel_argmax_kernel

    stream = noise.row_stream(problem.batch.seed, problem.positions)
    streams = torch.stack(stream[:3], dim=1).to(torch.int32)
    scale = torch.full((rows,), math.log2(math.e), device=device)
    words = torch.zeros(rows, dtype=torch.int64, device=device)

    def sample(logits: Tensor) -> Tensor:
        words.zero_()
        gumbel_argmax_kernel[(triton.cdiv(vocab_size, _BLOCK_V), rows)](
            logits_ptr=logits,
            stride_logits_b=logits.stride(0),
            stream_ptr=streams,
            scale_ptr=scale,
            words_ptr=words,
            vocab_size=vocab_size,
            ROUNDS=ROUNDS,
            BLOCK_V=_BLOCK_V,
        )
        return word.TOKEN_MASK - (words & word.TOKEN_MASK)

    return sample


def greedy(problem: Problem) -> Callable[[], Tensor]:
    """One launch of the product with a plain greedy epilogue, in the tile that sampling takes.

    Returns:
        A step that returns the best value of every tile and row with its id: int32 [2, tiles, B],
        values as the bits of fp32.
    """
    import triton

    from benchmarks.greedy import greedy_kernel
    from tpsample.local.tile_table import interpreter_tile, tile_for
    from tpsample.local.tiles import Gpu

    weight, rows, hidden_size = problem.weight, problem.rows, problem.weight.shape[1]
    device, batch = weight.device, problem.batch
    tile = interpreter_tile(rows, hidden_size)
    if device.type == "cuda":
        tile = tile_for(rows, problem.vocab_size, hidden_size, weight.dtype, Gpu.of(device))
    tiles = triton.cdiv(problem.vocab_size, tile.block_v)
    padded = rows + tile.block_b
    streams = torch.zeros(4, padded, dtype=torch.int32, device=device)
    scale = torch.ones(padded, device=device)
    best = torch.zeros(2, tiles, rows, dtype=torch.int32, device=device)

    def step() -> Tensor:
        greedy_kernel[(tiles * triton.cdiv(rows, tile.block_b),)](
            hidden_ptr=problem.hidden_states,
            stride_hidden_b=problem.hidden_states.stride(0),
            weight_ptr=weight,
            stride_weight_v=weight.stride(0),
            seed_ptr=batch.seed,
            position_ptr=problem.positions,
            temperature_ptr=batch.temperature,
            stream_ptr=streams,
            stride_stream=streams.stride(0),
            scale_ptr=scale,
            value_ptr=best[0].view(torch.float32),
            index_ptr=best[1],
            num_rows=rows,
            vocab_start=0,
            vocab_stop=problem.vocab_size,
            HIDDEN_SIZE=hidden_size,
            BLOCK_V=tile.block_v,
            BLOCK_B=tile.block_b,
            BLOCK_D=tile.block_d,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return best

    return step


def weight_reads(weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to read the whole weight and do nothing with it, each checked to have read it all."""
    words = weight.view(torch.int32).flatten()
    if not has_triton(weight.device):
        reads: dict[str, Callable[[], Tensor]] = {"read": lambda: words.sum()}
    else:
        reads = {f"read, {n} programs/SM": read_words(words, n) for n in READ_PROGRAMS_PER_SM}
    for name, read in reads.items():
        check_read(name, read, words)
    return reads


def check_read(name: str, read: Callable[[], Tensor], words: Tensor) -> None:
    """Raise AssertionError unless `read` returns parts of the sum of all words."""
    if int(read().sum()) % 2**32 != int(words.sum()) % 2**32:
        raise AssertionError(f"{name}: did not read every byte of the weight")


def read_words(words: Tensor, programs_per_sm: int) -> Callable[[], Tensor]:
    from benchmarks.baseline_kernels import read_kernel

    device = words.device
    sms = 1
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.zeros(sms * programs_per_sm, dtype=torch.int64, device=device)

    def read() -> Tensor:
        read_kernel[(len(sums),)](words, sums, words.numel(), BLOCK=_READ_BLOCK, num_warps=8)
        return sums

    return read
