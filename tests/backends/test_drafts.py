"""Draws of a drafter by each backend against the definition: equal words."""

from __future__ import annotations

import math

import pytest
import torch

from tpsample.backends import room_of
from tpsample.core import word
from tpsample.core.acceptance import DOMAIN_DRAFT
from tpsample.core.row_noise import RowNoise
from tpsample.noise import DOMAIN_TOKEN

ROWS = 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first_id", [0, 5])
@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_words_of_drafts_are_those_of_the_definition(backend, first_id, dtype):
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(ROWS, 1201, generator=generator)).to(dtype)
    logits[2, 7], logits[3], logits[4, [9, 800]] = math.nan, -math.inf, math.inf
    logits = logits.T.contiguous().T if first_id else logits  # columns that are not neighbours
    noise = RowNoise(
        temperature=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 2.0, 1e-4]),
        seed=torch.arange(ROWS) * 2**60,
        positions=2**34 + torch.arange(ROWS),
        num_samples=1,
    )
    for sample, domain in ((0, DOMAIN_TOKEN), (0, DOMAIN_DRAFT), (2, DOMAIN_DRAFT)):
        given = logits, first_id, noise, sample, domain
        expected = room_of("torch").draft_words(*given)
        drawable = expected >= word.LOWEST_DRAWABLE
        assert torch.equal(room_of(backend).draft_words(*given) * drawable, expected * drawable)
    assert expected.shape == (1, ROWS) and drawable.sum() == ROWS - 1
    empty = logits[:, :0], first_id, noise, 0, DOMAIN_DRAFT
    assert not room_of(backend).draft_words(*empty).any()
