"""Rows of a batch: what joins, leaves, moves and changes, and what is refused."""

import pytest
import torch

from tests.support.controls import bitmask_of
from tpsample import SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.request.controls.apply import StepControls
from tpsample.request.seeds import SeedSource

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


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"allowed_token_ids": [V]}, "allowed_token_ids"),
        ({"bad_words": [[1, V]]}, "bad_words"),
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [V]}, "stop_token_ids"),
        ({"logprob_token_ids": [V]}, "logprob_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_name_the_field(fields, match):
    with pytest.raises(ValueError, match=match):
        SamplingBatch.from_params(SamplingParams(**fields), vocab_size=V)
    batch = SamplingBatch.from_params([SamplingParams()], vocab_size=V, max_rows=2)
    with pytest.raises(ValueError, match=match):
        batch.add(SamplingParams(**fields))
    assert batch.rows == 1


def test_contradictions_raise():
    with pytest.raises(ValueError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[4, 5], bad_words=[[4], [5]])
    with pytest.raises(ValueError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[4, 5], min_tokens=1, stop_token_ids=[4], bad_words=[[5]])
    with pytest.warns(UserWarning, match="stop_token_ids"):
        SamplingParams(min_tokens=3)


def test_changes_of_rows_check_their_arguments():
    penalised = SamplingParams(presence_penalty=1.0)
    batch = SamplingBatch.from_params([SamplingParams()] * 2, vocab_size=V)
    for change, match in [
        (lambda: batch.add(SamplingParams()), "max_rows"),
        (lambda: batch.drop(2), "drop"),
        (lambda: batch.permute([0, 0]), "order"),
        (lambda: batch.update(5, SamplingParams()), "update"),
        (lambda: batch.update(0, penalised), "output_token_ids"),
        (lambda: batch.append(torch.zeros(2)), "token_ids"),
        (lambda: batch.append(torch.zeros(3, dtype=torch.int64)), "3 rows"),
        (lambda: setattr(batch, "grammar_bitmask", torch.zeros(2, 3)), "grammar_bitmask"),
        (lambda: setattr(batch, "forced_token_ids", torch.zeros(1).long()), "forced_token_ids"),
    ]:
        with pytest.raises(ValueError, match=match):
            change()
    single = SamplingBatch.from_params(SamplingParams(), vocab_size=V)
    with pytest.raises(ValueError, match="one request for all rows"):
        single.add(SamplingParams())


def test_a_grammar_that_lacks_rows_is_refused():
    batch = SamplingBatch.from_params([SamplingParams()], vocab_size=V, max_rows=2)
    batch.grammar_bitmask = bitmask_of([None], V)
    batch.add(SamplingParams())
    with pytest.raises(ValueError, match="grammar_bitmask"):
        reference.sample(torch.zeros(2, V), batch, 0)


def test_seeds_of_rows_without_one_survive_moves():
    batch = SamplingBatch.from_params([SamplingParams(seed=5)], vocab_size=V, max_rows=3)
    batch.add(SamplingParams())
    batch.permute([1, 0])
    assert batch.unseeded
    batch.draw_seeds(SeedSource(1))
    assert not batch.unseeded and batch.seed[1] == 5
    drawn = batch.seed[0].item()
    batch.drop(1)
    assert batch.seed.tolist() == [drawn]
