"""Searches for where kept sets end: Triton and native kernels give the integers of their twins."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.support.twins import equal
from tpsample.backends import cuts_of
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.torch_.cuts import LastDigits, OtherEnds
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core import word
from tpsample.core.order import ABOVE_ALL, BINS, DIGIT_BITS, DIGITS, Search, mass_limit
from tpsample.core.row_noise import RowNoise

# The interpreter computes with the NaN and infinities of these rows as a GPU does, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.parametrize("mass", [False, True])
def test_a_search_by_digits_finds_what_the_definition_does(twins, mass):
    """A whole search of one digit after the other, and the mass it ends with."""
    numbers, plain, limit = twins.numbers, twins.plain, twins.thresholds.most
    if mass:
        limit = plain.mass_from(torch.zeros_like(twins.cut)) // 2 + 1
    limit = torch.stack([limit, 7 * limit], dim=1)[:, 0]  # beside other sums, as ranks have it
    search = Search(torch.zeros_like(twins.cut), torch.zeros_like(twins.cut), limit)
    shares = torch.tensor([0.3, 0.9, 1.0]).double().repeat(len(limit))[: len(limit)]
    ties, cut = torch.arange(len(limit)) % 2, twins.cut
    others = [
        OtherEnds(cut, share, of_greedy)
        for share in (None, shares)
        for of_greedy in (None, plain.first_words(1)[:, 0])
    ]
    names = ("prefix", "reached", "limit")
    before, former = search, None
    for shift in range(word.EPOCH_SHIFT - DIGIT_BITS, word.TOKEN_BITS - 1, -DIGIT_BITS):
        _, bins = cuts_of(plain).digits(search, None, shift, mass=mass)
        found = bins[numbers].sum(dim=1) > 0
        assert (found == (plain.logits.shape[1] > 0)).all(), "each prefix begins some word"
        following = cuts_of(plain).next_digit(search, bins)
        for each in twins.kernels:
            _, own = cuts_of(each).digits(search, None, shift, mass=mass)
            assert equal(own[numbers], bins[numbers])
            for share in (None, shares)[: 1 + mass]:
                if former is not None:
                    given = before, former, shift, share
                    found, own = cuts_of(each).digits(*given, mass=mass)
                    expected, right = cuts_of(plain).digits(*given, mass=mass)
                    assert equal(own[numbers], right[numbers])
                    for name in names:
                        assert equal(getattr(found, name), getattr(expected, name))
        before, former, search = search, bins, following
    some = bins[0].flip(0).expand_as(bins)  # of other ranks
    for of_ranks, place in (([bins], 0), ([bins, some], 0), ([some, bins, some], 1)):
        last = LastDigits(torch.stack(of_ranks), place, mass)
        for each, ends in product(twins.kernels, [None, *others]):
            found, expected = (
                cuts_of(rows).last_digit(before, last, ties, ends) for rows in (each, plain)
            )
            assert equal(found, expected)
            for weighs in (False, True) if ends else ():
                found, expected = (
                    cuts_of(rows).best_of_last_digit(before, last, ties, ends, weighs=weighs)
                    for rows in (each, plain)
                )
                assert equal(found[numbers], expected[numbers])
    words = (search.prefix << word.TOKEN_BITS) + word.TOKEN_MASK
    for cut in (words, torch.zeros_like(limit)):
        for each in twins.kernels:
            assert equal(each.mass_from(cut)[numbers], plain.mass_from(cut)[numbers])


@pytest.mark.parametrize("mass", [False, True])
def test_a_first_digit_has_no_words_below_a_least_one(twins, mass):
    """Its sum is then the total that a top_p takes a share of."""
    least, nothing = twins.cut, torch.zeros_like(twins.cut)

    def digits(rows: ShardLogits, least: torch.Tensor | None) -> torch.Tensor:
        first = Search(nothing, nothing, nothing), None, 44
        return cuts_of(rows).digits(*first, mass=mass, least=least)[1][twins.numbers]

    bins = digits(twins.plain, least)
    total = twins.plain.held_from(least)[twins.numbers, 0 if mass else 1]
    assert (torch.equal(bins.sum(dim=1), total) and len(twins.logits[0]) == 0) or total.any()
    assert not torch.equal(bins, digits(twins.plain, None)) or len(twins.logits[0]) < 2
    for rows in twins.kernels:
        assert equal(digits(rows, least), bins)


def _is_some_of(words: torch.Tensor, every: torch.Tensor) -> None:
    """Rows [F, n] list n of the words that stand behind their number in another list, or all."""
    assert ((words > 0).sum(dim=1) == every[:, 0].clamp(max=words.shape[1])).all()
    for its, of in zip(words.tolist(), every[:, 1:].tolist(), strict=True):
        assert set(its) <= {0, *of}


@pytest.mark.parametrize("mass", [False, True])
def test_bins_and_their_words(twins, mass):
    """Histograms by their twins, and the words of some bins, cut short where they are too many."""
    plain, numbers = twins.plain, twins.numbers
    middle = twins.cut
    lowest = torch.full_like(middle, word.LOWEST_DRAWABLE)
    for cut in (middle, lowest) if mass else (None,):
        bins = cuts_of(plain).sums_of_bins(cut)
        for rows in twins.kernels:
            assert equal(cuts_of(rows).sums_of_bins(cut)[numbers], bins[numbers])
        expected = (plain.logits > -torch.inf).sum(dim=1) if cut is None else bins[:, BINS]
        if cut is not middle:
            assert torch.equal(bins[:, :BINS].sum(dim=1)[numbers], expected[numbers])
        else:
            assert torch.equal(expected[numbers], plain.mass_from(cut)[numbers])


@pytest.mark.parametrize("mass", [False, True])
def test_the_first_word_at_which_a_sum_reaches_its_limit(twins, mass):
    """Of a row's first 70 words, at each tenth of their weight and beyond it."""
    plain, numbers = twins.plain, twins.numbers
    words = plain.first_words(70)
    words *= words >= word.LOWEST_DRAWABLE
    weight = plain.masses(word.value_of(words)) * (words > 0) if mass else words > 0
    reached = torch.full_like(twins.cut, 5)
    for tenths in range(12):
        limit = 1 + reached + weight.sum(dim=1) * tenths // 10
        search = Search(torch.zeros_like(limit), reached, limit)
        cut = cuts_of(plain).reached_at(search, words, mass=mass)
        down_to = (weight * (words >= cut.unsqueeze(1))).sum(dim=1)
        before = (weight * (words > cut.unsqueeze(1))).sum(dim=1)
        assert ((reached + before < limit) | (cut == words.amax(dim=1)))[numbers].all()
        assert ((reached + down_to >= limit) | (cut == words.amin(dim=1)))[numbers].all()
        listed = torch.cat([(words > 0).sum(dim=1, keepdim=True), words], dim=1)[None]
        found, _ = cuts_of(twins.native).cut_of(search, listed, torch.zeros_like(cut), mass=mass)
        assert equal(found[numbers], cut.clamp(min=word.LOWEST_DRAWABLE)[numbers])


