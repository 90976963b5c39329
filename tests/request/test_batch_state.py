"""A batch between steps: rows that move, outputs that stay."""

import pytest
import torch

from tests.support.small_heads import BACKENDS, D, V, head, plain
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference, verify


def test_rows_updated_between_verifications_of_one_width_are_what_is_verified():
    hidden_states, weight = head(6)
    sampler = LMHeadSampler(weight, max_rows=6, backend="torch")
    batch = SamplingBatch.from_params(plain(2), vocab_size=V)
    drafts, states = torch.full((2, 2), 7), hidden_states.view(2, 3, D)
    verify(sampler, states, drafts, batch, 3)
    changed = [
        SamplingParams(seed=9, temperature=9.0, top_k=2),
        SamplingParams(seed=8, allowed_token_ids=[11]),
    ]
    for row, params in enumerate(changed):
        batch.update(row, params)
    fresh = SamplingBatch.from_params(changed, vocab_size=V)
    expected = verify(sampler, states, drafts, fresh, 3)
    assert torch.equal(verify(sampler, states, drafts, batch, 3).token_ids, expected.token_ids)


def test_outputs_do_not_change_when_the_batch_does():
    hidden_states, weight = head(3)
    for backend in BACKENDS:
        sampler = LMHeadSampler(weight, backend=backend)
        batch = SamplingBatch.from_params(plain(3), vocab_size=V, max_rows=4)
        out = sampler(hidden_states, batch, 0)
        oracle = reference.sample(reference.logits(hidden_states, weight), batch, 0)
        drafts = torch.zeros(3, 0, dtype=torch.int64)
        verified = verify(sampler, hidden_states.unsqueeze(1), drafts, batch, 0)
        batch.permute([2, 0, 1])
        batch.drop(0)
        batch.update(0, SamplingParams(seed=77))
        batch.seed.fill_(5)
        for seeds in (out.seeds, oracle.seeds, verified.seeds):
            assert seeds.tolist() == [0, 1, 2]


def test_moving_many_rows_takes_one_pass():
    """The time of a quadratic pass over 4096 rows would be minutes."""
    rows = 4096
    batch = SamplingBatch.from_params(plain(rows), vocab_size=V)
    batch.permute(range(rows - 1, -1, -1))
    batch.drop(range(0, rows, 2))
    assert batch.seed.tolist() == list(range(rows - 2, -1, -2))


def test_a_row_made_greedy_by_its_temperature_keeps_its_argmax():
    hidden_states, weight = head(4)
    params = [
        SamplingParams(seed=1, top_k=2),
        SamplingParams(seed=2, top_p=0.5, allowed_token_ids=list(range(4, 20))),
        SamplingParams(seed=3, min_p=0.9),
        SamplingParams(seed=4, top_k=20, top_p=0.3),
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V, kept_cap=V)
    batch.temperature[:3] = 0.0
    sizes = LMHeadSampler(weight, backend="torch")(hidden_states, batch, 0).kept.sizes.tolist()
    mask = reference.kept_mask(reference.logits(hidden_states, weight), batch)
    assert sizes == [1, 1, 1, int(mask[3].sum())]
    assert mask.sum(dim=1).tolist()[:3] == [V, 16, V], "the processed logprobs are over these"


@pytest.mark.parametrize(
    "arguments",
    [
        {"vocab_size": -5},
        {"vocab_size": "x"},
        {"vocab_size": 2**20 + 1},
        {"vocab_size": 5.0},
        {"max_rows": 2**31},
        {"max_rows": -1},
        {"max_rows": 1},
        {"fixed_rounds": 1},
        {"prompt_token_ids": "ab"},
        {"output_token_ids": 5},
    ],
)
def test_a_batch_is_refused_by_the_name_of_its_argument(arguments):
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=name):
        SamplingBatch.from_params(
            [SamplingParams()] * 2, **{"vocab_size": V, "max_rows": 2, **arguments}
        )
    with pytest.raises(TypeError, match="params"):
        SamplingBatch.from_params(3, vocab_size=V)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_fp32_are_infinite(backend):
    """Below they count as masked, above as forced, whatever stands beside them."""
    weight = torch.tensor([[1e38], [2e38], [3e38], [-3e38]])
    for factor, temperature, token, status in (
        (1.0, 1e-5, 0, 0),  # three that are forced: the lowest id
        (-1.0, 1.0, 3, 0),  # only the last is not masked
    ):
        batch = SamplingBatch.from_params(
            [SamplingParams(temperature=temperature, seed=1)], vocab_size=4
        )
        hidden_states = torch.tensor([[factor]])
        sampler = LMHeadSampler(weight, backend=backend)
        oracle = reference.sample(reference.logits(hidden_states, weight), batch, 0)
        for out in (sampler(hidden_states, batch, 0), oracle):
            assert (out.token_ids.tolist(), out.status.tolist()) == ([token], [status])
    masked = SamplingBatch.from_params([SamplingParams(seed=1)], vocab_size=4)
    out = LMHeadSampler(-weight.abs() - 2e38, backend=backend)(torch.ones(1, 1), masked, 0)
    assert out.token_ids.tolist() == [-1]
