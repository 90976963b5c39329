"""Samplers of stored logits, which tpsample is compared with.

Every baseline multiplies with the vendor's library, stores the logits and samples from them, as
serving engines do; FlashSampling alone samples in the product. None divides by a temperature (all
rows have T = 1), which favours the baselines. `WHO` says who samples so. FlashInfer and
FlashSampling are of packages that have to be at hand (`benchmarks.lab.third_party`). On several
ranks `benchmarks.lab.whole_logits` makes whole rows of logits first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import third_party
from benchmarks.lab.problem import Problem, make_sampler
from benchmarks.lab.third_party import FLASHINFER, FLASHSAMPLING
from tpsample import SampleOutput
from tpsample.core.machine import interpreted
from tpsample.ranks.ranks import Ranks

RACE, GUMBEL = "softmax + exponential race", "Gumbel argmax"
SORT, TOPK, MASK = "sort", "topk", "mask"

WHO = {
    RACE: "PyTorch: vLLM with VLLM_USE_FLASHINFER_SAMPLER=0, gpt-fast",
    GUMBEL: "sample_logits: noise and argmax in one pass, as the sampler of vLLM's V2 runner",
    FLASHINFER: "vLLM with VLLM_USE_FLASHINFER_SAMPLER=1, SGLang --sampling-backend flashinfer",
    FLASHSAMPLING: "fused_mm_sample_triton of its repository, one rank",
    SORT: "filters by sorting the vocabulary: SGLang --sampling-backend pytorch, vLLM without "
    "FlashInfer",
    TOPK: "torch.topk, then the other filters among those k: no slower than vLLM's and gpt-fast's "
    "top_k in PyTorch, which mask the logits below the k-th",
    MASK: "min_p alone needs the largest logit and no order: vLLM, transformers",
}
"""The users of each baseline."""

Sampler = Callable[[Tensor], Tensor]
"""Maps logits [B, V] to ids [B]."""

Kept = tuple[Tensor, Tensor]
"""Logits [B, n] in falling order, -inf where a filter drops one, and their ids."""


def has_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run here: on a GPU, or in the interpreter."""
    return device.type == "cuda" or interpreted()


def samplers(problem: Problem, **filters: Any) -> dict[str, Sampler]:
    """Return the samplers of logits for requests with these filters, those at hand, by name.

    On a GPU, where each takes seconds to compile, a sort is left out if another does the same.
    """
    device = problem.weight.device
    if not filters:
        found = {RACE: compiled(softmax_race, device), GUMBEL: gumbel_argmax(problem)}
    else:
        chosen: dict[str, Callable[..., Tensor]] = {}
        if filters.get("top_k", 0) > 0:
            chosen[TOPK] = topk_sample
        if set(filters) == {"min_p"}:
            chosen[MASK] = mask_sample
        if not chosen or device.type != "cuda":
            chosen[SORT] = sort_sample
        found = {name: compiled(partial(f, **filters), device) for name, f in chosen.items()}
    if third_party.usable(FLASHINFER, device):
        found[FLASHINFER] = partial(third_party.flashinfer_sample, **filters)
    return found


def single_rank(problem: Problem, **filters: Any) -> dict[str, Callable[[], Tensor]]:
    """Return every baseline on one rank, from hidden states to ids, by name."""
    steps: dict[str, Callable[[], Tensor]] = {
        name: partial(_multiply_then, sample, problem)
        for name, sample in samplers(problem, **filters).items()
    }
    if not filters and third_party.usable(FLASHSAMPLING, problem.weight.device):
        fused = third_party.flash_sampling(problem.hidden_states, problem.weight)
        steps[FLASHSAMPLING] = fused
    return steps


def _multiply_then(sample: Sampler, problem: Problem) -> Tensor:
    return sample(problem.hidden_states @ problem.weight.T)


def notes(device: torch.device, dtype: str) -> list[str]:
    """Return what a reader has to know about the baselines with a weight of this dtype."""
    lines = [
        f"Baselines multiply in {dtype} with the vendor's library, store the logits and sample "
        "from them without dividing by a temperature (T = 1). They draw noise of their own, anew "
        f"at every step; {GUMBEL} alone has tpsample's noise and ids.",
        *third_party.notes(device),
    ]
    if device.type != "cuda":
        lines.append(
            "On a CPU nothing is compiled, and no cache is flushed between steps; torch had "
            f"{torch.get_num_threads()} of {os.cpu_count()} cores."
        )
    return lines


def compiled(fn: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return `fn` through torch.compile on a GPU, and as it is on a CPU."""
    if device.type != "cuda":
        return fn
    torch.compiler.reset()  # else the limit on recompilations makes the ninth shape run eagerly
    return torch.compile(fn, dynamic=False)


def softmax_race(logits: Tensor) -> Tensor:
    """Draw as engines do: the first of independent exponential clocks, at rates p, to ring.

    This is the law of torch.multinomial, which makes more passes over the probabilities.
    """
    probabilities = logits.float().softmax(dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(dim=-1)


def gumbel_argmax(problem: Problem) -> Sampler:
    """Return one pass of Gumbel-max over logits: `LMHeadSampler.sample_logits`, on one rank."""
    sampler = make_sampler(problem.weight, problem.rows, group=Ranks())
    out = SampleOutput.empty(problem.batch.seed, None)

    def sample(logits: Tensor) -> Tensor:
        return sampler.sample_logits(logits, problem.batch, problem.positions, out=out).token_ids

    return sample


def sort_sample(logits: Tensor, **filters: Any) -> Tensor:
    """Return draws by sorting the whole vocabulary."""
    return _draw(*sort_kept(logits.float(), **filters))


def topk_sample(logits: Tensor, top_k: int, **filters: Any) -> Tensor:
    """Return draws from the k largest logits, without a sort of the others."""
    return _draw(*topk_kept(logits.float(), top_k, **filters))


def mask_sample(logits: Tensor, min_p: float) -> Tensor:
    """Return draws from the logits that lie near enough to the largest one."""
    return softmax_race(mask_kept(logits.float(), min_p))


def sort_kept(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Kept:
    """Return what filters keep, by sorting the whole vocabulary."""
    logits, ids = logits.sort(dim=1, descending=True)
    if top_k > 0:
        logits, ids = logits[:, :top_k], ids[:, :top_k]
    return _cut(logits, top_p, min_p), ids


def topk_kept(logits: Tensor, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> Kept:
    """Return what filters keep of the k largest logits."""
    logits, ids = logits.topk(top_k, dim=1)
    return _cut(logits, top_p, min_p), ids


def mask_kept(logits: Tensor, min_p: float) -> Tensor:
    """Return logits [B, V] with -inf where they lie too far below the largest one."""
    least = logits.amax(dim=1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < least, -torch.inf)


def within(logits: Tensor, top_p: float, probabilities: Tensor) -> Tensor:
    """Return logits in falling order with -inf after those that have a mass of top_p."""
    before = probabilities.cumsum(dim=1) - probabilities
    return logits.masked_fill(before >= top_p, -torch.inf)


def _cut(logits: Tensor, top_p: float, min_p: float) -> Tensor:
    """Return logits in falling order with -inf where they are dropped.

    top_p is of the mass that min_p left.
    """
    if min_p > 0:
        logits = logits.masked_fill(logits < logits[:, :1] + math.log(min_p), -torch.inf)
    return within(logits, top_p, logits.softmax(dim=1)) if top_p < 1 else logits


def _draw(logits: Tensor, ids: Tensor) -> Tensor:
    return ids.gather(1, softmax_race(logits).unsqueeze(1)).squeeze(1)
