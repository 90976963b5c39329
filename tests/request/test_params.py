"""Requests and batches: ranges, features that are not there, seeds, row counts."""

import multiprocessing

import pytest
import torch

from tpsample import SamplingBatch, SamplingParams, reference
from tpsample.core.row_noise import SeedSource

OUT_OF_RANGE: dict[str, list] = {
    "temperature": [-0.1, float("nan"), float("inf"), "1", True, 1e39, 10**400],
    "top_k": [-2, 1.5, True],
    "top_p": [0.0, 1.01, -1],
    "min_p": [-0.01, 1.5],
    "seed": [2**64, -(2**63) - 1, 1.0],
    "repetition_penalty": [0.0, -1.0, float("inf"), 1e-50, 1e39],
    "presence_penalty": [2.1, -2.1],
    "frequency_penalty": [2.1, -2.1],
    "logit_bias": [{-1: 1.0}, {1: float("nan")}, {"a": 1.0}, [1], {1: 10**400}],
    "allowed_token_ids": [[], [-1], [1.5], "12"],
    "bad_words": [[[]], [[-3]], [5, 6], ["the"]],
    "min_tokens": [-1, 1.0, 2**31],
    "stop_token_ids": [[-1], 5],
    "logprobs": [-2, 1.5],
    "logprob_token_ids": [[-1]],
    "logprobs_mode": ["raw"],
    "ties": ["all"],
    "filter_order": ["top_p_first"],
    "repetition_scope": ["prompt"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]
)
def test_out_of_range_names_the_field(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        SamplingParams(**{name: value})


def test_every_field_has_a_range_test():
    assert set(OUT_OF_RANGE) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("off", [{"top_k": -1}, {"top_k": 0}, {"logit_bias": {}}, {"top_p": 1.0}])
def test_switched_off_is_supported(off):
    SamplingBatch.from_params(SamplingParams(**off), vocab_size=10)


def test_rows_become_tensors():
    batch = SamplingBatch.from_params(
        [SamplingParams(temperature=0.5, seed=2**64 - 1), SamplingParams(temperature=0, seed=3)],
        vocab_size=10,
    )
    assert batch.rows == 2
    assert batch.temperature.tolist() == [0.5, 0.0]
    assert batch.seed.tolist() == [-1, 3]


def test_not_params():
    with pytest.raises(TypeError, match=r"params\[1\]"):
        SamplingBatch.from_params([SamplingParams(), {"temperature": 1}], vocab_size=10)


def test_one_request_for_all_rows_draws_a_seed_per_row():
    batch = SamplingBatch.from_params(SamplingParams(), vocab_size=4096)
    out = reference.sample(torch.zeros(8, 4096), batch, 0)
    assert len(set(out.seeds.tolist())) == 8
    assert len(set(out.token_ids.tolist())) > 1
    again = reference.sample(torch.zeros(8, 4096), batch, 0)
    assert torch.equal(out.seeds, again.seeds) and torch.equal(out.token_ids, again.token_ids)


def test_seeds_of_one_root_repeat_and_of_two_roots_differ():
    first, again, other = SeedSource(5), SeedSource(5), SeedSource(6)
    drawn = first.draw(100).tolist()
    assert drawn == again.draw(60).tolist() + again.draw(40).tolist()
    assert len(set(drawn) | set(other.draw(100).tolist())) == 200
    assert max(drawn) >= 2**62
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_requests_that_mean_the_same_are_equal():
    import numpy

    one = SamplingParams(
        temperature=1,
        seed=7,
        top_k=3,
        logit_bias={5: 1, 2: 2.0},
        bad_words=[[1, 2]],
        allowed_token_ids=[1],
    )
    other = SamplingParams(
        temperature=numpy.float32(1.0),
        seed=numpy.int64(7),
        top_k=numpy.int32(3),
        logit_bias={2: 2, numpy.int64(5): 1.0},
        bad_words=((1, 2),),
        allowed_token_ids=(numpy.int64(1),),
    )
    assert one == other and one.text == other.text
    assert one.text != SamplingParams(temperature=1, seed=7, top_k=4).text


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
