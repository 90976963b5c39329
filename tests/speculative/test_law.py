"""The tokens of rejection and block verification follow the target, whatever drafted them.

Seeds are fixed, so every run gives the same verdict; the level was set before they were drawn.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.support.chain import (
    CONTEXTS,
    DRAFTS,
    LEVEL,
    METHODS,
    POSITION,
    Chain,
    noise_floor,
    p_values,
    total_variation,
)
from tests.support.distribution import chi_squared
from tests.support.fields import OTHER_FILTERS, one_with
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams
from tpsample import reference as plain_reference
from tpsample.core import acceptance
from tpsample.noise import DOMAIN_TOKEN, philox4x32
from tpsample.speculative import reference

SIZES = [(16, 12_000, 3), (999, 1500, 2), (4097, 500, 1)]
CASES = [
    *((*SIZES[0], kind) for kind in ("uniform", "one-hot-right", "one-hot-wrong", "anti-ranked")),
    (*SIZES[2], "uniform"),
]
EVERY = [(*size, kind) for size, kind in itertools.product(SIZES, DRAFTS)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("vocab_size", "count", "num_drafts", "kind"),
    [*CASES, *long(*(case for case in EVERY if case not in CASES))],
)
def test_the_emitted_law_is_the_targets(vocab_size, count, num_drafts, kind, method):
    chain = Chain(vocab_size, kind)
    text, accepted = chain.emit(count, num_drafts, method)
    tests = p_values(chain, text)
    assert min(tests) > LEVEL, tests

    law = chain.probabilities()[0]
    floor = noise_floor(law, count)
    assert total_variation(text[:, 0], law) < 1.1 * floor

    rate = accepted.double().mean() / num_drafts
    if kind == "equal":
        assert rate == 1
    elif kind == "disjoint":
        assert rate == 0
    elif kind != "one-hot-wrong":  # the least likely token: hardly ever
        assert 0 < rate < 1


FILTERED: list[dict[str, Any]] = [
    *({"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7}),
    {"top_k": 9, "top_p": 0.5, "min_p": 0.4, "filter_order": "min_p_last"},
    *one_with(OTHER_FILTERS),
]


def test_the_filtered_law_is_renormalised():
    """Filters at every position: what is emitted follows the kept set's softmax."""
    logits = torch.randn(16, generator=torch.Generator().manual_seed(4))
    drafts = torch.randint(0, 16, (4000, 1), generator=torch.Generator().manual_seed(5))
    for request in FILTERED:
        params = [SamplingParams(seed=seed, temperature=1.4, **request) for seed in range(4000)]
        batch = SamplingBatch.from_params(params, vocab_size=16)
        kept = plain_reference.kept_mask(logits.expand(4000, -1), batch)[0]
        law = (logits.double() / 1.4).masked_fill(~kept, -math.inf).softmax(0).numpy()
        for method in METHODS:
            out = reference.verify(
                logits.expand(4000, 2, -1), drafts, batch, 5, method=method,
                draft_logits=torch.zeros(4000, 1, 16),
            )  # fmt: skip
            assert chi_squared(out.token_ids[:, 0].numpy(), law) > LEVEL
            behind = out.token_ids[out.num_accepted == 1, 1].numpy()
            if method == "rejection":
                assert len(behind) > 500 and chi_squared(behind, law) > LEVEL


def accept_probabilities(chain: Chain, num_drafts: int, method: str) -> list[float]:
    """P(at least i drafts are accepted), by summing over all drafts."""
    p = chain.probabilities()
    if chain.certain is None:
        q = chain.draft.double().softmax(dim=1)
    else:
        q = torch.nn.functional.one_hot(chain.certain, chain.vocab_size).double()
    drafted, kept = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    context, found = torch.zeros(1, dtype=torch.int64), []
    for _ in range(num_drafts):
        drafted = (drafted.unsqueeze(1) * q[context]).flatten()
        ratio = torch.nan_to_num(p / q, posinf=0.0)[context]
        if method == "rejection":
            kept = (kept.unsqueeze(1) * ratio.clamp(max=1)).flatten()
        else:
            kept = (kept.unsqueeze(1) * ratio).clamp(max=1).flatten()
        context = (torch.arange(chain.vocab_size) % CONTEXTS).repeat(len(context))
        found.append(float((drafted * kept).sum()))
    return found


@pytest.mark.parametrize("kind", ["uniform", "one-hot-right", "anti-ranked"])
def test_acceptance_is_exactly_as_published(kind):
    """Token by token Π min(1, p / q), as a block min(1, … min(1, p / q) · p / q)."""
    from scipy import stats  # here, because every process of a run would import it

    chain, count = Chain(16, kind), 10_000
    for method in METHODS:
        _, accepted = chain.emit(count, 3, method)
        for i, probability in enumerate(accept_probabilities(chain, 3, method)):
            found = int((accepted > i).sum())
            assert stats.binomtest(found, count, probability).pvalue > LEVEL, (method, i)


def test_the_streams_are_uniform_independent_and_pinned():
    """In (0, 1) with 53 bits; another position, index or use has numbers of its own."""
    from scipy import stats

    seeds = torch.arange(20_000)
    u = acceptance.uniforms(seeds, torch.full_like(seeds, POSITION), 3)
    assert u.min() > 0 and u.max() < 1
    assert ((u * 2**53) % 2 == 1).all()
    for column in u.unbind(1):
        assert stats.kstest(column.numpy(), "uniform").pvalue > LEVEL
    later = acceptance.uniforms(seeds, torch.full_like(seeds, POSITION + 1), 2)
    same_place = later[:, 0], u[:, 1]  # one position, first and second of its verification
    for a, b in (*itertools.combinations(u.unbind(1), 2), same_place):
        assert stats.pearsonr(a.numpy(), b.numpy()).pvalue > LEVEL
    domains = {
        acceptance.DOMAIN_ACCEPT,
        acceptance.DOMAIN_RECOVERY,
        acceptance.DOMAIN_DRAFT,
        DOMAIN_TOKEN,
    }
    assert len(domains) == 4
    counter = tuple(torch.tensor(word) for word in (POSITION + 2, 0, 2, 0x61636370))
    high, low, *_ = philox4x32(counter, (19, 0))
    assert u[19, 2] == (2 * ((int(high) << 32 | int(low)) >> 12) + 1) / 2**53
