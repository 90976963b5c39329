"""`arrange` moves rows in one pass: what it keeps and refuses. `test_fuzz` judges its tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.fields import FILTERS, requests_with
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, UnsupportedParameter
from tpsample.core.row_noise import SeedSource
from tpsample.noise import philox4x32

V = 67


def test_a_full_batch_replaces_a_row_where_it_stands():
    params = [SamplingParams(seed=row) for row in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    address = batch.seed.data_ptr()
    batch.arrange([0, 3, 2], [SamplingParams(temperature=0.5)])
    assert batch.temperature.tolist() == [1.0, 0.5, 1.0]
    assert (batch.unseeded, batch.seed.data_ptr()) == ([1], address)
    batch.arrange([1, 0])
    assert (batch.unseeded, batch.rows) == ([0], 2)


def test_a_seed_that_was_drawn_moves_with_its_row():
    params = [SamplingParams(), SamplingParams(seed=5), SamplingParams()]
    batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=4)
    batch._draw_seeds(SeedSource(7))
    drawn = batch.seed.tolist()
    batch.arrange([2, 3, 0], [SamplingParams()])
    assert batch.unseeded == [1]
    assert batch.seed.tolist()[::2] == drawn[::-2]


@pytest.mark.parametrize(
    ("order", "joining", "told"),
    [
        ([0, 0], 0, "each row at most once"),
        ([0, 3], 2, "each joining one, from 3 on"),
        ([0, 1, 2], 1, "each joining one, from 3 on"),
        ([0, 3], 0, r"rows in \[0, 3\)"),
        ([0, True], 0, r"rows in \[0, 3\)"),
        ([-1], 0, r"rows in \[0, 3\)"),
        ([0, 1, 2, 3, 4], 2, "5 rows exceed max_rows=4"),
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(order, joining, told):
    params = [SamplingParams(seed=row, top_k=row + 1) for row in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=4)
    before = batch.plan
    with pytest.raises(ValueError, match=told) as error:
        batch.arrange(order, [SamplingParams(seed=9)] * joining)
    assert not isinstance(error.value, UnsupportedParameter)
    assert batch.plan is before and batch.seed.tolist() == [0, 1, 2]


def test_tokens_that_do_not_fit_the_joining_rows_are_refused():
    batch = SamplingBatch.from_params([], vocab_size=V, max_rows=2)
    with pytest.raises(ValueError, match=r"prompt_token_ids: expected one list per row \(1\)"):
        batch.arrange([0], [SamplingParams()], prompt_token_ids=[[1], [2]])
    flat = r"got 3 ids in their place; .* such as \[\[5, 6\]\] for one"
    with pytest.raises(ValueError, match=flat):
        batch.arrange([0], [SamplingParams()], prompt_token_ids=[1, 2, 3])  # type: ignore[list-item]


@pytest.mark.parametrize("counts", [[1] * 300, [300], [5, 251, 1, 40, 300], [0, 255, 2]], ids=len)
def test_seeds_are_the_same_however_many_are_drawn_at_a_time(counts):
    root, total = 0x123456789ABCDEF, sum(counts)
    source = SeedSource(root)
    with torch.inference_mode():
        drawn = torch.cat([source.draw(count) for count in counts])
    assert source.drawn == total
    counter = torch.arange(total)
    zero = torch.zeros_like(counter)
    key = (root & 0xFFFFFFFF, root >> 32)
    low, high, *_ = philox4x32((counter, zero, zero, zero + 0x73656564), key)
    assert torch.equal(drawn, (high << 32 | low) & (2**63 - 1))
    assert not drawn.unique().numel() < total


@pytest.mark.parametrize("name", FILTERS)
def test_a_row_that_moves_has_no_filter_of_one_that_left(name):
    """The numbers of a slot that was left stay there until another request takes it."""
    sampler, plain = LMHeadSampler(torch.empty(V, 0), backend="torch"), SamplingParams(seed=1)
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(5))
    for fields in requests_with([name]):
        filtered = SamplingParams(seed=2, **fields)
        batch = SamplingBatch.from_params([plain, filtered], vocab_size=V, kept_cap=V)
        batch.drop(1)
        batch.arrange([1, 0], [filtered])
        anew = SamplingBatch.from_params([filtered, plain], vocab_size=V, kept_cap=V)
        for position in range(8):
            moved, fresh = (sampler.sample_logits(logits, its, position) for its in (batch, anew))
            assert moved.token_ids.equal(fresh.token_ids)
            assert moved.kept.sizes.equal(fresh.kept.sizes) and moved.kept.whole[1]