def test_sets_one_behind_the_other(twins):
    """With none in some rows, and room behind the last."""
    plain, numbers = twins.plain, twins.numbers
    words = plain.first_words(9) * (torch.arange(9) < torch.arange(len(twins.cut)).unsqueeze(1) % 8)
    words *= numbers.unsqueeze(1)
    cut = words.masked_fill(words == 0, ABOVE_ALL).amin(dim=1)
    own = plain.held_from(cut)[None]
    sets = cuts_of(plain).set_sizes(own, cut, 8, torch.ones_like(numbers))
    total = int(sets.needed[2]) + 3
    ids, log_masses = cuts_of(plain).listed_sets(words, sets, total)
    assert ids[-3:].tolist() == [-1] * 3 and log_masses[-3:].isnan().all()
    words = plain.first_words(9)  # more than the sets have
    for rows in twins.kernels:
        found = cuts_of(rows).listed_sets(words, sets, total)
        assert equal(found[0], ids)
        assert found[1].view(torch.int64)[:-3].equal(log_masses.view(torch.int64)[:-3])
        assert found[1][-3:].isnan().all()


@pytest.mark.parametrize("drawn", [False, True])
def test_which_sets_are_listed(twins, drawn):
    """Of two ranks with the same words: all, none, one and some tokens, and greedy rows."""
    plain, cut, width = twins.plain, twins.cut.clone(), twins.plain.logits.shape[1]
    there = (torch.arange(len(cut)) % 5 != 0) | (not drawn)
    cut[1], cut[2] = 0, ABOVE_ALL
    gathered = torch.stack([plain.held_from(cut)] * 2)
    for cap in (1, 2 * width // 3, 2 * width):
        plain = replace(plain, vocab_size=2 * width)
        expected = cuts_of(plain).set_sizes(gathered, cut, cap, there)
        greedy = ~plain.noise.random.squeeze(1)
        assert expected.sizes[greedy].max() <= 1
        assert expected.offsets[-1] == expected.needed[2]
        assert expected.whole[1] or drawn or greedy[1] or not width
        assert not (expected.whole & expected.overflow).any()
        for rows in twins.kernels:
            found = cuts_of(replace(rows, vocab_size=2 * width)).set_sizes(
                gathered, cut, cap, there
            )
            for name, value in expected._asdict().items():
                assert equal(getattr(found, name), value), name


def test_sets_of_more_rows_than_one_block():
    """Of three ranks whose parts differ, greedy rows among them."""
    generator = torch.Generator().manual_seed(0)
    gathered = torch.randint(0, 40, (3, 600, 2), generator=generator)
    gathered[:, 5, 1] = torch.tensor([50, 1, 2])  # the most that one rank has
    cut = torch.where(torch.arange(600) % 11 < 2, ABOVE_ALL, 1)
    temperature, logits = torch.arange(600).remainder(7).float(), torch.zeros(600, 4)
    noise = RowNoise(temperature, torch.arange(600), torch.arange(600), 1)
    plain, *others = (
        kind(logits, logits, 0, 90, kind.temperature_of(noise), noise)
        for kind in (ShardLogits, TritonShardLogits, NativeShardLogits)
    )
    given = gathered, cut, 60, torch.ones(600, dtype=torch.bool)
    expected = cuts_of(plain).set_sizes(*given)
    for rows in others:
        for name, value in cuts_of(rows).set_sizes(*given)._asdict().items():
            assert equal(value, getattr(expected, name)), name
    assert expected.overflow.any() and not expected.overflow.all()


def test_the_last_cut_of_several(twins):
    """Greedy rows and rows without a number go their own way, and a share of 1 cuts nothing."""
    plain, cut = twins.plain, twins.cut
    for of_greedy in (None, plain.first_words(1)[:, 0]):
        expected = plain.last_cut(cut, of_greedy=of_greedy)
        for rows in twins.kernels:
            assert equal(rows.last_cut(cut, of_greedy=of_greedy), expected)
    assert (expected == ABOVE_ALL)[~twins.numbers].all() or not len(plain.logits[0])
    before_last = cut >> (word.TOKEN_BITS + DIGIT_BITS)
    search = Search(before_last, torch.zeros_like(cut), torch.ones_like(cut))
    bins = torch.zeros(1, len(cut), DIGITS, dtype=torch.int64)
    bins[:, :, 0], ties, last = 5, torch.ones_like(cut), LastDigits(bins, 0, mass=False)
    found = cuts_of(plain).last_digit(search, last, ties)
    open_, closed = (share * torch.ones(len(cut)).double() for share in (1.0, 0.5))
    least = plain.last_cut(cut)
    assert (found > cut).any(), "the search ends later than the other rules"
    assert equal(cuts_of(plain).last_digit(search, last, ties, OtherEnds(cut, open_, None)), least)
    largest = plain.last_cut(cut.maximum(found))
    assert equal(
        cuts_of(plain).last_digit(search, last, ties, OtherEnds(cut, closed, None)), largest
    )
    assert equal(cuts_of(plain).last_digit(search, last, ties, OtherEnds(cut, None, None)), largest)


@pytest.mark.parametrize("number", [1, 20])
def test_a_list_ends_below_what_top_p_keeps(twins, number):
    """Its bound is one of the words of two ranks that hold the same."""
    plain, bins = twins.plain, 2 * cuts_of(twins.plain).sums_of_bins(twins.cut)[:, :BINS]
    total, bounded = bins.sum(dim=1), torch.zeros(len(bins), dtype=torch.bool)
    if not plain.logits.shape[1]:
        return
    for share in (1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-9, 1.0):
        shares = torch.full((len(bins),), share, dtype=torch.float64)
        end, room = cuts_of(plain).list_end(bins, total, shares, number)
        for rows in twins.kernels:
            assert all(map(equal, cuts_of(rows).list_end(bins, total, shares, number), (end, room)))
        listed = plain.count_from(end.unsqueeze(1))[:, 0]
        few = (room < ABOVE_ALL) & twins.numbers
        assert (2 * listed <= room)[few].all() and (2 * listed >= number)[few].all()
        limit, kept = mass_limit(total, shares), 2 * plain.mass_from(end)
        assert (kept >= limit.minimum(total))[few].all()
        assert (listed[~twins.numbers] >= 1).all() and (room[~twins.numbers] == 1).all()
        bounded |= few
    assert bounded.any() and not (room < ABOVE_ALL)[twins.numbers].any(), "a share of 1 keeps all"


@pytest.mark.parametrize("mass", [False, True])
def test_the_cut_in_a_bin(twins, mass):
    """Of limits at some tenths of the weight and beyond it, over two ranks with the same words, and
    with too little room."""
    plain, numbers = twins.plain, twins.numbers
    bins = 2 * cuts_of(plain).sums_of_bins(twins.cut if mass else None)[:, :BINS]
    weight, ties = bins.sum(dim=1), torch.arange(len(bins)) % 3 % 2
    for tenths in (0, 1, 5, 9, 10, 11):
        limit, share = (weight * tenths // 10 + (tenths != 10)).clamp(min=1), None
        if mass and tenths:
            limit, share = weight.long(), torch.full((len(bins),), tenths / 10).double()
        search = cuts_of(plain).bin_of(bins, limit, share)
        assert (search.prefix == BINS)[numbers].all() == (tenths >= 10 or not len(plain.logits[0]))
        words = cuts_of(plain).words_of_bin(search.prefix, len(plain.logits[0]) or 1)
        bound, both = cuts_of(plain).words_in_bin(bins, limit, share, mass=mass), 2 * words[:, 0]
        assert (both <= bound)[numbers].all() and (bound <= (1 + mass / 9) * both)[numbers].all()
        for rows in twins.kernels:
            its = cuts_of(rows).words_in_bin(bins, limit, share, mass=mass)
            assert equal(its[numbers], bound[numbers])
        listed = torch.stack([words, words])
        cut, left = cuts_of(plain).cut_of(search, listed, ties, mass=mass)
        assert not left.any()
        for rows in twins.kernels:
            its, own = cuts_of(rows).search_bins(bins, limit, words.shape[1] - 1, share)
            for name in ("reached", "limit"):
                assert equal(getattr(its, name)[numbers], getattr(search, name)[numbers]), name
            assert torch.equal(own.sort(dim=1).values[numbers], words.sort(dim=1).values[numbers])
            few = cuts_of(rows).search_bins(bins, limit, 3, share)[1][numbers]
            assert torch.equal(few[:, 0], words[numbers, 0])
            _is_some_of(few[:, 1:], words[numbers])
            of_one = torch.stack([words, torch.zeros_like(words)])
            for some, room in product((of_one, listed), (1, listed.shape[2] - 1)):
                its = some[:, :, : 1 + room], ties
                found, expected = (
                    cuts_of(each).cut_of(search, *its, mass=mass) for each in (rows, plain)
                )
                assert some is of_one or equal(found[0][numbers], expected[0][numbers])
                assert equal(found[1], expected[1])
            assert equal(found[0][numbers], cut[numbers])
            for of_greedy in (None, plain.first_words(1)[:, 0]):
                how = {"mass": mass, "least": twins.cut, "of_greedy": of_greedy}
                last, _ = cuts_of(rows).cut_of(search, listed, ties, **how)
                assert equal(last, plain.last_cut(twins.cut.maximum(cut), of_greedy=of_greedy))
    first = plain.first_words(3)
    gathered = torch.stack([first, first[:, [1, 0, 2]], torch.zeros_like(first)])
    words, top = plain.top_of(gathered)
    assert words.equal(first[:, 0]) and len(top) == len(first)
    for rows in twins.kernels:
        for its in (gathered, gathered[:, :, 1:]):
            found, expected = rows.top_of(its), plain.top_of(its)
            assert found[0].equal(expected[0])
            assert found[1].nan_to_num(7).equal(expected[1].nan_to_num(7))
