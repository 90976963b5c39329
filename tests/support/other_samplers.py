"""The kept sets of other samplers: of their own code where it can be imported (transformers), else
written anew in float64 from what their documentation says."""

from __future__ import annotations

import math

import pytest
import torch


def by_transformers(logits: torch.Tensor, **changes: float) -> torch.Tensor:
    """bool [B, V]: temperature, top_k, top_p, min_p, the order in which `generate` applies them."""
    warpers = pytest.importorskip("transformers", reason="needs the extra hf").generation
    scores = logits.double()
    for name, warper in (
        ("temperature", warpers.TemperatureLogitsWarper),
        ("top_k", warpers.TopKLogitsWarper),
        ("top_p", warpers.TopPLogitsWarper),
        ("min_p", warpers.MinPLogitsWarper),
    ):
        if name in changes:
            scores = warper(changes[name])(None, scores)
    return scores > -math.inf


def by_pivots(logits: torch.Tensor, top_p: float, top_k: int = 2**20, **_: object) -> torch.Tensor:
    """bool [B, V]: FlashInfer's joint rule, by pivots of probability, so ties go together.

    A token stays iff fewer than k tokens are more likely, and their mass is below p.
    """
    probabilities = logits.double().softmax(dim=1)
    greater = probabilities.unsqueeze(1) > probabilities.unsqueeze(2)  # [B, token, other]
    mass = (greater * probabilities.unsqueeze(1)).sum(dim=2)
    return (greater.sum(dim=2) < top_k) & (mass < top_p)
