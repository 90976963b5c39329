"""Captured kept sets on gloo ranks: the oracle's sets, in its order, or an overflow."""

import math
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch

from tests.support.cases import own_shard, uneven_shards
from tests.support.filtered import Rows, V, grid, kinds_of_logits, masked, steps
from tests.support.memory import cost_of
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import KeptSets, LMHeadSampler, SamplingBatch, SamplingParams, reference
from tpsample.backends.numba_.cuts import NativeCuts
from tpsample.backends.torch_.cuts import Cuts
from tpsample.core.order import BINS, bins_of, order_words
from tpsample.filters import kept_sets
from tpsample.filters.kept_sets import LISTED, MOST_LISTED
from tpsample.ranks.ranks import MAX_PAYLOAD

KINDS = kinds_of_logits()
CUTS = {"torch": Cuts, "numba": NativeCuts}
SIZES = [[1, 3], *long([1, 2, 8])]


def _assert_is_the_oracles(got: KeptSets, rows: Rows, cap: int) -> None:
    batch = rows.batch
    temperatures = batch.temperature.tolist()
    mask, order = rows.kept_mask(), order_words(rows.logits).argsort(dim=1, descending=True)
    assert len(got.token_ids) == len(got.log_masses) == got.offsets[-1]
    for row in range(batch.rows):
        expected = order[row][mask[row][order[row]]]
        if temperatures[row] == 0:
            expected = expected[:1]
        assert got.sizes[row] == len(expected)
        assert got.whole[row].item() == (len(expected) == V)
        assert got.overflow[row].item() == (cap < len(expected) < V)
        part = slice(got.offsets[row], got.offsets[row + 1])
        if len(expected) > cap:
            assert part.start == part.stop
            continue
        assert torch.equal(got.token_ids[part], expected), rows.params[row]
        exact = (rows.logits[row, expected].double() / (temperatures[row] or 1)).log_softmax(0)
        assert torch.allclose(got.log_masses[part], exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("world_sizes", SIZES, ids=str)
def test_sets_are_the_oracles_and_the_same_everywhere(world_sizes):
    cap, various = 60, [KINDS[name] for name in ("zipf", "two-valued", "wide", "spike")]
    cases = [
        Rows(various, grid()[::23], kept_cap=cap),
        Rows([KINDS["normal"]], grid()[2::7], bias=masked(37, 1100), kept_cap=cap),
    ]
    tokens = [rows.oracle().token_ids for rows in cases]
    first = None
    for world_size in world_sizes:
        for outputs in run_ranks(world_size, steps, cases):
            first = first or outputs
            for expected, out, same in zip(tokens, outputs, first, strict=True):
                assert torch.equal(out.token_ids, expected)
                for each in fields(out.kept):
                    values = (getattr(sets, each.name) for sets in (out.kept, same.kept))
                    assert torch.equal(*values), each.name
    for rows, out in zip(cases, first, strict=True):
        _assert_is_the_oracles(out.kept, rows, cap)
        assert out.kept.overflow.any() and not out.kept.overflow.all()


def test_captured_sets_are_those_worked_out_by_hand():
    """0.4 and both 0.2 before the mass reaches 0.75; equal ones by id; all five of a plain row."""
    logits = torch.tensor([math.log(p) for p in (0.1, 0.2, 0.4, 0.2, 0.1)])
    params = [
        SamplingParams(temperature=0.0, top_p=0.75),
        SamplingParams(seed=1, top_p=0.75),
        SamplingParams(seed=2),
        SamplingParams(seed=3, top_k=1),
    ]
    out = Rows([logits], params, kept_cap=3).step()
    assert out.kept.offsets.tolist() == [0, 1, 4, 4, 5]
    assert out.kept.token_ids.tolist() == [2, 2, 1, 3, 2]
    assert out.kept.log_masses.exp().tolist() == pytest.approx([1.0, 0.5, 0.25, 0.25, 1.0])
    assert out.kept.whole.tolist() == [False, False, True, False]
    out = Rows([logits], params, kept_cap=2).step()
    assert out.kept.offsets.tolist() == [0, 1, 1, 1, 2]
    assert out.kept.sizes.tolist() == [1, 3, 5, 1]
    assert out.kept.overflow.tolist() == [False, True, False, False]


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_without_a_token_keep_nothing_and_forced_tokens_share(world_size):
    nan, empty = torch.zeros(50), torch.full((50,), -math.inf)
    nan[31] = math.nan
    forced = torch.linspace(0, 9, 50)
    forced[[7, 44]] = math.inf
    params = [SamplingParams(seed=1, **c) for c in ({"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.5})]
    biases, how = (nan, empty, forced), {"kept_cap": 4}
    cases = [Rows([torch.zeros(50)], params, bias=bias, **how) for bias in biases]
    for none, nothing, both in run_ranks(world_size, steps, cases):
        for out in (none, nothing):
            assert out.kept.sizes.tolist() == [0, 0, 0] and not out.kept.overflow.any()
            assert out.kept.offsets.tolist() == [0, 0, 0, 0] and not len(out.kept.token_ids)
        # top_k = 3 takes a third token, whose mass beside two forced ones is none.
        assert both.kept.token_ids.tolist()[:2] == [7, 44]
        assert both.kept.log_masses[:2].exp().tolist() == pytest.approx([0.5, 0.5])
        mask = cases[2].kept_mask()
        assert both.kept.sizes.tolist() == mask.sum(dim=1).tolist()


def _costs(rows: Rows, cap: int) -> tuple[int, int, KeptSets | None]:
    """Bytes of a step with its capture beside the words, the largest tensor, and the sets."""
    sampler, outs = rows.sampler(max_rows=64), []
    rows.options = {"kept_cap": cap}
    given = rows.hidden_states, rows.batch, rows.positions
    cost = cost_of(sampler, lambda: outs.append(sampler(*given)))
    return *cost, outs[0].kept


def test_bytes_and_memory_follow_the_sizes_that_fit():
    vocab_size, count, world_size, cap = 32768, 8, 4, 100
    logits = -1.1 * (1 + torch.arange(vocab_size)).double().log().float()
    params = [SamplingParams(top_k=k, seed=k) for k in (5, 60, 100, 101, 3000, 7, 8, 9)]
    rows = Rows([logits], params)
    shards = uneven_shards(vocab_size, world_size)
    # The first ids are the likeliest, so the first shard holds all of every set that fits.
    widest = 100
    bins = bins_of(logits[None], logits[:1], torch.ones(1))[0]
    words = [int((bins == bins[request.top_k - 1]).sum()) for request in params]
    for sent, elements, kept in run_ranks(world_size, _costs, rows, cap):
        assert kept.overflow.tolist() == [k > cap for k in (5, 60, 100, 101, 3000, 7, 8, 9)]
        # The largest logit, the token, mass and size, and the words of the set.
        of_words = 8 * (world_size - 1) * (1 + 1 + 2 + widest) * count
        of_sums = (world_size - 1) * 4 * BINS * count  # numbers of tokens, to each peer
        listed = max(min(number, 2 * LISTED // (1 + world_size)) for number in words)
        of_lists = 8 * (world_size - 1) * (1 + listed) * count
        assert sent == of_words + of_sums + of_lists
        assert elements <= 1.1 * count * max(map(len, shards))


def _without_digits(rows: Rows, backend: str) -> tuple[int, KeptSets | None]:
    """How many words have room at most, and the sets."""
    head = rows.head(own_shard(rows.vocab_size, even=True))
    sampler, kind = LMHeadSampler(**head | {"backend": backend}), CUTS[backend]
    listed = patch.object(kind, "search_bins", autospec=True, side_effect=kind.search_bins)
    digits = patch.object(kept_sets, "_by_digits", side_effect=AssertionError("digits"))
    with digits, listed as searches:
        out = sampler(rows.hidden_states, rows.batch, rows.positions)
    return max(call.args[3] for call in searches.call_args_list), out.kept


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_flat_rows_are_searched_by_lists(backend, world_size):
    """A bin of normal logits has more words than one rank lists where it knows no bound."""
    logits = torch.randn(32768, generator=torch.Generator().manual_seed(2))
    words = bins_of(logits[None], logits.max()[None], torch.ones(1))[0].bincount()
    assert LISTED < words.max() < MOST_LISTED * len(logits)
    requests = [{"top_p": 0.5}, {"top_p": 0.9}, {"top_k": 9000}, {"top_k": 20000, "top_p": 0.8}]
    params = [SamplingParams(seed=seed, **request) for seed, request in enumerate(requests)]
    rows = Rows([logits], params, kept_cap=len(logits))
    sizes = rows.kept_mask().sum(dim=1).tolist()
    assert min(sizes) > 4000
    of_rank = 2 * int(words.max()) // (1 + world_size)
    for room, kept in run_ranks(world_size, _without_digits, rows, backend):
        assert 0.8 * of_rank < room < 1.1 * of_rank
        assert kept.sizes.tolist() == sizes
        _assert_is_the_oracles(kept, rows, len(logits))


@pytest.mark.parametrize(("sharp", "is_long"), [(20, True), (300, False)])
def test_one_flat_row_among_many_is_left_to_digits(sharp, is_long):
    """The others would have its room, too. In a small message they have it."""
    flat = torch.randn(32768, generator=torch.Generator().manual_seed(2))
    logits = torch.stack([30 * flat] * sharp + [flat])
    params = [SamplingParams(seed=row, top_p=0.9) for row in range(1 + sharp)]
    batch = SamplingBatch.from_params(params, vocab_size=32768, kept_cap=32768)
    sampler = LMHeadSampler(torch.zeros(32768, 1), backend="numba", group="alone", max_rows=400)
    find = patch.object(
        NativeCuts, "search_bins", autospec=True, side_effect=NativeCuts.search_bins
    )
    with find as searches:
        kept = sampler.sample_logits(logits, batch, 0).kept
    (room,) = (call.args[3] for call in searches.call_args_list)
    assert (room > LISTED) == is_long and room * len(logits) <= max(MAX_PAYLOAD, LISTED * 301)
    mask = reference.kept_mask(
        logits[-2:], SamplingBatch.from_params(params[-2:], vocab_size=32768)
    )
    assert kept is not None and kept.sizes[-2:].tolist() == mask.sum(dim=1).tolist()


def test_no_cap_reports_nothing():
    one = SamplingBatch.from_params(
        [SamplingParams(top_k=2, logprobs=1)] * 3, vocab_size=V, kept_cap=5
    )
    sampler = LMHeadSampler(KINDS["normal"].unsqueeze(1), backend="torch")
    out = sampler(torch.ones(3, 1), one, 0)
    assert out.kept.sizes.tolist() == [2, 2, 2]
    silent = SamplingBatch.from_params([SamplingParams(top_k=2)] * 3, vocab_size=V)
    again = sampler(torch.ones(3, 1), silent, 1, out=out)
    assert again.kept is None and again.logprobs is None


@pytest.mark.parametrize("cap", [0, -1, 2.5, True, "8"])
def test_a_wrong_cap_is_refused(cap):
    with pytest.raises(ValueError, match="kept_cap: expected"):
        SamplingBatch.from_params([SamplingParams()], vocab_size=V, kept_cap=cap)
