"""Each defect that the ratio rules invite, planted, and seen by the test of the law."""

import pytest
import torch

from tests.support.chain import (
    LEVEL,
    METHODS,
    POSITION,
    Chain,
    chi_squared,
    p_values,
    text_of_several_calls,
)
from tpsample.speculative import acceptance, laws, reference, streams


def _shared_uniform(chain: Chain, shared: bool, method: str) -> list[float]:
    """Drafts by inversion, from the uniforms that accept or from others."""
    seeds = torch.arange(12_000)
    u = streams.uniforms(seeds if shared else seeds + 10**6, torch.tensor([POSITION]), 2)[:, :1]
    law = chain.draft[0].double().softmax(dim=0)
    drafts = torch.searchsorted(law.cumsum(0), u.contiguous()).clamp(max=chain.vocab_size - 1)
    token_ids, _ = chain.verify(seeds, drafts, method)
    return [chi_squared(token_ids[:, 0].numpy(), chain.probabilities()[0].numpy())]


class TestPlantedBias:
    """Each defect that a ratio rule invites, and that it is seen."""

    @pytest.mark.parametrize("method", METHODS)
    def test_the_acceptance_stream_drafts_too(self, method):
        chain = Chain(16, "uniform")
        assert min(_shared_uniform(chain, False, method)) > LEVEL
        assert min(_shared_uniform(chain, True, method)) < LEVEL

    @pytest.mark.parametrize("method", METHODS)
    def test_recovery_shares_the_drafts_noise(self, method, monkeypatch):
        monkeypatch.setattr(reference, "DOMAIN_RECOVERY", streams.DOMAIN_DRAFT)
        chain = Chain(16, "uniform")
        assert min(p_values(chain, chain.emit(12_000, 2, method)[0])) < LEVEL

    @pytest.mark.parametrize("method", METHODS)
    def test_residual_without_the_clamp(self, method, monkeypatch):
        monkeypatch.setattr(laws, "residual", lambda c, p, q: (c * p - q).abs())
        chain = Chain(16, "uniform")
        assert min(p_values(chain, chain.emit(12_000, 2, method)[0])) < LEVEL

    @pytest.mark.parametrize("method", METHODS)
    def test_recovery_from_the_target_itself(self, method, monkeypatch):
        monkeypatch.setattr(laws, "residual", lambda c, p, q: c * p)
        chain = Chain(16, "uniform")
        assert min(p_values(chain, chain.emit(12_000, 2, method)[0])) < LEVEL

    def test_a_block_that_recovers_as_token_by_token(self, monkeypatch):
        """The residual at 1 in place of the prefix's coefficient."""
        true_residual = laws.residual
        monkeypatch.setattr(
            laws, "residual", lambda c, p, q: true_residual(torch.ones_like(c), p, q)
        )
        chain = Chain(16, "uniform")
        assert min(p_values(chain, chain.emit(12_000, 2, "block")[0])) < LEVEL

    def test_acceptance_that_ignores_the_draft(self, monkeypatch):
        monkeypatch.setattr(
            acceptance, "accept_tokenwise", lambda p, q, u: acceptance.leading((u < p) & (q > 0))
        )
        chain = Chain(16, "uniform")
        assert min(p_values(chain, chain.emit(12_000, 2, "rejection")[0])) < LEVEL


def test_numbers_used_twice_by_blocks_are_caught(monkeypatch):
    """Streams by position alone: the next call meets what the last one's stopping place told of."""
    true_stream = streams.stream

    def stream(seed, position, index, domain):
        return true_stream(seed, position, 0, domain)

    monkeypatch.setattr(streams, "stream", stream)
    chain = Chain(16, "uniform")
    assert min(p_values(chain, text_of_several_calls(chain, "block", 20_000))) < LEVEL
