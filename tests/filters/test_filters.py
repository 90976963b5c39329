"""Filters on gloo ranks: bitwise the oracle's tokens, no logits gathered, few bytes."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.cases import own_shard, uneven_shards
from tests.support.filtered import Rows, V, grid, kinds_of_logits, masked
from tests.support.memory import cost_of
from tests.support.ranks import run_ranks
from tests.support.same_rows import assert_same_rows
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, Status, reference
from tpsample.backends.torch_ import passes
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core.masses import masses
from tpsample.core.order import order_words
from tpsample.core.row_noise import RowNoise
from tpsample.filters import kept_sets as threshold
from tpsample.filters import sample as filters
from tpsample.ranks.process import ranks_of

WORLD_SIZES = [1, 3, *long(2, 4, 8)]
KINDS = kinds_of_logits()


def _differing(sampler: LMHeadSampler, rows: Rows, expected: torch.Tensor, order=None) -> list[str]:
    """Requests whose token is not the expected one; rows taken in `order`."""
    order = list(range(len(rows.params))) if order is None else order
    params = [rows.params[row] for row in order]
    batch = rows.batch.from_params(params, vocab_size=rows.vocab_size)
    out = sampler(rows.hidden_states[order], batch, rows.positions[order])
    assert (out.status == Status.OK).all()
    try:
        its = rows.logits[order], rows.positions[order]
        assert_same_rows(out.token_ids, expected[order], params, *its)
    except AssertionError as error:
        return [str(error)]
    return []


def _sample_grid(cases: list[tuple[Rows, torch.Tensor]]) -> list[str]:
    wrong = []
    for number, (rows, expected) in enumerate(cases):
        shard = own_shard(V, even=number == 0)
        exchange = ("collective", "p2p")[number % 2]
        sampler = LMHeadSampler(**rows.head(shard), exchange=exchange, chunks=1 + number)
        wrong += _differing(sampler, rows, expected)
        if number == 1:
            generator = torch.Generator().manual_seed(3)
            order = torch.randperm(len(rows.params), generator=generator)[:150].tolist()
            wrong += _differing(sampler, rows, expected, order)
    return wrong


@pytest.fixture(scope="session", params=[0, *long(*range(1, 21))])
def grid_cases(request) -> list[tuple[Rows, torch.Tensor]]:
    """All kinds × half of the grid; a block of masked ids; all ids of two of four shards masked.

    Each turn draws other temperatures, ties and filters beside top_k, top_p and min_p.
    """
    params = grid(request.param)
    cases = [
        Rows(list(KINDS.values()), params[request.param % 2 :: 2]),
        Rows([KINDS["normal"], KINDS["two-valued"]], params[::2], bias=masked(37, 800)),
        Rows([KINDS["zipf"], KINDS["all-equal"]], params[1::2], bias=masked(V // 4, 3 * V // 4)),
    ]
    return [(rows, rows.oracle().token_ids) for rows in cases]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tokens_are_the_oracles(world_size, grid_cases):
    for wrong in run_ranks(world_size, _sample_grid, grid_cases):
        assert not wrong, "\n".join(wrong[:5])


def _sample_counting(rows: Rows) -> tuple[torch.Tensor, dict[str, int]]:
    """Tokens, and how many rows took each way."""
    taken = dict.fromkeys(("_by_rejection", "search"), 0)

    def counted(name):
        function = getattr(filters, name)

        def count(stored, row_filters, *arguments, **options):
            taken[name] += len(row_filters)
            return function(stored, row_filters, *arguments, **options)

        return count

    for name in taken:
        setattr(filters, name, counted(name))
    sampler = rows.sampler()
    # Of given logits all are there, where a step from hidden states might list those that count.
    own = rows.logits[:, sampler.shard.start : sampler.shard.stop].contiguous()
    token_ids = sampler.sample_logits(own, rows.batch, rows.positions).token_ids
    its = rows.params[0]
    weighed = its.top_k > 0 or its.top_p < 1  # else nothing is looked for
    assert sampler.counters()["second_rounds"] == taken["search"] * weighed
    return token_ids, taken


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("all-equal", {"top_p": 1e-6}),
        ("ramp-in-shards", {"top_k": 1, "temperature": 3.0, "ties": "keep"}),
        ("normal", {"top_k": 300, "top_p": 0.004, "filter_order": "joint", "temperature": 300.0}),
        ("ramp-in-shards", {"min_p": 0.999}),
        ("all-equal", {"top_k": 600, "top_p": 1e-6, "ties": "keep"}),
        ("bf16", {"top_p": 0.02, "ties": "keep", "temperature": 50.0}),
        ("bf16", {"top_k": 300, "top_p": 0.06, "ties": "keep", "temperature": 50.0}),
        ("ramp-in-shards", {"top_p": 0.9, "min_p": 0.99, "filter_order": "min_p_last"}),
        ("ramp-in-shards", {"top_k": 400, "top_p": 0.01, "min_p": 0.96, "temperature": 5.0,
                            "filter_order": "min_p_last", "ties": "keep"}),
    ],
    ids=["flat-small-p", "hot-top-1-ties", "hot-joint", "flat-min-p", "flat-in-top-k",
         "ties-of-top-p", "ties-in-top-k", "min-p-last", "min-p-last-in-top-k"],
)  # fmt: skip
def test_the_search_decides_what_the_rejection_cannot(kind, changes):
    joint = changes.get("filter_order") == "joint"
    searched = (changes.get("top_k", 0) > 256 and not joint) or changes.keys() == {"min_p"}
    params = [SamplingParams(seed=seed, **changes) for seed in range(40)]
    rows = Rows([KINDS[kind]], params)
    expected = rows.oracle().token_ids
    for token_ids, taken in run_ranks(3, _sample_counting, rows):
        assert_same_rows(token_ids, expected, rows.params, rows.logits, rows.positions)
        assert taken["_by_rejection"] == (0 if searched else 40) and taken["search"] > 30, taken


@pytest.mark.parametrize("backend", ["torch", "triton", "numba"])
def test_rows_of_both_orders_weigh_what_is_theirs(backend):
    """In one step: top_p of what top_k leaves, and of all tokens."""
    orders = {"filter_order": "sequential"}, {"filter_order": "joint"}
    kinds = {"top_k": 4, "top_p": 0.6}, {"top_k": 40, "top_p": 0.6, "min_p": 1e-3}
    params = [SamplingParams(seed=i, **kinds[i // 2 % 2], **orders[i % 2]) for i in range(80)]
    rows = Rows([KINDS["normal"]], params)
    sampler = LMHeadSampler(torch.zeros(V, 0), backend=backend)
    token_ids = sampler.sample_logits(rows.logits, rows.batch, rows.positions).token_ids
    expected = rows.oracle().token_ids
    assert_same_rows(token_ids, expected, rows.params, rows.logits, rows.positions)


def _boundary_rows() -> Rows:
    """top_p within one unit of the mass before a token, on either side, sequential and joint."""
    logits = KINDS["normal"].clone()
    order = logits.argsort(descending=True, stable=True)
    mass = masses(logits[order], logits[order[0]], torch.ones(()))
    params = []
    for place in (1, 2, 7, 40, 300):
        before, total = int(mass[:place].sum()), int(mass.sum())
        for units in (-0.5, 0.5):
            for filter_order in ("sequential", "joint"):
                top_p = (before + units) / total
                params.append(SamplingParams(top_p=top_p, filter_order=filter_order, seed=place))
    return Rows([logits], params)


def test_a_boundary_within_one_unit_is_told_apart():
    rows = _boundary_rows()
    kept = rows.kept_mask().sum(dim=1).tolist()
    assert kept == [n for place in (1, 2, 7, 40, 300) for n in (place, place, place + 1, place + 1)]


def test_mass_before_equal_to_the_limit_is_too_much():
    """Four equal tokens in three shards: top_p = n / 4 draws from exactly the first n."""
    ids, bias = [3, 140, 700, 1190], torch.full((V,), -math.inf)
    bias[ids] = 1.0
    order = ("sequential", "joint")
    params = [
        SamplingParams(top_p=n / 4, filter_order=order[seed % 2], seed=seed)
        for n in (1, 2, 3)
        for seed in range(60)
    ]
    rows = Rows([torch.zeros(V)], params, bias=bias)
    for out in run_ranks(3, Rows.step, rows):
        drawn = [set(part.tolist()) for part in out.token_ids.split(60)]
        assert drawn == [set(ids[:1]), set(ids[:2]), set(ids[:3])]


def _boundary_cuts(rows: Rows, tiles: list[int]) -> list[torch.Tensor]:
    """The ends of kept sets by the threshold, for several tile sizes of the arithmetic."""
    shard, batch = own_shard(V, even=False), rows.batch
    stored = ShardLogits.of(
        rows.logits[:, shard.start : shard.stop],
        batch,
        RowNoise(batch.temperature, batch.seed, rows.positions, 1),
        first_id=shard.start,
    )
    cuts = []
    for elements in tiles:
        passes.tile_elements = lambda _, elements=elements: elements
        stored = replace(stored, top=rows.logits.amax(dim=1))
        for may_read in (True, False):
            its = stored, batch.plan.filters, ranks_of(None)
            cuts.append(threshold.find_cut(*its, may_read=may_read).words)
    return cuts


@pytest.mark.parametrize("world_size", [1, 3, *long(8)])
def test_the_boundary_moves_with_neither_ranks_nor_tiles(world_size):
    rows = _boundary_rows()
    logits, mask = rows.logits, rows.kept_mask()
    words = order_words(logits)
    for cuts in run_ranks(world_size, _boundary_cuts, rows, [1, 100 * len(rows.params), 2**20]):
        assert all(torch.equal(words >= cut.unsqueeze(1), mask) for cut in cuts)


def _cost(rows: Rows) -> tuple[int, int]:
    sampler, batch = rows.sampler(max_rows=64), rows.batch
    sent, elements = cost_of(sampler, lambda: sampler(rows.hidden_states, batch, rows.positions))
    return sent + sampler.exchange.bytes_sent(len(rows.params)), elements


@pytest.mark.parametrize(
    ("changes", "most_bytes"),
    [
        ({"top_p": 0.95}, 2000),
        ({"top_k": 1000, "top_p": 0.95}, 57_000),
        ({"top_k": 2000, "top_p": 0.95}, 25_000),
        ({"top_k": 50}, 2900),
    ],
    ids=str,
)
def test_a_row_costs_few_bytes_at_8_ranks_and_memory_for_a_shard(changes, most_bytes):
    """A row of gathered fp32 logits would cost 115 kB."""
    logits = -1.1 * (1 + torch.arange(32768)).double().log().float()
    rows = Rows([logits], [SamplingParams(seed=seed, **changes) for seed in range(16)])
    sent, elements = zip(*run_ranks(8, _cost, rows), strict=True)
    own = 16 * max(map(len, uneven_shards(32768, 8)))
    assert min(sent) > 0 and max(sent) <= 16 * most_bytes
    first_words = 16 * changes["top_k"] if changes.get("top_k", 0) == 1000 else 0
    assert own <= max(elements) <= 1.1 * own + first_words


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_rows_with_a_nan_say_so_whichever_filter_they_have(backend):
    fields = [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 300, "top_p": 0.5}]
    params = [SamplingParams(seed=i, **each) for i, each in enumerate(fields * 2)]
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(1))
    logits[:4, 9] = math.nan
    batch = SamplingBatch.from_params(params, vocab_size=700)
    sampler = LMHeadSampler(torch.zeros(700, 4), backend=backend, group="alone")
    out, expected = sampler.sample_logits(logits, batch, 0), reference.sample(logits, batch, 0)
    assert out.status.tolist() == [Status.NAN] * 4 + [Status.OK] * 4
    assert torch.equal(out.token_ids, expected.token_ids)
