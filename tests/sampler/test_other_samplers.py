"""Kept sets beside other samplers': equal where the rules agree.

Where they part, the table of test_kept_set says what each keeps.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.filtered import V, kinds_of_logits
from tests.support.other_samplers import by_pivots, by_transformers
from tpsample import SamplingBatch, SamplingParams, reference

KINDS = kinds_of_logits()
WITHOUT_TIES, WITH_TIES = ("zipf", "normal", "ramp-in-shards"), ("two-valued", "bf16", "spike")
TRANSFORMERS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 0.6},
    {"min_p": 0.05},
    {"min_p": 0.5, "temperature": 1.5},
    {"min_p": 0.3, "top_k": 2},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 256, "top_p": 0.95, "temperature": 3.0},
    {"top_k": 1000, "top_p": 0.3},
    {"min_p": 0.5, "top_p": 0.62, "filter_order": "min_p_last"},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.8, "filter_order": "min_p_last"},
    {"min_p": 0.1, "top_k": 300, "top_p": 0.95, "temperature": 1.5, "filter_order": "min_p_last"},
    {"min_p": 0.7, "top_k": 2, "top_p": 0.4, "temperature": 3.0, "filter_order": "min_p_last"},
]
# top_k keeps what ties with the k-th there: ties="keep" here.
TRANSFORMERS_WITH_TIES = [
    {"top_k": 5, "ties": "keep"},
    {"top_k": 256, "temperature": 0.6, "ties": "keep"},
    {"min_p": 0.3, "ties": "keep"},
]
FLASHINFER = [(50, 0.9), (20, 0.999), (V, 0.5), (3, 1.0), (V, 0.3), (700, 0.05)]
JOINT = [{"top_k": k, "top_p": p, "filter_order": "joint"} for k, p in FLASHINFER]


def kept(logits: torch.Tensor, **changes: object) -> torch.Tensor:
    """bool [B, V], ours."""
    params = [SamplingParams(seed=0, **changes)] * len(logits)
    batch = SamplingBatch.from_params(params, vocab_size=logits.shape[1])
    return reference.kept_mask(logits, batch)


@pytest.mark.parametrize(
    ("theirs", "kinds", "changes"),
    [
        *((by_transformers, WITHOUT_TIES, each) for each in TRANSFORMERS),
        *((by_transformers, (*WITH_TIES, "all-equal"), each) for each in TRANSFORMERS_WITH_TIES),
        *((by_pivots, WITHOUT_TIES, each) for each in JOINT),
        *((by_pivots, (*WITH_TIES, "all-equal"), each | {"ties": "keep"}) for each in JOINT),
    ],
)
def test_where_the_rules_agree(theirs, kinds, changes):
    for name in kinds:
        logits = torch.stack([KINDS[name], KINDS[name].flip(0), KINDS[name] / 4])
        assert torch.equal(kept(logits, **changes), theirs(logits, **changes)), name


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}], ids=str)
def test_transformers_on_real_logits(real_logits, changes):
    assert torch.equal(kept(real_logits, **changes), by_transformers(real_logits, **changes))


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_k": 4}, 4), ({"top_k": 0}, 4),
        ({"top_p": 1e-6}, 1), ({"top_p": 0.7}, 2), ({"top_p": 0.8}, 3), ({"top_p": 1.0}, 4),
        ({"min_p": 0.0}, 4), ({"min_p": 0.24}, 4), ({"min_p": 0.26}, 3), ({"min_p": 0.49}, 3),
        ({"min_p": 0.51}, 2), ({"min_p": 0.74}, 2), ({"min_p": 0.76}, 1), ({"min_p": 1.0}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_llama_cpp_vectors(changes, size):
    """The vectors of tests/test-sampling.cpp over (0.1, 0.2, 0.3, 0.4): how many stay.

    Its top_p of 0 keeps one token; 0 is not a top_p here, so the smallest stands for it.
    """
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).double().log().float()
    assert kept(logits, **changes)[0].tolist() == [False] * (4 - size) + [True] * size
