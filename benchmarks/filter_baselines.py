"""Samplers of stored logits with top_k, top_p or min_p, as engines write them in plain PyTorch.

    sort   the whole vocabulary is sorted: SGLang with --sampling-backend pytorch, vLLM with
           VLLM_USE_FLASHINFER_SAMPLER=0
    topk   torch.topk, then all else among those k: no slower than what vLLM and gpt-fast do for
           top_k, who mask the logits below the k-th
    mask   min_p alone needs the largest logit and no order: vLLM, transformers

All end with the draw of `baselines.softmax_race`, which is what torch.multinomial does for one
sample, without its checks of the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import baselines, third_party

SORT, TOPK, MASK = "sort", "topk", "mask"


def samplers(device: torch.device, **filters: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the samplers, logits [B, V] to ids [B], that can filter so and are at hand.

    On a GPU, where each takes seconds to compile, a sort is left out if another does the same.
    """
    found: dict[str, Callable[..., Tensor]] = {}
    if filters.get("top_k", 0) > 0:
        found[TOPK] = topk_sample
    if set(filters) == {"min_p"}:
        found[MASK] = mask_sample
    if not found or device.type != "cuda":
        found[SORT] = sort_sample
    ready = {name: baselines.compiled(partial(f, **filters), device) for name, f in found.items()}
    if third_party.usable(third_party.FLASHINFER, device):
        ready[third_party.FLASHINFER] = partial(third_party.flashinfer_sample, **filters)
    return ready


def sort_sample(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return draws by sorting the whole vocabulary."""
    logits, ids = logits.float().sort(dim=1, descending=True)
    if top_k > 0:
        logits, ids = logits[:, :top_k], ids[:, :top_k]
    return _draw_sorted(logits, ids, top_p, min_p)


def topk_sample(logits: Tensor, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return draws from the k largest logits, without a sort of the others."""
    return _draw_sorted(*logits.float().topk(top_k, dim=1), top_p, min_p)


def mask_sample(logits: Tensor, min_p: float) -> Tensor:
    """Return draws from the logits that lie near enough to the largest one."""
    logits = logits.float()
    least = logits.amax(dim=1, keepdim=True) + math.log(min_p)
    return baselines.softmax_race(logits.masked_fill(logits < least, -torch.inf))


def _draw_sorted(logits: Tensor, ids: Tensor, top_p: float, min_p: float) -> Tensor:
    """Draw from logits in falling order; min_p is against the largest, top_p of what is left."""
    if min_p > 0:
        logits = logits.masked_fill(logits < logits[:, :1] + math.log(min_p), -torch.inf)
    if top_p < 1:
        probabilities = logits.softmax(dim=1)
        before = probabilities.cumsum(dim=1) - probabilities
        logits = logits.masked_fill(before >= top_p, -torch.inf)
    return ids.gather(1, baselines.softmax_race(logits).unsqueeze(1)).squeeze(1)
