"""Draws follow the softmax: fixed seeds, rare tokens pooled and never dropped.

Seeds are fixed, so every run gives the same verdict; the level was set before they were drawn.
"""

import itertools
import math

import pytest
import torch

from tests.support.distribution import cells_of, chi_squared_p, draw
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams, reference

LEVEL = 1e-4


def zipf(vocab_size: int, exponent: float) -> torch.Tensor:
    return -exponent * torch.arange(1, vocab_size + 1).double().log().float()


LOGITS = {
    "zipf-1.0": zipf(500, 1.0),
    "zipf-1.5": zipf(500, 1.5)[torch.randperm(500, generator=torch.Generator().manual_seed(0))],
    "uniform": torch.full((500,), 3.0),
    "all-negative": -100 - torch.linspace(0, 8, 300),
    "two-tokens": torch.tensor([0.0, 2.0]),
}


CASES = list(zip(LOGITS, (0.7, 1.5, 1.0, 0.7, 1.5), strict=True))
EVERY = itertools.product(LOGITS, [0.7, 1.0, 1.5])


@pytest.mark.parametrize(
    ("name", "temperature"), [*CASES, *long(*(case for case in EVERY if case not in CASES))]
)
def test_draws_follow_the_softmax(name, temperature):
    logits = LOGITS[name]
    token_ids = draw(logits, 20_000, temperature=temperature)
    assert chi_squared_p(token_ids, logits, temperature) > LEVEL


@pytest.mark.long
def test_real_logits(real_logits):
    logits = real_logits[0]
    token_ids = draw(logits, 4096)
    assert chi_squared_p(token_ids, logits, 1.0) > LEVEL


def test_rows_and_samples_are_independent_draws():
    """One position, many seeds; one row, many samples: each its own draw from the softmax."""
    from scipy import stats  # here, because every process of a run would import it

    logits, draws = LOGITS["zipf-1.0"], 8192
    params = [SamplingParams(seed=seed) for seed in range(draws // 8)]
    batch = SamplingBatch.from_params(params, vocab_size=len(logits))
    out = reference.sample(logits.expand(len(params), -1), batch, 7, num_samples=8)
    assert chi_squared_p(out.token_ids.flatten(), logits, 1.0) > LEVEL
    first, second = out.token_ids[:, 0].tolist(), out.token_ids[:, 1].tolist()
    same = sum(a == b for a, b in zip(first, second, strict=True))
    collision = torch.softmax(logits.double(), 0).square().sum().item()
    assert stats.binomtest(same, len(first), collision).pvalue > LEVEL


def test_the_best_score_is_gumbel_and_knows_nothing_of_the_winner():
    """max score - logsumexp ~ Gumbel(0, 1): shared or reused noise shows here first."""
    from scipy import stats

    logits, rows = LOGITS["zipf-1.0"], 4096
    params = [SamplingParams(seed=3)] * rows
    batch = SamplingBatch.from_params(params, vocab_size=len(logits))
    scores = reference.scores(logits.expand(rows, -1), batch, torch.arange(rows))
    best = scores.amax(dim=1).double() - torch.logsumexp(logits.double(), 0) * math.log2(math.e)
    natural = (best - math.log2(math.log(2))) * math.log(2)
    assert stats.kstest(natural.numpy(), "gumbel_r").pvalue > LEVEL
    frequent = scores.argmax(dim=1) < 10
    assert stats.ks_2samp(natural[frequent].numpy(), natural[~frequent].numpy()).pvalue > LEVEL


@pytest.mark.parametrize("planted", ["tail-lost", *long("warmer", "one-token-doubled")])
def test_a_wrong_law_is_caught(planted):
    logits = LOGITS["zipf-1.0"]
    biased = logits.clone()
    if planted == "warmer":
        biased = logits / 1.05
    elif planted == "tail-lost":
        biased[250:] = -math.inf
    else:
        biased[20] += math.log(2)
    token_ids = draw(biased, 20_000)
    assert chi_squared_p(token_ids, logits, 1.0) < LEVEL


def test_cells_cover_every_token_and_expect_enough():
    probabilities = torch.softmax(LOGITS["zipf-1.5"].double(), 0).numpy()
    cells = cells_of(probabilities, 20_000)
    mass = torch.zeros(cells.max() + 1).double()
    mass.index_add_(0, torch.tensor(cells), torch.tensor(probabilities))
    assert mass.sum().item() == pytest.approx(1)
    assert (mass * 20_000 >= 50).all()
