"""Arguments that `verify` refuses, and drafts of no effect."""

import pytest
import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, verify

METHODS = ("rejection", "block")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "typical"}, "method: expected one of coupled, rejection, block"),
        ({"draft_token_ids": torch.zeros(2, 2, dtype=torch.int32)}, "draft_token_ids: expected"),
        ({"draft_token_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"expected \[2, 4, 1\]"),
        ({"hidden_states": torch.ones(2, 2, 1)}, r"hidden_states: expected \[2, 3, 1\]"),
        ({"method": "coupled"}, "draft: method="),
        ({"draft": torch.zeros(2, 2, 9)}, r"draft: expected a tensor \[2, 2, 10\]"),
        ({"positions": torch.zeros(6, dtype=torch.int64)}, "positions: expected"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "hidden_states": torch.ones(2, 3, 1),
        "draft_token_ids": torch.zeros(2, 2, dtype=torch.int64),
        "batch": SamplingBatch.from_params(SamplingParams(), vocab_size=10),
        "positions": 3,
        "method": "block",
        "draft": torch.zeros(2, 2, 10),
    }
    sampler = LMHeadSampler(torch.ones(10, 1), max_rows=6)
    assert (verify(sampler, **arguments).token_ids[:, 0] >= 0).all()
    with pytest.raises(ValueError, match=message):
        verify(sampler, **arguments | change)
    with pytest.raises(ValueError, match="2 rows × 3 positions exceed max_rows=5"):
        verify(LMHeadSampler(torch.ones(10, 1), max_rows=5), **arguments)


def test_ids_outside_the_vocabulary_end_the_drafts_and_no_drafts_are_a_step():
    sampler = LMHeadSampler(torch.ones(10, 1), max_rows=16)
    batch = SamplingBatch.from_params([SamplingParams(seed=s) for s in range(4)], vocab_size=10)
    plain = sampler(torch.ones(4, 1), batch, 3).token_ids
    for method in ("coupled", *METHODS):
        drafts = torch.tensor([[10, 1], [2**40, 1], [-7, 1], [-1, 1]])
        out = verify(sampler, torch.ones(4, 3, 1), drafts, batch, 3, method=method)
        assert (out.num_accepted == 0).all()
        none = verify(sampler, torch.ones(4, 1, 1), drafts[:, :0], batch, 3, method=method)
        assert torch.equal(none.token_ids[:, 0], out.token_ids[:, 0])
        assert method != "coupled" or torch.equal(none.token_ids[:, 0], plain)
        empty = verify(
            sampler, torch.ones(0, 3, 1), drafts[:0],
            SamplingBatch.from_params([], vocab_size=10), 3, method=method,
        )  # fmt: skip
        assert empty.token_ids.shape == (0, 3)
