"""Rows of a batch: what joins, leaves, moves and changes, and what is refused."""

import pytest
import torch

from tpsample import SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.request.controls.apply import StepControls

V = 331


def test_a_batch_without_controls_has_no_state():
    batch = SamplingBatch.from_params([SamplingParams(top_k=3)] * 4, vocab_size=V)
    assert batch.view(batch.rows).controls is None
    batch.append(torch.tensor([1, 2, 3, 4]))
    assert batch.view(batch.rows).controls is None


def test_one_request_for_all_rows_counts_per_row():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    batch = SamplingBatch.from_params(params, vocab_size=4)
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.0]] * 3)
    first = reference.sample(logits, batch, 0).token_ids
    batch.append(torch.tensor([1, -1, 1]))
    assert first.tolist() == [1, 1, 1]
    assert reference.sample(logits, batch, 0).token_ids.tolist() == [2, 1, 2]


def test_a_sampler_that_comes_too_late_is_refused():
    """Its shard's counts are not known, and it must not guess."""
    batch = SamplingBatch.from_params([SamplingParams(presence_penalty=1.0)] * 2, vocab_size=V)
    reference.processed_logits(torch.zeros(2, V), batch)
    batch.append(torch.tensor([1, 2]))
    reference.processed_logits(torch.zeros(2, V), batch)
    with pytest.raises(ValueError, match="output_token_ids"):
        StepControls.of(batch.view(batch.rows).controls, VocabShard(0, 100))


def test_a_prepared_shard_may_be_sampled_later():
    batch = SamplingBatch.from_params([SamplingParams(presence_penalty=1.0)], vocab_size=V)
    batch.prepare(VocabShard(0, 100))
    batch.append(torch.tensor([7]))
    processed = StepControls.of(batch.view(batch.rows).controls, VocabShard(0, 100)).apply(
        torch.zeros(1, 100), 0
    )
    assert processed[0, 7] == -1 and processed.sum() == -1
