"""Each pass over stored logits: Triton and native kernels give the integers of their twins."""

from dataclasses import replace
from inspect import isfunction

import pytest
import torch

from tests.support.filtered import Rows, V
from tests.support.tiers import long
from tests.support.tile_words import told
from tests.support.twins import SHARDS, Twins, equal
from tpsample import SamplingBatch, SamplingParams, reference
from tpsample.backends import cuts_of
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.triton_ import passes
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core import word
from tpsample.core.masses import TOP_MASS
from tpsample.core.order import ABOVE_ALL, Search, mass_limit, order_words
from tpsample.core.row_noise import RowNoise
from tpsample.core.rules import FilteredRows
from tpsample.core.spread import spread_of
from tpsample.filters.thresholds import _OverRanks, thresholds_of
from tpsample.ranks.ranks import Ranks
from tpsample.request.row_filter import MAX_TOP_WORDS

# The interpreter computes with the NaN and infinities of these rows as a GPU does, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

COUNT = 4


def _told_if_triton(rows: ShardLogits) -> ShardLogits:
    return told(rows) if isinstance(rows, TritonShardLogits) else rows


def _near(
    rows: ShardLogits, found: torch.Tensor, sums: torch.Tensor, numbers: torch.Tensor
) -> bool:
    """Return whether the `before` of a kernel is that of the definition but for its error, in rows
    that have a number. Where the largest logit is infinite it must be nothing."""
    if not rows.mass_error:
        return equal(found[numbers], sums[numbers])
    there = rows.largest.isfinite() & numbers
    (mass, number, total), (its, counted, whole) = (
        each[there].tensor_split([sums.shape[1] // 2, sums.shape[1] - 1], dim=1)
        for each in (found, sums)
    )
    error = whole * rows.mass_error
    return bool(
        not found[numbers & ~there].any()
        and equal(number, counted)
        and ((mass - its).abs() <= error).all()
        and ((total - whole).abs() <= error).all()
        and equal(mass > 0, its > 0)
    )


def _unmasked(words: torch.Tensor) -> torch.Tensor:
    """Return words with 0 for masked tokens, whose words win against nothing."""
    return words * (word.key_of(words) > word.KEY_MINUS_INF)


@pytest.mark.parametrize("count", [1, 2, 9, 300, 1500])
def test_first_words_are_those_of_the_definition(twins, count):
    first = twins.plain.first_words(count)
    for rows in (*twins.kernels, told(twins.triton)):
        assert equal(rows.first_words(count), first)
    ids = torch.arange(twins.plain.first_id, twins.plain.first_id + twins.logits.shape[1])
    ordered = word.pack(twins.logits, ids).sort(dim=1, descending=True).values[:, :count]
    assert torch.equal(first[:, : ordered.shape[1]], ordered)
    assert not first[:, ordered.shape[1] :].any()


def test_a_group_that_is_not_chosen_lists_nothing_where_its_word_has_an_id():
    """A word of 0 is that of the last id of the largest vocabulary, which a shard may hold."""
    twins = Twins(*SHARDS[1])
    first_id = word.MAX_VOCAB_SIZE - twins.logits.shape[1]
    done = torch.arange(len(twins.logits)) % 2 == 0
    plain, triton = (
        replace(rows, first_id=first_id, done=done) for rows in (twins.plain, twins.triton)
    )
    for count in (9, 300):
        assert equal(triton.first_words(count), plain.first_words(count))
    assert not told(triton).best_scores(COUNT)[done].any()


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
        assert equal(_unmasked(found), _unmasked(best))
    other = best.clone()
    other -= 2048 * (other > 0)  # of other ids
    gathered = torch.stack([best, other])
    every = plain.merged(gathered, COUNT)
    for rows in twins.kernels:
        assert equal(_unmasked(rows.merged(gathered, COUNT)), _unmasked(every))
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
                assert equal(found, right.words) and equal(sure, right.decided)
                assert equal(top.nan_to_num(), right.top.nan_to_num())
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
    assert equal(rows.best_scores(COUNT), best)
    assert equal(_unmasked(best), _unmasked(twins.plain.best_scores(COUNT)))


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("shard", SHARDS[:2])
def test_draws_of_top_words_are_those_of_the_definition(shard, num_samples):
    twins = Twins(*shard, num_samples)
    first = twins.plain.first_words(MAX_TOP_WORDS)
    words = twins.plain.best_of_first(first, twins.thresholds)
    for rows in twins.kernels:
        assert equal(rows.best_of_first(first, twins.thresholds), words)
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
            assert all(map(equal, (*found[:3], found.drawn), (words, cut, held, drawn)))
            assert equal(found.top.nan_to_num(), top.nan_to_num())
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
    for y in (log_min_p, torch.full_like(log_min_p, -0.125), torch.full_like(log_min_p, -0.1)):
        cut = twins.plain.least_word(y, temperature)
        assert all(equal(rows.least_word(y, temperature), cut) for rows in twins.kernels)
        kept = twins.plain.words_of(torch.arange(V).expand(len(cut), -1)) >= cut.unsqueeze(1)
        assert kept.any(dim=1)[twins.numbers].all() and not kept[0].any() and not kept[2].any()


@pytest.mark.parametrize("limit", [1, 2**20, 2**37, 2**40, 2**40 + 1])
def test_least_words_of_masses(twins, limit):
    limits = torch.full((len(twins.filters),), limit)
    least = twins.plain.least_of_mass(limits)
    for rows in twins.kernels:
        assert equal(rows.least_of_mass(limits)[twins.numbers], least[twins.numbers])
    if limit > 2**40:
        assert (least == ABOVE_ALL).all()


def test_spreads_are_those_of_the_definition(twins):
    """Of finite rows by hand, and of masked, far and infinite logits by their twins."""
    twins.logits[5:6, :2], twins.logits[6:7, 3:4] = -3e38, -4095.99
    sums = twins.plain.spread()
    for rows in twins.kernels:
        assert equal(rows.spread()[twins.numbers], sums[twins.numbers])
    if len(twins.logits[0]) > 1:
        exact = twins.logits.double().std(dim=1, correction=0)
        assert torch.allclose(spread_of(sums)[7:], exact[7:], rtol=1e-5, atol=0)


def test_sums_down_to_a_word(twins):
    plain, cut, numbers = twins.plain, twins.cut, twins.numbers
    sums = plain.weigh(cut)
    some = plain.first_words(1).squeeze(1)  # a mark that is a word itself
    marks = torch.stack([cut, cut + (5 << word.TOKEN_BITS), torch.zeros_like(cut), some], dim=1)
    for rows in twins.kernels:
        assert equal(rows.best_kept(cut), plain.best_kept(cut))
        assert equal(_unmasked(rows.best_kept(some)), _unmasked(plain.best_kept(some)))
        assert equal(rows.best_and_mass(cut)[numbers], plain.best_and_mass(cut)[numbers])
        assert equal(rows.best_and_mass(cut)[:, :-2], plain.best_kept(cut))
        assert equal(rows.mass_from(cut)[numbers], sums[numbers, 0])
        assert equal(rows.held_from(cut)[numbers], plain.held_from(cut)[numbers])
        assert equal(rows.weigh(cut, marks)[numbers], plain.weigh(cut, marks)[numbers])
        for ends in (cut, some):
            most = int(plain.count_from(ends.unsqueeze(1)).max())
            assert equal(
                cuts_of(rows).words_from(ends, most), cuts_of(plain).words_from(ends, most)
            )


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
    greedy = twins.plain.noise.temperature.argmin()
    twins.logits[greedy, [70, 70 + 256, 70 + 512]] = 1e4  # at the same place of three blocks
    plain, triton = (replace(rows, top=twins.top) for rows in (twins.plain, twins.triton))
    monkeypatch.setattr(passes, "BLOCK", 256)  # for the grid, and in the next line for kernels
    monkeypatch.setitem(passes._BLOCKS, "BLOCK", 256)
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
            assert equal(found[twins.numbers], right[twins.numbers]), method
    nothing = torch.zeros_like(cut)
    for mass in (False, True):
        found, right = (
            cuts_of(rows).digits(Search(nothing, nothing, nothing), None, 44, mass=mass)[1]
            for rows in (triton, plain)
        )
        assert equal(found[twins.numbers], right[twins.numbers]), "digits"


def test_rows_that_are_done_are_left_out():
    """Zeros in their place, and what the others had before."""
    twins = Twins(*SHARDS[1], num_samples=2)
    done = torch.arange(len(twins.filters)) % 3 == 0
    best = twins.plain.best_scores(COUNT)
    nothing, filters = torch.zeros_like(twins.cut), twins.thresholds
    search = Search(nothing, nothing, filters.most)
    second = search, cuts_of(twins.plain).digits(search, None, 44, mass=False)[1], 36

    def passes(rows: ShardLogits) -> dict[str, torch.Tensor]:
        return {
            "first_words": rows.first_words(2),
            "first_words of tiles": _told_if_triton(rows).first_words(2),
            "first_words, whole rows": rows.first_words(300),
            "best_scores": _told_if_triton(rows).best_scores(COUNT),
            "before": rows.before(best, filters, COUNT),
            "masses by digit": cuts_of(rows).digits(search, None, 44, mass=True)[1],
            "numbers by digit": cuts_of(rows).digits(search, None, 44, mass=False)[1],
            "numbers by the second digit": cuts_of(rows).digits(*second, mass=False)[1],
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
                assert equal(rows[name][numbers], expected[numbers]), name
    some = twins.plain.without(done).select(torch.tensor([0, 1, 4]))
    some = some.without(torch.tensor([False, True, False]))
    assert some.done.tolist() == [True, True, False]


@pytest.mark.parametrize("first", [640, 641])
def test_an_empty_shard_has_no_group_that_nobody_writes(first):
    """A group was counted for the ids before 641, and its words were those of the memory."""
    twins = Twins(first, first)
    assert twins.triton.count_of(1024) == twins.triton.count_of(4) == 0
    assert torch.equal(twins.triton.best_scores(COUNT), twins.plain.best_scores(COUNT))
    assert torch.equal(twins.triton.first_words(COUNT), twins.plain.first_words(COUNT))


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
    assert equal(sums[twins.numbers], expected[twins.numbers])
    for own in twins.kernels:
        its, found = own.weighed_words(asked, first, drawn, cut)
        assert equal(found[twins.numbers], sums[twins.numbers])
        assert equal(its.first, words.first) and equal(its.own, words.own)
        assert equal(its.temperature, words.temperature)
        assert equal(its.top.nan_to_num(), words.top.nan_to_num())


FACTS = [name for name, fact in vars(FilteredRows).items() if isfunction(fact) and name[0] != "_"]


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_stored_rows_are_those_of_whole_rows(name):
    twins = Twins(0, V)
    logits = twins.logits.sort(dim=1, descending=True).values
    words = order_words(twins.logits).sort(dim=1, descending=True).values
    whole = reference._WholeRows(logits, words, twins.plain.temperature)
    numbers = torch.linspace(-9, 0, len(logits), dtype=torch.float64)
    arguments = {
        "least_word": (numbers, whole.temperature),
        "least_of_mass": ((numbers.exp() * TOP_MASS).long(),),
    }

    def fact_of(facts: FilteredRows) -> torch.Tensor:
        found = getattr(facts, name)(*arguments.get(name, ()))
        return torch.stack(found if isinstance(found, tuple) else (found,))[:, twins.numbers]

    for rows in (twins.plain, *twins.kernels):
        assert equal(fact_of(_OverRanks(rows, Ranks())), fact_of(whole)), rows.backend
