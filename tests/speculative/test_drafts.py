"""Drafts of a drafter: the same on every number of ranks, by each method."""

import warnings
from dataclasses import replace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from tests.support.calls import outcome
from tests.support.cases import own_sampler
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, sample_draft, verify
from tpsample import reference as plain_reference
from tpsample.speculative import drafting
from tpsample.speculative.drafting import Draft


def _draft_everywhere(logits: torch.Tensor, params: list[SamplingParams]) -> list[torch.Tensor]:
    sampler = own_sampler(torch.zeros(logits.shape[1], 1), even=False)
    batch = SamplingBatch.from_params(params, vocab_size=logits.shape[1])
    own = logits[:, sampler.shard.start : sampler.shard.stop]
    return [
        sample_draft(sampler, own, batch, 11, index, method=method).token_ids
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


V, ROWS, K = 40, 400, 2


@pytest.mark.parametrize("drafts", ["right", "sharper", "flatter", "argmax", "filtered", "greedy"])
def test_drafts_that_are_no_draws_of_their_law_are_told_of_once(drafts):
    generator = torch.Generator().manual_seed(5)
    weight, logits = torch.randn(V, 8, generator=generator), torch.randn(V, generator=generator) * 2
    temperature = 0.0 if drafts == "greedy" else 0.7
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(ROWS)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    sampler = LMHeadSampler(weight, max_rows=2 * ROWS, backend="torch")
    filtered = logits.where(logits >= logits.topk(4).values[-1], -torch.inf)
    law = {"sharper": logits / 0.7, "flatter": logits * 0.7}.get(drafts, logits).expand(ROWS, V)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for position in range(3):
            drawn = (filtered if drafts == "filtered" else logits).expand(ROWS, V)
            token_ids = sample_draft(sampler, drawn, batch, position, 0, method="block").token_ids
            if drafts in ("argmax", "greedy"):
                token_ids = logits.argmax().expand(ROWS)
            states = torch.randn(ROWS, 2, 8, generator=generator)
            given = token_ids.unsqueeze(1), batch, position
            verify(sampler, states, *given, method="block", draft_logits=law.unsqueeze(1))
    texts = [(str(each.message)[:42], each.filename) for each in told]
    wrong = drafts not in ("right", "greedy")
    assert texts == [("draft_logits: the drafts are no draws of t", __file__)] * wrong


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_drafts_bring_their_law(method):
    """A list of drafts is verified as its tokens with the logits that they were drawn from."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(V, 8, generator=generator)
    hidden_states = torch.randn(ROWS, K + 1, 8, generator=generator)
    logits = torch.randn(K, ROWS, V, generator=generator)
    params = [SamplingParams(temperature=0.7, seed=seed) for seed in range(ROWS)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    sampler = LMHeadSampler(weight, max_rows=ROWS * (K + 1), backend="torch")
    drafts = [
        sample_draft(sampler, own, batch, 5 + index, index, method=method)
        for index, own in enumerate(logits)
    ]
    given = sampler, hidden_states
    found = verify(*given, drafts, batch, 5, method=method)
    token_ids = torch.stack([draft.token_ids for draft in drafts], dim=1)
    law = {} if method == "coupled" else {"draft_logits": logits.transpose(0, 1)}
    expected = verify(*given, token_ids, batch, 5, method=method, **law)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert 0 < found.num_accepted.sum() < ROWS * K
    with pytest.raises(AttributeError, match=r"^Draft has no unsqueeze; its tokens are token_ids"):
        drafts[0].unsqueeze(1)
    with pytest.raises(ValueError, match=r"^draft_logits: the drafts of sample_draft bring"):
        verify(*given, drafts, batch, 5, method=method, draft_logits=logits.transpose(0, 1))
    other = "block" if method != "block" else "rejection"
    with pytest.raises(ValueError, match=rf"^draft_token_ids\[0\]: .* for method=\"{other}\""):
        verify(*given, drafts, batch, 5, method=other)
    with pytest.raises(ValueError, match=r"expected the draft of index 0 .*, got one of index 1"):
        verify(*given, drafts[::-1], batch, 5, method=method)
    with pytest.raises(ValueError, match=r"^draft_token_ids: expected a tensor"):
        verify(*given, [token_ids], batch, 5, method=method)


@pytest.mark.parametrize("index", [np.int64(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_an_index_of_another_library_is_its_number(index):
    """The launches of a GPU take integers of Python alone."""
    batch = SamplingBatch.from_params([SamplingParams(seed=7)], vocab_size=V)
    sampler, logits = LMHeadSampler(torch.zeros(V, 1), backend="torch"), torch.zeros(1, V)
    expected = sample_draft(sampler, logits, batch, 5, 3, method="block")
    room = drafting.room_of(sampler.backend)
    draw = Mock(side_effect=room.draft_words)
    with patch.object(drafting, "room_of", lambda _: replace(room, draft_words=draw)):
        draft = sample_draft(sampler, logits, batch, 5, index, method="block")
    assert type(draw.call_args.args[3]) is type(draft.index) is int
    assert draft.index == 3 and torch.equal(draft.token_ids, expected.token_ids)


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_drafts_of_other_positions_are_refused(method):
    """Hardly a coupled one would be accepted. Others that are all drawn at one position, with one
    noise, make each verification depend on those before it."""
    params = [SamplingParams(seed=seed) for seed in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    sampler = LMHeadSampler(torch.zeros(V, 8), max_rows=9, backend="torch")
    drafted = sampler, torch.zeros(3, V), batch
    drafts = [sample_draft(*drafted, 5 + index, index, method=method) for index in (0, 1)]
    verify(sampler, torch.zeros(3, 3, 8), drafts, batch, 5, method=method)
    said = r"^positions: row 0 has 4, and its draft 0 was drawn for position 5; give the position"
    with pytest.raises(ValueError, match=said):
        verify(sampler, torch.zeros(3, 3, 8), drafts, batch, 4, method=method)


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_drafts_of_another_temperature_are_refused(method):
    """Their law is not the one that their logits tell, and the result would follow neither."""
    params = [SamplingParams(seed=seed, temperature=0.5) for seed in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    sampler = LMHeadSampler(torch.zeros(V, 8), max_rows=9, backend="torch")
    drafted = sampler, torch.zeros(3, V), batch
    drafts = [sample_draft(*drafted, 5 + index, index, method=method) for index in (0, 1)]
    given = sampler, torch.zeros(3, 3, 8), drafts
    batch.temperature[1] = 0.75
    said = r"^batch: row 1 has temperature 0.75, and its draft 0 was drawn at 0.5; verify at the"
    with pytest.raises(ValueError, match=said):
        verify(*given, batch, 5, method=method)
    verify(*given, batch.select(torch.tensor([0, -1, 2])), 5, method=method)
    batch.temperature[1] = 0.5
    verify(*given, batch, 5, method=method)
    batch.temperature[1] = torch.nan  # is greedy, and equal to itself
    drafts[:] = [sample_draft(*drafted, 5 + i, i, method=method) for i in (0, 1)]
    verify(*given, batch, 5, method=method)


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_logits_that_were_written_over_those_of_another_draft_are_refused(method):
    """A drafter may have one buffer for all its logits, and one law for all its drafts."""
    params = [SamplingParams(seed=seed) for seed in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    sampler = LMHeadSampler(torch.zeros(V, 8), max_rows=9, backend="torch")
    hidden_states, one, of_each = torch.zeros(3, 3, 8), torch.zeros(3, V), torch.zeros(3, 2, V)

    def drafts(overwrite: bool) -> list[Draft]:
        found = []
        for index in range(2):
            logits = one if overwrite else of_each[:, index]
            logits.copy_(torch.arange(V) * (1 + index) / V)
            found.append(sample_draft(sampler, logits, batch, 5 + index, index, method=method))
        return found

    verify(sampler, hidden_states, drafts(False), batch, 5, method=method)
    both = [sample_draft(sampler, one, batch, 5 + i, i, method=method) for i in range(2)]
    verify(sampler, hidden_states, both, batch, 5, method=method)
    if method == "coupled":
        verify(sampler, hidden_states, drafts(True), batch, 5, method=method)
        return
    with pytest.raises(ValueError, match=r"^draft_token_ids\[1\]: its logits were written over"):
        verify(sampler, hidden_states, drafts(True), batch, 5, method=method)


def test_a_drafters_probabilities_are_refused():
    sampler = LMHeadSampler(torch.zeros(V, 8), max_rows=8, backend="torch")
    batch = SamplingBatch.from_params([SamplingParams(seed=1)], vocab_size=V)
    law = torch.randn(1, 1, V).softmax(dim=2)
    drafts, hidden_states = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match=r"^draft_logits: expected logits, got numbers in"):
        verify(sampler, hidden_states, drafts, batch, 5, method="rejection", draft_logits=law)
    with pytest.raises(ValueError, match=r"^draft_logits: expected logits, got numbers in"):
        sample_draft(sampler, law[0], batch, 5, 0)


def _shard_of_probabilities(law: torch.Tensor) -> str:
    sampler = own_sampler(torch.zeros(V, 1), even=True)
    batch = SamplingBatch.from_params([SamplingParams(seed=1)], vocab_size=V)
    own = law[:, sampler.shard.start : sampler.shard.stop]
    return outcome(lambda: sample_draft(sampler, own, batch, 5, 0))[1]


def test_a_shard_of_probabilities_is_refused_on_every_rank():
    told = run_ranks(2, _shard_of_probabilities, torch.randn(1, V).softmax(dim=1))
    assert told[0] == told[1] and "draft_logits: expected logits, got numbers" in told[0]


def _drafts_of_no_rows(backend: str) -> tuple[list[int], ...]:
    sampler = own_sampler(torch.zeros(20, 1), backend=backend)
    none, some = (
        SamplingBatch.from_params([SamplingParams(seed=1)] * rows, vocab_size=20) for rows in (0, 1)
    )
    logits, sizes = torch.zeros(1, len(sampler.shard)), []
    for method in ("coupled", "rejection", "block"):
        draft = sample_draft(sampler, logits[:0], none, 5, 0, method=method)
        sizes.append(list(draft.token_ids.shape))
        sampler(torch.zeros(1, 1), some, 5)  # the next call is taken
    return tuple(sizes)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_no_rows_have_no_drafts(backend, world_size):
    assert run_ranks(world_size, _drafts_of_no_rows, backend) == [([0], [0], [0])] * world_size
