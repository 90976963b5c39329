"""Drafts of a drafter: the same on every number of ranks, by each method."""

import torch

from tests.support.cases import own_sampler
from tests.support.ranks import run_ranks
from tpsample import SamplingBatch, SamplingParams, sample_draft
from tpsample import reference as plain_reference


def _draft_everywhere(logits: torch.Tensor, params: list[SamplingParams]) -> list[torch.Tensor]:
    sampler = own_sampler(torch.zeros(logits.shape[1], 1), even=False)
    batch = SamplingBatch.from_params(params, vocab_size=logits.shape[1])
    own = logits[:, sampler.shard.start : sampler.shard.stop]
    return [
        sample_draft(sampler, own, batch, 11, index, method=method)
        for index in (0, 2)
        for method in ("coupled", "rejection", "block")
    ]


def test_drafts_are_the_same_on_every_rank_count():
    logits = torch.randn(40, 301, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(seed=i, temperature=(0.0, 1.0, 0.5)[i % 3]) for i in range(40)]
    one = run_ranks(1, _draft_everywhere, logits, params)[0]
    for several in run_ranks(3, _draft_everywhere, logits, params):
        assert all(torch.equal(a, b) for a, b in zip(several, one, strict=True))
    batch = SamplingBatch.from_params(params, vocab_size=301)
    coupled, rejection, block, later, other, _ = one
    assert torch.equal(coupled, plain_reference.sample(logits, batch, 11).token_ids)
    assert torch.equal(coupled, later) and torch.equal(rejection, block)
    random = torch.arange(40) % 3 != 0
    assert (coupled != rejection)[random].sum() > 10
    assert (other != rejection)[random].sum() > 10, "a later index has noise of its own"
    assert torch.equal(coupled[~random], rejection[~random])
