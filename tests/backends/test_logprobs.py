"""The arithmetic on rows of logprobs by kernels against the definition, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.twins import require_same
from tpsample.backends import room_of
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.row_noise import RowNoise, safe_temperature
from tpsample.request.filters import LogprobRows

ROWS, WIDTH, FIRST = 9, 1500, 6


def rows_of(backend: str) -> ShardLogits:
    generator = torch.Generator().manual_seed(4)
    logits = (2 * torch.randn(ROWS, WIDTH, generator=generator)).round()  # with many ties
    logits[1] += torch.rand(WIDTH, generator=generator)
    logits[2, 5], logits[3], logits[4, 100:] = math.nan, -math.inf, -math.inf
    logits[5, [7, 90]] = math.inf
    temperature = torch.tensor([1.0, 0.5, 3.0] * 3)
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    noise = RowNoise(temperature, zeros, zeros, 1)
    return room_of(backend).passes(logits, logits, FIRST, FIRST + WIDTH + 9, temperature, noise)


def asked_of(top: int, chosen: int) -> LogprobRows:
    generator = torch.Generator().manual_seed(top)
    ids = torch.randint(-1, FIRST + WIDTH + 9, (ROWS, chosen), generator=generator)
    modes = torch.arange(ROWS)
    return LogprobRows(
        row_list=[*range(ROWS)],
        row_index=modes,
        top=top,
        top_of=modes % (top + 1),
        chosen=ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -1),
        processed_list=(modes % 2 == 0).tolist(),
        processed=modes % 2 == 0,
        as_logits=modes % 3 == 0,
    )


@pytest.mark.parametrize(("top", "chosen"), [(0, 0), (5, 0), (1, 3), (20, 40), (40, 3)])
@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_kernels_tell_the_logprobs_of_the_definition(backend, top, chosen):
    its, plain, asked = rows_of(backend), rows_of("torch"), asked_of(top, chosen)
    sampled = torch.arange(ROWS * 2).view(ROWS, 2) * 50
    sampled[6, 1], sampled[7, 0] = -1, FIRST + WIDTH + 3
    ids = torch.cat([sampled, asked.chosen], dim=1)
    own, firsts = plain.words_of(ids), plain.first_words(max(1, top))
    count = max(1, top)
    found = its.own_words(count, ids)
    assert torch.equal(found, torch.cat([firsts, own], dim=1))
    more = its.first_words(count + 2)
    assert torch.equal(its.own_words(count, ids, more), found), "the first of more are the same"

    others = (firsts - (1 << word.TOKEN_BITS)).clamp(min=0) * (torch.arange(ROWS) % 2)[:, None]
    gathered: Tensor = torch.stack(
        [torch.cat([firsts, own], dim=1), torch.cat([others, torch.zeros_like(own)], dim=1)]
    )
    for each in (gathered, gathered.flip(0), gathered[:1]):
        words = plain.listed_words(asked, each)
        require_same(its.listed_words(asked, each), words)
        for cut in (
            torch.zeros_like(ids[:, 0]),
            words.first[:, words.first.shape[1] // 2].contiguous(),
        ):
            weighed = replace(plain, top=words.top, temperature=words.temperature)
            sums = weighed.weigh(cut, words.marks.maximum(cut.unsqueeze(1)))
            sums[:, :2].clamp_(min=1)
            given = asked, sampled, words, cut, sums
            expected = plain.logprobs_of_words(*given)
            require_same(its.logprobs_of_words(*given), expected)
    assert expected.values.isnan().any() and not expected.values.isnan().all()


@pytest.mark.parametrize("top", [3, 300])
def test_written_temperatures_are_made_safe_however_many_words_are_listed(top):
    """Kernels list few words, and plain PyTorch many."""
    its, plain, asked = rows_of("triton"), rows_of("torch"), asked_of(top, 0)
    written = torch.tensor([0.0, -1.0, math.nan, math.inf, 1e-6, 0.7]).repeat(ROWS)[:ROWS]
    gathered = plain.first_words(top).unsqueeze(0)
    found = replace(its, temperature=written).listed_words(asked, gathered)
    expected = replace(plain, temperature=safe_temperature(written)[0])
    require_same(found, expected.listed_words(asked, gathered))
    assert found.temperature.isfinite().all() and (found.temperature > 0).all()
