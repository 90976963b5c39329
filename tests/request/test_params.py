"""Requests and batches: ranges, features that are not there, seeds, row counts."""

import copy
import dataclasses
import multiprocessing
import pickle

import pytest
import torch

from tests.support.fields import REFUSED
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, noise
from tpsample.core.row_noise import SeedSource


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_out_of_range_names_the_field(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("off", [{"top_k": -1}, {"top_k": 0}, {"logit_bias": {}}, {"top_p": 1.0}])
def test_switched_off_is_supported(off):
    SamplingBatch.from_params([SamplingParams(**off)], vocab_size=10)


def test_a_request_with_biases_is_copied_and_pickled_and_stays_as_it_is():
    params = SamplingParams(logit_bias={7: 1, 3: 2.0})
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert copied == params and repr(copied.logit_bias) == "{3: 2.0, 7: 1.0}"
        with pytest.raises(TypeError, match="is frozen"):
            copied.logit_bias[7] = 1000.0
    with pytest.raises(TypeError, match="is frozen"):
        params.logit_bias |= {7: 1000.0}
    other = dataclasses.replace(params, logit_bias={**params.logit_bias, 7: 50.0})
    assert other.logit_bias == {3: 2.0, 7: 50.0} and params.logit_bias == {3: 2.0, 7: 1.0}


@pytest.mark.parametrize("seed", [0, 5, -3, 2**64 - 1])
def test_texts_that_go_on_from_one_have_seeds_of_their_own(seed):
    forked = SamplingParams(temperature=0.7, seed=seed).fork(8)
    assert forked[0] == SamplingParams(temperature=0.7, seed=seed)
    assert len({each.seed for each in forked}) == 8
    assert [each.temperature for each in forked] == [0.7] * 8
    assert SamplingParams(seed=seed).fork(3)[2].seed == forked[2].seed
    key = torch.tensor([noise.signed64(seed)])
    low, high, *_ = noise.row_stream(key, torch.tensor([5]), domain=0x666F726B)
    assert forked[5].seed == int(high << 32 | low)


def test_texts_of_one_without_a_seed_wait_for_their_own():
    assert [each.seed for each in SamplingParams().fork(3)] == [None] * 3
    with pytest.raises(ValueError, match=r"^count: expected an int from 1"):
        SamplingParams().fork(0)


def test_what_stays_in_its_place_is_written_there():
    batch = SamplingBatch.from_params([SamplingParams(seed=1)], vocab_size=10)
    batch.seed[:], batch.temperature[:] = torch.tensor([5]), 0.5
    assert (batch.seed.item(), batch.temperature.item()) == (5, 0.5)
    batch.update(0, SamplingParams(seed=6))
    assert batch.requests == (SamplingParams(seed=6),)


def test_what_other_libraries_name_or_write_otherwise_is_told_of():
    with pytest.raises(TypeError, match=r"^logit_softcap: not a field .* give it to LMHeadSampler"):
        SamplingParams(logit_softcap=5.0)
    assert LMHeadSampler(torch.zeros(4, 2), logit_softcap=5.0).settings.head.logit_softcap == 5.0
    with pytest.raises(ValueError, match=r"expected token ids >= 0, got '5'; give int\('5'\)$"):
        SamplingParams(logit_bias={"5": 1.0})
    assert SamplingParams(logit_bias={int("5"): 1.0}).logit_bias == {5: 1.0}
    with pytest.raises(ValueError, match=r"got -1.2$"):
        SamplingParams(repetition_penalty=-1.2)


def _first_seed(source: SeedSource, queue) -> None:
    queue.put(source.draw(1).tolist())


def test_a_forked_child_draws_other_seeds_than_its_parent():
    source = SeedSource()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=_first_seed, args=(source, queue)) for _ in range(2)]
    for child in children:
        child.start()
    drawn = [*queue.get(), *queue.get(), *source.draw(1).tolist()]
    for child in children:
        child.join()
    assert len(set(drawn)) == 3


def test_seeds_are_drawn_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        drawn = SeedSource(7).draw(300)
    assert torch.equal(drawn, SeedSource(7).draw(300))


def test_equal_requests_with_biases_have_equal_hashes():
    one, same = (SamplingParams(logit_bias=bias) for bias in ({1: 2, 3: 4}, {3: 4.0, 1: 2.0}))
    assert one == same and hash(one) == hash(same)
    assert len({one, same, SamplingParams(logit_bias={1: 2})}) == 2
