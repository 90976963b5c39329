"""Every filter × temperature × kind of logits × number of ranks; minutes, so only `-m long`."""

import itertools
import math

import pytest
import torch

from tests.support.cases import own_shard
from tests.support.filtered import Rows, V, filter_requests, kinds_of_logits, masked
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler, SamplingParams

TEMPERATURES = (0.0, 0.2, 0.6, 1.0, 1.5, 3.0)


def _requests(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature,
            **request,
            ties=ties,
            seed=7000 + i,
        )
        for i, (request, ties) in enumerate(itertools.product(filter_requests(), ("exact", "keep")))
    ]


def _wrong(rows: Rows, expected: torch.Tensor, even: bool) -> list[str]:
    sampler = LMHeadSampler(**rows.head(own_shard(rows.vocab_size, even)))
    out = sampler(rows.hidden_states, rows.batch, rows.positions)
    wrong = (out.token_ids != expected).nonzero().flatten().tolist()
    return [f"row {row}: {rows.params[row]}" for row in wrong]


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_filter_on_every_kind_of_logits(temperature):
    """864 requests × 9 kinds, two of them also with a block or most of the ids masked."""
    requests = _requests(temperature)
    kinds = kinds_of_logits() | {
        "uniform": torch.rand(V, generator=torch.Generator().manual_seed(3))
    }
    problems = [
        Rows(list(kinds.values()), requests),
        Rows([kinds["normal"], kinds["two-valued"]], requests, bias=masked(37, 800)),
        Rows([kinds["zipf"], kinds["all-equal"]], requests, bias=masked(V // 4, 3 * V // 4)),
    ]
    for number, rows in enumerate(problems):
        expected = rows.oracle().token_ids
        for world_size in (1, 2, 3, 4, 8):
            even = number != 1
            for wrong in run_ranks(world_size, _wrong, rows, expected, even, timeout_s=600):
                assert not wrong, f"W={world_size}: {len(wrong)} rows, first {wrong[0]}"
    print(f"T={temperature}: {sum(len(rows.params) for rows in problems)} rows × 5 world sizes")


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_filter_on_real_logits(temperature, real_logits):
    """864 requests on a row of the bundled model, V = 49152."""
    row = real_logits[TEMPERATURES.index(temperature) * 7 % len(real_logits)].float()
    rows = Rows([row], _requests(temperature))
    assert rows.vocab_size > 40000 and math.isfinite(float(row.max()))
    expected = rows.oracle().token_ids
    for world_size in (1, 2, 3, 4, 8):
        for wrong in run_ranks(world_size, _wrong, rows, expected, True, timeout_s=900):
            assert not wrong, f"W={world_size}: {len(wrong)} rows, first {wrong[0]}"
    print(f"T={temperature}: {len(rows.params)} rows × 5 world sizes, real logits")
