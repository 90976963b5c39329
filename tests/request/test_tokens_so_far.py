"""The tokens of a row: of its prompt, of its output, appended, and missing."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lab.allocations import Operators
from tests.support.small_heads import V
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference


def test_prompt_ids_outside_the_vocabulary_are_left_out_and_output_ids_refused():
    params = [SamplingParams(temperature=0, repetition_penalty=2.0)]

    def processed(prompt: list[int]) -> torch.Tensor:
        batch = SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=[prompt])
        return reference.processed_logits(torch.ones(1, V), batch)

    assert torch.equal(processed([-1, 5, V, 2**40, 6]), processed([5, 6]))
    with pytest.raises(ValueError, match=r"output_token_ids\[0\]: expected ids in"):
        SamplingBatch.from_params(params, vocab_size=V, output_token_ids=[[V]])
    with pytest.raises(TypeError, match=r"prompt_token_ids\[0\]: expected token ids, got 1.5"):
        SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=[[1.5]])


@pytest.mark.parametrize("outside", [-1, -(2**40), V, 2**32 + 5, 2**63 - 1])
def test_an_appended_id_outside_the_vocabulary_is_none(outside):
    """2^32 + 5 is 5 in 32 bits, with which the bad word begins."""
    params = SamplingParams(bad_words=[[5, 6]], min_tokens=1, stop_token_ids=[2])
    batch = SamplingBatch.from_params([params], vocab_size=V)
    before = reference.processed_logits(torch.zeros(1, V), batch)
    batch.append(torch.tensor([outside]))
    assert torch.equal(reference.processed_logits(torch.zeros(1, V), batch), before)
    batch.append(torch.tensor([5]))
    assert reference.processed_logits(torch.zeros(1, V), batch)[0, [2, 6]].tolist() == [
        0.0,
        -torch.inf,
    ]


def test_the_callers_lists_are_taken_at_once():
    told, allowed = [3, 3], [3, 4]
    params = SamplingParams(temperature=0, frequency_penalty=1.0, allowed_token_ids=allowed)
    batch = SamplingBatch.from_params([params], vocab_size=V, output_token_ids=[told])
    told.append(3)
    allowed.append(5)
    processed = reference.processed_logits(torch.zeros(1, V), batch)
    assert processed[0, 3:6].tolist() == [-2.0, 0.0, -torch.inf]


def test_appends_of_no_rows_and_of_strided_tokens_count():
    batch = SamplingBatch.from_params(
        [SamplingParams(temperature=0, frequency_penalty=1.0)] * 2, vocab_size=V
    )
    batch.prepare(VocabShard(0, V))
    batch.append(torch.tensor([[1, 9], [2, 9], [1, 9]]).T[:, :3][[0, 0]])
    assert reference.processed_logits(torch.zeros(2, V), batch)[0, [1, 2]].tolist() == [-2, -1]
    batch.append(torch.arange(8).view(4, 2)[::2, 0])
    batch.drop([0, 1])
    batch.append(torch.zeros(0, dtype=torch.int64))
    batch.append(torch.zeros(0, 3, dtype=torch.int64))
    batch.add(SamplingParams(temperature=0, frequency_penalty=1.0))
    assert (reference.processed_logits(torch.zeros(1, V), batch) == 0).all()


def test_a_step_that_cannot_see_the_last_token_is_warned_of_once():
    sampler, hidden_states = LMHeadSampler(torch.ones(V, 4), backend="torch"), torch.ones(2, 4)

    def batch_of(**fields: Any) -> SamplingBatch:
        params = [SamplingParams(seed=1), SamplingParams(seed=2, **fields)]
        return SamplingBatch.from_params(params, vocab_size=V)

    for fields in (
        {"repetition_penalty": 2.0}, {"bad_words": [[1, 2]]},
        {"min_tokens": 2, "stop_token_ids": [1]},
    ):  # fmt: skip
        batch = batch_of(**fields)
        sampler(hidden_states, batch, 0)
        with pytest.warns(UserWarning, match=r"call batch.append\(out.token_ids\)") as warned:
            sampler(hidden_states, batch, 1)
            sampler(hidden_states, batch, 2)
        assert [Path(each.filename) for each in warned] == [Path(__file__)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fields in ({}, {"bad_words": [[1]]}, {"logit_bias": {1: 1.0}}):
            batch = batch_of(**fields)
            for position in range(3):
                sampler(hidden_states, batch, position)
        batch = batch_of(presence_penalty=2.0)
        for position in (0, 0, torch.tensor([0, 1])):  # trials, and a row that waits
            out = sampler(hidden_states, batch, position)
        for position in range(1, 4):
            batch.append(out.token_ids)
            out = sampler(hidden_states, batch, torch.tensor([position, position + 1]))
        batch.update(1, SamplingParams(presence_penalty=2.0), output_token_ids=[5])
        sampler(hidden_states, batch, 9)


def test_tokens_are_counted_while_a_request_looks_at_them():
    """A request that has left costs the steps of later ones nothing."""
    plain, penalised = SamplingParams(temperature=0), SamplingParams(frequency_penalty=1.0)
    batch = SamplingBatch.from_params([plain, penalised], vocab_size=V)
    batch.prepare(VocabShard(0, V))
    for rows, counts in (([0, 1], True), ([0], False)):
        batch.arrange(rows)
        with Operators() as used:
            batch.append(torch.arange(len(rows)))
        assert ("aten.clamp.out" in used.called) == counts
    batch.arrange([0, 1], [penalised], output_token_ids=[[7]])
    batch.append(torch.tensor([7, 7]))
    assert reference.processed_logits(torch.zeros(2, V), batch)[:, 7].tolist() == [0.0, -2.0]


@pytest.mark.parametrize("of", [torch.tensor, np.array])
def test_tokens_so_far_in_an_array_are_those_of_a_list(of):
    """A tensor of the id 0 alone counts as False, and one of several as neither."""
    request = SamplingParams(temperature=0, frequency_penalty=1.0)
    for ids in ([0], [0, 5]):
        batch = SamplingBatch.from_params([request], vocab_size=V)
        batch.update(0, request, output_token_ids=of(ids))
        processed = reference.processed_logits(torch.zeros(1, V), batch)
        assert processed[0, ids].tolist() == [-1.0] * len(ids)
