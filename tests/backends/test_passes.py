"""Each pass over stored logits: Triton and native kernels give the integers of their twins."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.support.filtered import Rows, V, grid, kinds_of_logits
from tests.support.tiers import long
from tests.support.tile_words import told
from tpsample import SampleOutput, SamplingBatch, SamplingParams, Status
from tpsample.backends import cuts_of
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.torch_.cuts import OtherEnds
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.triton_ import passes
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core import word
from tpsample.core.masses import TOP_MASS
from tpsample.core.order import ABOVE_ALL, BINS, DIGIT_BITS, Search, mass_limit
from tpsample.core.row_noise import RowNoise
from tpsample.core.spread import spread_of
from tpsample.filters.thresholds import thresholds_of
from tpsample.ranks.ranks import Ranks
from tpsample.request.row_filter import MAX_TOP_WORDS

# The interpreter computes with the NaN and infinities of these rows as a GPU does, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

COUNT = 4
# Ties and min_p last, which the ways of the kernels differ for.
MORE = [
    SamplingParams(top_k=40, top_p=0.6, min_p=0.3, filter_order="min_p_last", seed=1),
    SamplingParams(top_k=90, top_p=0.4, ties="keep", temperature=3.0, seed=2),
    SamplingParams(top_p=0.2, min_p=0.9, filter_order="min_p_last", ties="keep", seed=3),
]
# Whole; within one block, starting inside a group of four ids; one id; none.
SHARDS = [(0, V), (5, 777), (801, 802), (640, 640), (641, 641)]


class Twins:
    """The same rows for both, and what their filters are."""

    def __init__(
        self, first: int, last: int, num_samples: int = 1, params: Sequence[SamplingParams] = MORE
    ) -> None:
        kinds = kinds_of_logits()
        rows = Rows([kinds["normal"], kinds["two-valued"]], [*grid()[3::125], *params])
        batch = rows.batch
        logits = rows.logits[batch.plan.stored_index]
        logits[0, 17], logits[1, 90], logits[2] = math.nan, math.inf, -math.inf
        logits[3, 100:700], logits[4, :3], logits[4, 3:6] = -math.inf, -0.0, 0.0
        batch.temperature[5] = 0.0  # greedy by what was written, beside its filters
        noise = RowNoise(batch.temperature, batch.seed, rows.positions, num_samples)
        # In memory of their own. An empty shard owns none.
        own = logits[:, first:last].clone(memory_format=torch.contiguous_format)
        self.filters, self.logits = batch.plan.filters, own
        self.plain, self.triton, self.native = (
            replace(kind.of(self.logits, batch, noise, first_id=first), top=self.top)
            for kind in (ShardLogits, TritonShardLogits, NativeShardLogits)
        )
        self.kernels = self.triton, self.native
        self.thresholds = thresholds_of(self.plain, self.filters, Ranks())
        # Of a row with a NaN, or with nothing to draw, sums mean nothing.
        self.numbers = torch.arange(len(self.filters)) % len(self.filters) > 2
        self.numbers[1] = True

    @property
    def top(self) -> torch.Tensor:
        return self.logits.amax(dim=1) if self.logits.shape[1] else torch.zeros(len(self.logits))

    @property
    def cut(self) -> torch.Tensor:
        """An order word in the middle of each row."""
        return word.pack(self.logits.nanmean(dim=1).nan_to_num(), torch.tensor(self.plain.first_id))


def _told_if_triton(rows: ShardLogits) -> ShardLogits:
    return told(rows) if isinstance(rows, TritonShardLogits) else rows


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _near(
    rows: ShardLogits, found: torch.Tensor, sums: torch.Tensor, numbers: torch.Tensor
) -> bool:
    """Return whether the `before` of a kernel is that of the definition but for its error, and
    nothing where the largest logit is infinite, in rows that have a number."""
    if not rows.mass_error:
        return _equal(found[numbers], sums[numbers])
    there = rows.largest.isfinite() & numbers
    (mass, number, total), (its, counted, whole) = (
        each[there].tensor_split([sums.shape[1] // 2, sums.shape[1] - 1], dim=1)
        for each in (found, sums)
    )
    error = whole * rows.mass_error
    return bool(
        not found[numbers & ~there].any()
        and _equal(number, counted)
        and ((mass - its).abs() <= error).all()
        and ((total - whole).abs() <= error).all()
        and _equal(mass > 0, its > 0)
    )


def _unmasked(words: torch.Tensor) -> torch.Tensor:
    """Return words with 0 for masked tokens, whose words win against nothing."""
    return words * (word.key_of(words) > word.KEY_MINUS_INF)


@pytest.fixture(
    params=[SHARDS[1], SHARDS[3], *long((SHARDS[0],), (SHARDS[2],))],
    ids=lambda shard: f"{shard[0]}-{shard[1]}",
)
def twins(request) -> Twins:
    return Twins(*request.param)


@pytest.mark.parametrize("count", [1, 2, 9, 300, 1500])
def test_first_words_are_those_of_the_definition(twins, count):
    first = twins.plain.first_words(count)
    for rows in (*twins.kernels, told(twins.triton)):
        assert _equal(rows.first_words(count), first)
    ids = torch.arange(twins.plain.first_id, twins.plain.first_id + twins.logits.shape[1])
    ordered = word.pack(twins.logits, ids).sort(dim=1, descending=True).values[:, :count]
    assert torch.equal(first[:, : ordered.shape[1]], ordered)
    assert not first[:, ordered.shape[1] :].any()


@pytest.mark.parametrize(
    ("shard", "num_samples"),
    [
        (SHARDS[1], 1),
        (SHARDS[2], 2),
        *long((SHARDS[0], 1), (SHARDS[3], 1), (SHARDS[2], 1), (SHARDS[1], 2)),
    ],
)
def test_a_rejection_decides_what_the_definition_does(shard, num_samples):
    """With two ranks that hold the same."""
    twins = Twins(*shard, num_samples)
    plain, filters = twins.plain, twins.thresholds
    best = plain.best_scores(COUNT)
    for rows in twins.kernels:
        found = _told_if_triton(rows).best_scores(COUNT)
        assert _equal(_unmasked(found), _unmasked(best))
    other = best.clone()
    other -= 2048 * (other > 0)  # of other ids
    gathered = torch.stack([best, other])
    every = plain.merged(gathered, COUNT)
    for rows in twins.kernels:
        assert _equal(_unmasked(rows.merged(gathered, COUNT)), _unmasked(every))
    sums, marks = plain.before(every, filters, COUNT), num_samples * COUNT
    for rows in twins.kernels:
        assert _near(rows, rows.before(every, filters, COUNT), sums, twins.numbers)
    # As many before as top_k allows; as much mass as top_p allows, and one less; as they are.
    at_top_k, at_top_p = sums.clone(), sums.clone()
    at_top_k[:, marks : 2 * marks] = filters.most.unsqueeze(1)
    at_top_p[:, :marks] = mass_limit(sums[:, -1:], filters.share.unsqueeze(1))
    below_top_p = at_top_p - (torch.arange(2 * marks + 1) < marks).long()
    decides = plain._orders(every, COUNT) > 0
    dropped = sums.clone()  # but for those that decide nothing
    dropped[:, :marks] = at_top_p[:, :marks] * decides
    some = []
    for edge in (at_top_k, at_top_p, below_top_p, dropped, sums):
        words, decided, _ = plain.first_kept(every, edge, filters, COUNT)
        some += decided.tolist()
        for rows in twins.kernels:
            error = (edge[:, -1:] * rows.mass_error).ceil().long() * (edge[:, :marks] > 0)
            for times in (-1, 0, 1, 2):
                moved = edge.clone()
                moved[:, :marks] += times * error
                found, sure, top = rows.first_kept(every, moved, filters, COUNT)
                right = ShardLogits.first_kept(rows, every, moved, filters, COUNT)
                assert _equal(found, right.words) and _equal(sure, right.decided)
                assert _equal(top.nan_to_num(), right.top.nan_to_num())
                if times < 2:
                    masses = edge[:, :marks]  # before a token is the first, if any
                    there = ((masses == 0) | (masses >= TOP_MASS)).all(dim=1)
                    sure &= twins.numbers & there
                    assert words[sure].equal(found[sure]), "an error decides nothing"
    # An empty shard has nothing to draw, which is decided.
    assert set(some) == ({True} if shard[0] == shard[1] else {False, True})


def test_best_scores_among_more_groups_than_their_kernel_takes(monkeypatch):
    twins = Twins(*SHARDS[1], num_samples=2)
    rows = _told_if_triton(twins.triton)
    best = rows.best_scores(COUNT)
    monkeypatch.setattr(passes, "MOST_GROUPS", 2)
    assert _equal(rows.best_scores(COUNT), best)
    assert _equal(_unmasked(best), _unmasked(twins.plain.best_scores(COUNT)))


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("shard", SHARDS[:2])
def test_draws_of_top_words_are_those_of_the_definition(shard, num_samples):
    twins = Twins(*shard, num_samples)
    first = twins.plain.first_words(MAX_TOP_WORDS)
    words = twins.plain.best_of_first(first, twins.thresholds)
    for rows in twins.kernels:
        assert _equal(rows.best_of_first(first, twins.thresholds), words)
    assert words.shape[1] == num_samples and (words > 0).any(dim=0).all()


@pytest.mark.parametrize("count", [1, 9, MAX_TOP_WORDS, 300])
def test_what_is_kept_of_first_words(twins, count):
    """The last word that is kept, mass and number down to it; nothing of a row with a NaN."""
    first = twins.plain.first_words(count)
    ones = torch.ones_like(twins.cut)
    open_ = {"most": count * ones, "share": ones.double(), "least": word.LOWEST_DRAWABLE * ones}
    totals = (10**12 * ones).where(ones.cumsum(dim=0) % 3 > 0, -1)  # of every third its own
    given = twins.thresholds._replace(total=totals)
    for thresholds in (twins.thresholds, given, twins.thresholds._replace(**open_)):
        words, cut, held, top, drawn = twins.plain.set_of_first(first, thresholds)
        for rows in twins.kernels:
            found = rows.set_of_first(first, thresholds)
            assert all(map(_equal, (*found[:3], found.drawn), (words, cut, held, drawn)))
            assert _equal(found.top.nan_to_num(), top.nan_to_num())
        ids, names = word.token_of(drawn), word.decode(words)[0]
        assert ids[drawn > 0].equal(names[drawn > 0]) and (names >= 0).equal(drawn > 0)
        assert words.equal(twins.plain.best_of_first(first, thresholds))
        mass, number = held.unbind(dim=1)
        random = twins.plain.noise.random.squeeze(1)
        assert number[random].equal((first >= cut.unsqueeze(1)).sum(dim=1)[random])
        without = first[:, 0] * (word.key_of(first[:, 0]) != word.KEY_NAN) < word.LOWEST_DRAWABLE
        assert (cut[without] == ABOVE_ALL).all() and not mass[without].any()
    if len(twins.logits[0]):
        assert without.any() and (first == cut.unsqueeze(1)).any(dim=1)[~without].all()


@pytest.mark.parametrize(("order", "left"), [("sequential", {0}), ("min_p_last", {0, 1})])
def test_what_min_p_cuts_last_is_of_the_mass_of_the_top_words(order, left):
    """Before the second token stands 0.4: over half of what min_p leaves, under that of top_k."""
    changes = {"top_k": 3, "top_p": 0.5, "min_p": 0.7, "filter_order": order}
    params = [SamplingParams(**changes, seed=seed) for seed in range(12)]
    rows = Rows([torch.tensor([0.4, 0.3, 0.2, 0.1]).log()], params)
    batch = rows.batch
    noise = RowNoise(batch.temperature, batch.seed, rows.positions, 1)
    for kind in (ShardLogits, TritonShardLogits):
        stored = kind.of(rows.logits, batch, noise)
        stored = replace(stored, top=rows.logits.amax(dim=1))
        thresholds = thresholds_of(stored, batch.plan.filters, Ranks())
        words = stored.best_of_first(stored.first_words(3), thresholds)
        assert set(word.token_of(words).flatten().tolist()) == left


def test_least_words():
    """Also of a row with a NaN, a forced token, or nothing to draw."""
    twins = Twins(0, V)
    log_min_p, temperature = twins.filters.column("min_p"), twins.plain.temperature
    for y in (log_min_p, torch.full_like(log_min_p, -0.125)):
        cut = twins.plain.least_word(y, temperature)
        assert _equal(twins.triton.least_word(y, temperature), cut)
        kept = twins.plain.words_of(torch.arange(V).expand(len(cut), -1)) >= cut.unsqueeze(1)
        assert kept.any(dim=1)[twins.numbers].all() and not kept[0].any() and not kept[2].any()


@pytest.mark.parametrize("limit", [1, 2**20, 2**37, 2**40, 2**40 + 1])
def test_least_words_of_masses(twins, limit):
    limits = torch.full((len(twins.filters),), limit)
    least = twins.plain.least_of_mass(limits)
    for rows in twins.kernels:
        assert _equal(rows.least_of_mass(limits)[twins.numbers], least[twins.numbers])
    if limit > 2**40:
        assert (least == ABOVE_ALL).all()


def test_spreads_are_those_of_the_definition(twins):
    """Of finite rows by hand, and of masked, far and infinite logits by their twins."""
    twins.logits[5:6, :2], twins.logits[6:7, 3:4] = -3e38, -4095.99
    sums = twins.plain.spread()
    for rows in twins.kernels:
        assert _equal(rows.spread()[twins.numbers], sums[twins.numbers])
    if len(twins.logits[0]) > 1:
        exact = twins.logits.double().std(dim=1, correction=0)
        assert torch.allclose(spread_of(sums)[7:], exact[7:], rtol=1e-5, atol=0)


def test_sums_down_to_a_word(twins):
    plain, cut, numbers = twins.plain, twins.cut, twins.numbers
    sums = plain.moment_from(cut)
    some = plain.first_words(1).squeeze(1)  # a mark that is a word itself
    marks = torch.stack([cut, cut + (5 << word.TOKEN_BITS), torch.zeros_like(cut), some], dim=1)
    for rows in twins.kernels:
        assert _equal(rows.best_kept(cut), plain.best_kept(cut))
        assert _equal(_unmasked(rows.best_kept(some)), _unmasked(plain.best_kept(some)))
        assert _equal(rows.best_and_mass(cut)[numbers], plain.best_and_mass(cut)[numbers])
        assert _equal(rows.best_and_mass(cut)[:, :-2], plain.best_kept(cut))
        assert _equal(rows.mass_from(cut)[numbers], sums[numbers, 0])
        assert _equal(rows.held_from(cut)[numbers], plain.held_from(cut)[numbers])
        assert _equal(rows.weigh(cut, marks)[numbers], plain.weigh(cut, marks)[numbers])
        for ends in (cut, some):
            most = int(plain.count_from(ends.unsqueeze(1)).max())
            assert _equal(
                cuts_of(rows).words_from(ends, most), cuts_of(plain).words_from(ends, most)
            )


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
    for shift in range(word.EPOCH_SHIFT // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS):
        bins = cuts_of(plain).digits(search.prefix, shift, mass=mass)
        found = bins[numbers].sum(dim=1) > 0
        assert (found == (plain.logits.shape[1] > 0)).all(), "each prefix begins some word"
        following = cuts_of(plain).next_digit(search, bins)
        for each in twins.kernels:
            assert _equal(
                cuts_of(each).digits(search.prefix, shift, mass=mass)[numbers], bins[numbers]
            )
            for ends in [None, *others]:
                found, expected = (
                    cuts_of(rows).last_digit(search, bins, ties, ends) for rows in (each, plain)
                )
                assert _equal(found, expected)
            for share in (None, shares)[: 1 + mass]:
                if former is not None:
                    given = before, former, shift, share
                    found, own = cuts_of(each).following_digits(*given, mass=mass)
                    expected, right = cuts_of(plain).following_digits(*given, mass=mass)
                    assert _equal(own[numbers], right[numbers])
                    for name in names:
                        assert _equal(getattr(found, name), getattr(expected, name))
        before, former, search = search, bins, following
    for cut in (search.prefix, torch.zeros_like(limit)):
        for each in twins.kernels:
            assert _equal(each.mass_from(cut)[numbers], plain.mass_from(cut)[numbers])


@pytest.mark.parametrize("mass", [False, True])
def test_a_first_digit_has_no_words_below_a_least_one(twins, mass):
    """Its sum is then the total that a top_p takes a share of."""
    least, prefix = twins.cut, torch.zeros_like(twins.cut)
    bins = cuts_of(twins.plain).digits(prefix, 45, mass=mass, least=least)[twins.numbers]
    total = twins.plain.held_from(least)[twins.numbers, 0 if mass else 1]
    assert (torch.equal(bins.sum(dim=1), total) and len(twins.logits[0]) == 0) or total.any()
    assert not torch.equal(
        bins, cuts_of(twins.plain).digits(prefix, 45, mass=mass)[twins.numbers]
    ) or (len(twins.logits[0]) < 2)
    for rows in twins.kernels:
        assert _equal(cuts_of(rows).digits(prefix, 45, mass=mass, least=least)[twins.numbers], bins)


def test_only_best_scores_that_can_decide_are_weighed(twins):
    """A token decides nothing if one with a better score comes before it in the order."""
    plain, triton, numbers = twins.plain, twins.triton, twins.numbers
    best = plain.best_scores(COUNT)
    orders = best[:, 1 + COUNT :]
    decides = torch.zeros_like(orders, dtype=torch.bool)
    for row, of_row in enumerate(orders.tolist()):
        for c, order in enumerate(of_row):
            decides[row, c] = order > 0 and all(order > better for better in of_row[:c])
    assert torch.equal(plain._orders(best, COUNT), orders * decides)
    assert 0 < decides[:, 1:].sum() < decides[:, 1:].numel() or plain.logits.shape[1] < 2
    masses = triton.before(best, twins.thresholds, COUNT)[:, :COUNT]
    assert not masses[numbers][~decides[numbers]].any()


@pytest.mark.parametrize("each", [1, 3])
def test_programs_of_several_blocks(each, monkeypatch):
    """They find what blocks find one by one, of equal logits and scores that of the lowest id."""
    twins = Twins(*SHARDS[1], num_samples=2)
    twins.logits[5, [70, 70 + 256, 70 + 512]] = 1e4  # of a greedy row, at the same place
    plain, triton = (replace(rows, top=twins.top) for rows in (twins.plain, twins.triton))
    monkeypatch.setattr(passes, "BLOCK", 256)
    monkeypatch.setattr(TritonShardLogits, "blocks_each", lambda *_: each)
    best, cut = plain.best_scores(COUNT), twins.cut
    filters, marks = twins.thresholds, best[:, 1 + 2 * COUNT :]
    for method, *arguments in (
        ("before", best, filters, COUNT),
        ("best_and_mass", cut),
        ("weigh", cut, marks),
        ("words_from", cut, 777),
    ):
        twin_rows = map(cuts_of, (triton, plain)) if method == "words_from" else (triton, plain)
        found, right = (getattr(rows, method)(*arguments) for rows in twin_rows)
        if method == "before":
            assert _near(triton, found, right, twins.numbers)
        else:
            assert _equal(found[twins.numbers], right[twins.numbers]), method
    for mass in (False, True):
        found, right = (
            cuts_of(rows).digits(torch.zeros_like(cut), 45, mass=mass) for rows in (triton, plain)
        )
        assert _equal(found[twins.numbers], right[twins.numbers]), "digits"


def test_rows_that_are_done_are_left_out():
    """Zeros in their place, and what the others had before."""
    twins = Twins(*SHARDS[1], num_samples=2)
    done = torch.arange(len(twins.filters)) % 3 == 0
    best = twins.plain.best_scores(COUNT)
    prefix, filters = torch.zeros_like(twins.cut), twins.thresholds
    second = (
        Search(prefix, prefix, filters.most),
        cuts_of(twins.plain).digits(prefix, 45, mass=False),
        36,
    )

    def passes(rows: ShardLogits) -> dict[str, torch.Tensor]:
        return {
            "first_words": rows.first_words(2),
            "first_words of tiles": _told_if_triton(rows).first_words(2),
            "first_words, whole rows": rows.first_words(300),
            "best_scores": _told_if_triton(rows).best_scores(COUNT),
            "before": rows.before(best, filters, COUNT),
            "masses by digit": cuts_of(rows).digits(prefix, 48, mass=True),
            "numbers by digit": cuts_of(rows).digits(prefix, 48, mass=False),
            "numbers by the second digit": cuts_of(rows).following_digits(*second, mass=False)[1],
            "best_kept": rows.best_kept(twins.cut),
            "best_and_mass": rows.best_and_mass(twins.cut),
        }

    whole = passes(twins.plain)
    left_out = [passes(rows.without(done)) for rows in (twins.plain, *twins.kernels)]
    for name, found in whole.items():
        assert found[done].any(), f"{name}: a row that is not left out has something"
        expected = found.masked_fill(done.view(-1, *[1] * (found.dim() - 1)), 0)
        for kind, rows in zip((twins.plain, *twins.kernels), left_out, strict=True):
            numbers = twins.numbers | done
            if name == "before":
                assert _near(kind, rows[name], expected, numbers)
            else:
                assert _equal(rows[name][numbers], expected[numbers]), name
    some = twins.plain.without(done).select(torch.tensor([0, 1, 4]))
    some = some.without(torch.tensor([False, True, False]))
    assert some.done.tolist() == [True, True, False]


@pytest.mark.parametrize("num_samples", [None, 2])
def test_rows_are_settled_as_by_the_definition(num_samples):
    twins = Twins(0, V)
    pick = [int(twins.cut[5]), word.KEY_NAN << word.TOKEN_BITS, 0, int(twins.cut[6])]
    words = torch.tensor(pick).unsqueeze(1).repeat(1, num_samples or 1)
    index = torch.tensor([4, 0, 2, 5])
    outs = []
    for rows in (twins.plain, twins.triton):
        out = SampleOutput.empty(torch.zeros(6, dtype=torch.int64), num_samples)
        out.token_ids.fill_(77)
        out.status.copy_(torch.tensor([0, 1, 0, 3, 0, 3]))
        rows.write_tokens(words, index, out)
        outs.append(out)
    plain, triton = outs
    assert _equal(triton.token_ids, plain.token_ids) and _equal(triton.status, plain.status)
    assert plain.status.tolist() == [Status.NAN, 1, Status.EMPTY, 3, Status.OK, Status.PEER_LOST]
    tokens = plain.token_ids.view(6, -1)[:, -1].tolist()
    assert tokens == [-1, 77, -1, 77, int(word.token_of(words[0, 0])), -1]


@pytest.mark.parametrize("first", [640, 641])
def test_an_empty_shard_has_no_group_that_nobody_writes(first):
    """A group was counted for the ids before 641, and its words were those of the memory."""
    twins = Twins(first, first)
    assert twins.triton.count_of(1024) == twins.triton.count_of(4) == 0
    assert torch.equal(twins.triton.best_scores(COUNT), twins.plain.best_scores(COUNT))
    assert torch.equal(twins.triton.first_words(COUNT), twins.plain.first_words(COUNT))


def _is_some_of(words: torch.Tensor, every: torch.Tensor) -> None:
    """Rows [F, n] list n of the words that stand behind their number in another list, or all."""
    assert ((words > 0).sum(dim=1) == every[:, 0].clamp(max=words.shape[1])).all()
    for its, of in zip(words.tolist(), every[:, 1:].tolist(), strict=True):
        assert set(its) <= {0, *of}


def _bins(rows: ShardLogits, cut: torch.Tensor | None) -> torch.Tensor:
    return cuts_of(rows).numbers_of_bins() if cut is None else cuts_of(rows).masses_of_bins(cut)


@pytest.mark.parametrize("mass", [False, True])
def test_bins_and_their_words(twins, mass):
    """Histograms by their twins, and the words of some bins, cut short where they are too many."""
    plain, numbers = twins.plain, twins.numbers
    middle = twins.cut
    lowest = torch.full_like(middle, word.LOWEST_DRAWABLE)
    for cut in (middle, lowest) if mass else (None,):
        bins = _bins(plain, cut)
        assert all(_equal(_bins(rows, cut)[numbers], bins[numbers]) for rows in twins.kernels)
        expected = (plain.logits > -torch.inf).sum(dim=1) if cut is None else bins[:, BINS]
        if cut is not middle:
            assert torch.equal(bins[:, :BINS].sum(dim=1)[numbers], expected[numbers])
        else:
            assert torch.equal(expected[numbers], plain.mass_from(cut)[numbers])
    fullest = cuts_of(plain).numbers_of_bins().argmax(dim=1)
    for wanted in (fullest, torch.zeros_like(fullest), torch.full_like(fullest, BINS - 1)):
        every = cuts_of(plain).words_of_bin(wanted, max(1, plain.logits.shape[1]))
        found = cuts_of(twins.native).words_of_bin(wanted, every.shape[1] - 1)
        assert torch.equal(found.sort(dim=1).values[numbers], every.sort(dim=1).values[numbers])
        few = cuts_of(twins.native).words_of_bin(wanted, 3)[numbers]
        assert torch.equal(few[:, 0], every[numbers, 0])
        _is_some_of(few[:, 1:], every[numbers])


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
        found = cuts_of(twins.native).reached_at(search, words, mass=mass)
        assert _equal(found[numbers], cut[numbers])


def test_sets_one_behind_the_other(twins):
    """With none in some rows, and room behind the last."""
    plain, numbers = twins.plain, twins.numbers
    words = plain.first_words(9) * (torch.arange(9) < torch.arange(len(twins.cut)).unsqueeze(1) % 8)
    words *= numbers.unsqueeze(1)
    cut = words.masked_fill(words == 0, ABOVE_ALL).amin(dim=1)
    own = plain.held_from(cut)[None]
    sets = cuts_of(plain).set_sizes(own, cut, cap=8)
    total = int(sets.needed[2]) + 3
    ids, log_masses = cuts_of(plain).listed_sets(words, sets, total)
    assert ids[-3:].tolist() == [-1] * 3 and log_masses[-3:].isnan().all()
    words = plain.first_words(9)  # more than the sets have
    for rows in twins.kernels:
        found = cuts_of(rows).listed_sets(words, sets, total)
        assert _equal(found[0], ids)
        assert found[1].view(torch.int64)[:-3].equal(log_masses.view(torch.int64)[:-3])
        assert found[1][-3:].isnan().all()


@pytest.mark.parametrize("drawn", [False, True])
def test_which_sets_are_listed(twins, drawn):
    """Of two ranks with the same words: all, none, one and some tokens, and greedy rows."""
    plain, cut, width = twins.plain, twins.cut.clone(), twins.plain.logits.shape[1]
    there = torch.arange(len(cut)) % 5 != 0 if drawn else None
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
                assert _equal(getattr(found, name), value), name


def test_sets_of_more_rows_than_one_block():
    """Of three ranks whose parts differ, greedy rows among them."""
    generator = torch.Generator().manual_seed(0)
    gathered = torch.randint(0, 40, (3, 600, 2), generator=generator)
    gathered[:, 5, 1] = torch.tensor([50, 1, 2])  # the most that one rank has
    cut = torch.where(torch.arange(600) % 11 < 2, ABOVE_ALL, 1)
    temperature, logits = torch.arange(600).remainder(7).float(), torch.zeros(600, 4)
    noise = RowNoise(temperature, torch.arange(600), torch.arange(600), 1)
    plain, triton = (
        kind(logits, logits, 0, 90, kind.temperature_of(noise), noise)
        for kind in (ShardLogits, TritonShardLogits)
    )
    expected = cuts_of(plain).set_sizes(gathered, cut, cap=60)
    for name, value in cuts_of(triton).set_sizes(gathered, cut, cap=60)._asdict().items():
        assert _equal(value, getattr(expected, name)), name
    assert expected.overflow.any() and not expected.overflow.all()


def test_the_last_cut_of_several(twins):
    """Greedy rows and rows without a number go their own way, and a share of 1 cuts nothing."""
    plain, cut = twins.plain, twins.cut
    for of_greedy in (None, plain.first_words(1)[:, 0]):
        expected = plain.last_cut(cut, of_greedy=of_greedy)
        for rows in twins.kernels:
            assert _equal(rows.last_cut(cut, of_greedy=of_greedy), expected)
    assert (expected == ABOVE_ALL)[~twins.numbers].all() or not len(plain.logits[0])
    search = Search(cut >> DIGIT_BITS, torch.zeros_like(cut), torch.ones_like(cut))
    bins = torch.zeros(len(cut), 1 << DIGIT_BITS, dtype=torch.int64)
    bins[:, 1], ties = 5, torch.zeros_like(cut)
    found = cuts_of(plain).last_digit(search, bins, ties)
    open_, closed = (share * torch.ones(len(cut)).double() for share in (1.0, 0.5))
    least = plain.last_cut(cut)
    assert (found > cut).any(), "the search ends later than the other rules"
    assert _equal(cuts_of(plain).last_digit(search, bins, ties, OtherEnds(cut, open_, None)), least)
    largest = plain.last_cut(cut.maximum(found))
    assert _equal(
        cuts_of(plain).last_digit(search, bins, ties, OtherEnds(cut, closed, None)), largest
    )
    assert _equal(
        cuts_of(plain).last_digit(search, bins, ties, OtherEnds(cut, None, None)), largest
    )


@pytest.mark.parametrize("number", [1, 20])
def test_a_list_ends_below_what_top_p_keeps(twins, number):
    """Its bound is one of the words of two ranks that hold the same."""
    plain, bins = twins.plain, 2 * cuts_of(twins.plain).masses_of_bins(twins.cut)[:, :BINS]
    total, bounded = bins.sum(dim=1), torch.zeros(len(bins), dtype=torch.bool)
    if not plain.logits.shape[1]:
        return
    for share in (1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-9, 1.0):
        shares = torch.full((len(bins),), share, dtype=torch.float64)
        end, room = cuts_of(plain).list_end(bins, total, shares, number)
        for rows in twins.kernels:
            assert all(
                map(_equal, cuts_of(rows).list_end(bins, total, shares, number), (end, room))
            )
        listed = plain.count_from(end.unsqueeze(1))[:, 0]
        few = (room < ABOVE_ALL) & twins.numbers
        assert (2 * listed <= room)[few].all() and (2 * listed >= number)[few].all()
        limit, kept = mass_limit(total, shares), 2 * plain.mass_from(end)
        assert (kept >= limit.minimum(total))[few].all()
        assert (listed[~twins.numbers] >= 1).all() and (room[~twins.numbers] == 1).all()
        bounded |= few
    assert bounded.any() and not (room < ABOVE_ALL)[twins.numbers].any(), "a share of 1 keeps all"


@pytest.mark.parametrize("top", [0, 5])
def test_sums_of_logprobs_from_first_words(twins, top):
    """They are those of all logits, if the first words hold the kept set."""
    plain, count = twins.plain, min(300, twins.logits.shape[1])
    if not count:
        return
    first, rows = plain.first_words(count), len(plain.logits)
    drawn = first[:, [0, count // 3, count - 1]]
    drawn[1] = 0  # of a row without a token
    requests = [SamplingParams(logprobs=top, logprobs_mode="processed_logits", seed=1)] * rows
    asked = SamplingBatch.from_params(requests, vocab_size=plain.vocab_size).plan.logprobs
    cut = first[torch.arange(rows), torch.arange(rows) * 41 % count]
    words, sums = plain.weighed_words(asked, first, drawn, cut)
    marks = words.marks.maximum(cut.unsqueeze(1))
    expected = replace(plain, top=words.top).weigh(cut, marks)
    assert _equal(sums[twins.numbers], expected[twins.numbers])
    for own in twins.kernels:
        its, found = own.weighed_words(asked, first, drawn, cut)
        assert _equal(found[twins.numbers], sums[twins.numbers])
        assert _equal(its.first, words.first) and _equal(its.own, words.own)
        assert _equal(its.temperature, words.temperature)
        assert _equal(its.top.nan_to_num(), words.top.nan_to_num())


@pytest.mark.parametrize("mass", [False, True])
def test_the_cut_in_a_bin(twins, mass):
    """Of limits at each tenth of the weight and beyond it, over two ranks with the same words, and
    with too little room."""
    plain, numbers = twins.plain, twins.numbers
    bins = 2 * _bins(plain, twins.cut if mass else None)[:, :BINS]
    weight, ties = bins.sum(dim=1), torch.arange(len(bins)) % 3 % 2
    for tenths in range(12):
        limit, share = 1 + weight * tenths // 10, None
        if mass and tenths:
            limit, share = weight.long(), torch.full((len(bins),), tenths / 10).double()
        search = cuts_of(plain).bin_of(bins, limit, share)
        assert (search.prefix == BINS)[numbers].all() == (tenths >= 10 or not len(plain.logits[0]))
        words = cuts_of(plain).words_of_bin(search.prefix, len(plain.logits[0]) or 1)
        listed = torch.stack([words, words])
        cut, left = cuts_of(plain).cut_of(search, listed, ties, mass=mass)
        assert not left.any()
        for rows in twins.kernels:
            its, own = cuts_of(rows).search_bins(bins, limit, words.shape[1] - 1, share)
            for name in ("reached", "limit"):
                assert _equal(getattr(its, name)[numbers], getattr(search, name)[numbers]), name
            assert torch.equal(own.sort(dim=1).values[numbers], words.sort(dim=1).values[numbers])
            few = cuts_of(rows).search_bins(bins, limit, 3, share)[1][numbers]
            assert torch.equal(few[:, 0], words[numbers, 0])
            _is_some_of(few[:, 1:], words[numbers])
            for room in (1, listed.shape[2] - 1):
                its = listed[:, :, : 1 + room], ties
                found, expected = (
                    cuts_of(each).cut_of(search, *its, mass=mass) for each in (rows, plain)
                )
                assert _equal(found[0][numbers], expected[0][numbers])
                assert _equal(found[1], expected[1])
            assert _equal(found[0][numbers], cut[numbers])
            for of_greedy in (None, plain.first_words(1)[:, 0]):
                how = {"mass": mass, "least": twins.cut, "of_greedy": of_greedy}
                last, _ = cuts_of(rows).cut_of(search, listed, ties, **how)
                assert _equal(last, plain.last_cut(twins.cut.maximum(cut), of_greedy=of_greedy))
        first = plain.first_words(3)
        gathered = torch.stack([first, first[:, [1, 0, 2]], torch.zeros_like(first)])
        words, top = plain.top_of(gathered)
        assert words.equal(first[:, 0]) and len(top) == len(first)
        for rows in twins.kernels:
            for its in (gathered, gathered[:, :, 1:]):
                found, expected = rows.top_of(its), plain.top_of(its)
                assert found[0].equal(expected[0])
                assert found[1].nan_to_num(7).equal(expected[1].nan_to_num(7))
