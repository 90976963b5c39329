"""The kept set by its definition: other views of the same rules, and other engines' answers."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import oracle
from tests.support.distribution import chi_squared
from tests.support.fields import VALUES
from tests.support.filtered import Rows, V, grid, kinds_of_logits, masked
from tests.support.other_samplers import by_pivots, by_transformers
from tests.support.same_rows import assert_same_rows
from tests.support.tiers import thinned
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.masses import masses
from tpsample.core.order import ABOVE_ALL, least_logit, least_word, order_words
from tpsample.core.row_noise import RowNoise
from tpsample.core.rules import ENDING, ETA_CUTOFF, Rule
from tpsample.filters.kept_sets import find_cut
from tpsample.filters.sample import sample_filtered
from tpsample.ranks.ranks import Ranks

KINDS = kinds_of_logits()
INF, NAN = math.inf, math.nan


def oracle_request(params: SamplingParams) -> oracle.Request:
    """The same request for the oracle."""
    names = oracle.Request.__dataclass_fields__
    return oracle.Request(**{name: getattr(params, name) for name in names})


@pytest.mark.parametrize("name", KINDS)
def test_the_kept_set_is_the_oracles(name):
    """The rules one after the other, as the request orders them, over a sorted row."""
    params = [replace(p, ties=ties) for p in grid()[::5] for ties in ("exact", "keep")]
    rows = Rows([KINDS[name]], params)
    mask = reference.kept_mask(rows.logits, rows.batch)
    for row, params in enumerate(rows.params):
        expected = oracle.kept_set(KINDS[name].numpy(), oracle_request(params))
        assert mask[row].tolist() == expected.tolist(), params


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 77.0])
@pytest.mark.parametrize("top", [-3e38, -2.0, 0.0, 1e-3, 50.0, 1e4, 3e38, INF])
def test_the_cut_of_min_p_is_where_its_rule_ends(top, temperature):
    """Of all fp32 numbers: what is kept ends between two neighbours."""
    rates = [1.0, 0.5, 0.05, 1e-9, 1e-300, 0.0]
    tops, temperatures = torch.full((6,), top), torch.full((6,), temperature)
    log_min_p = torch.tensor([math.log(p) if p else -INF for p in rates], dtype=torch.float64)
    cut = least_word(tops, temperatures, log_min_p)
    assert (cut & word.TOKEN_MASK == 0).all()
    floor = least_logit(tops, temperatures, log_min_p)
    assert torch.equal(word.value_of(cut), floor)
    exact = tops.double() + temperatures.double() * log_min_p
    lower = word.value_of(cut - 1)  # -0.0 below 0
    assert (floor >= exact)[:-1].all() and ((lower < exact) | (lower == 0))[:-1].all()
    assert (word.value_of(cut) <= tops).all() and word.value_of(cut)[0] == top
    assert word.key_of(cut)[-1] == word.KEY_MINUS_INF + 1


def test_min_p_keeps_nothing_of_a_row_without_a_number():
    tops, ones = torch.tensor([NAN, -INF]), torch.ones(2)
    assert (least_word(tops, ones, torch.full((2,), -INF)) == ABOVE_ALL).all()


def test_a_masked_token_is_never_kept():
    rows = Rows([KINDS["normal"]], grid()[::5], bias=masked(100, 1190))
    mask = reference.kept_mask(rows.logits, rows.batch)
    assert not mask[:, 100:1190].any() and mask.any(dim=1).all()


def _stored(rows: Rows) -> tuple[ShardLogits, SamplingBatch]:
    batch = rows.batch
    view = batch._view_of(batch.rows)
    row_noise = RowNoise(view.temperature, view.seed, rows.positions, 1)
    return ShardLogits.of(rows.logits[batch.plan.stored_index], view, row_noise), batch


@pytest.mark.parametrize(
    ("name", "may_read"),
    thinned(
        KINDS,
        [True, False],
        one_in=2,
        also=[("all-equal", True), ("zipf", True), ("zipf", False)],
    ),
)
def test_sampling_by_an_explicit_threshold_is_the_same(name, may_read):
    rows = Rows([KINDS[name]], grid())
    stored, batch = _stored(rows)
    filtered = batch.plan.filters.row_index
    top = stored.logits.amax(dim=1)
    stored = replace(stored, top=top)
    cut = find_cut(stored, batch.plan.filters, Ranks(), may_read=may_read).words

    mask = reference.kept_mask(rows.logits, batch)[filtered]
    order = word.pack(stored.logits, torch.arange(V))
    assert torch.equal(order >= cut.unsqueeze(1), mask)
    own = masses(stored.logits, top.unsqueeze(1), stored.temperature.unsqueeze(1))
    mass = stored.mass_from(cut)
    assert torch.equal((own * mask).sum(dim=1), mass)
    token_ids, _ = word.decode(stored.best_kept(cut).squeeze(1))
    expected = reference.sample(rows.logits, batch, rows.positions).token_ids[filtered]
    assert torch.equal(token_ids, expected)


# (probabilities, request, ids that are kept). Where a rule of ours parts from an engine's, the
# entry says whose answer would be another.
LADDER = [0.5, 0.25, 0.125, 0.0625, 0.0625]
TIED = [0.4, 0.2, 0.1, 0.2, 0.1]
GOLDEN = {
    # transformers, TopPLogitsWarper and MinPLogitsWarper tests, top_p off the rounding edge
    "hf-top-p-a": ([0.3, 0.1, 0.1, 0.5], {"top_p": 0.79}, {0, 3}),
    "hf-top-p-b": ([0.15, 0.3, 0.3, 0.25], {"top_p": 0.79}, {1, 2, 3}),
    "hf-min-p-a": ([0.9, 0.0274, 0.047, 0.0274], {"min_p": 0.1}, {0}),
    "hf-min-p-b": ([0.15, 0.3, 0.3, 0.25], {"min_p": 0.1}, {0, 1, 2, 3}),
    "crossing-token-stays": (LADDER, {"top_p": 0.6}, {0, 1}),
    "mass-before-equal-to-p-goes": (LADDER, {"top_p": 0.5}, {0}),
    "at-least-one": (LADDER, {"top_p": 1e-9}, {0}),
    "min-p-is-inclusive": (LADDER, {"min_p": 1.0}, {0}),
    "sequential": (LADDER, {"top_k": 2, "top_p": 0.7}, {0, 1}),
    # vLLM, HF: 0.5 / 0.75 is under 0.7; SGLang's joint top_p: 0.5 is not under 0.5
    "sequential-renormalises": (LADDER, {"top_k": 2, "top_p": 0.5}, {0}),
    "joint-does-not": ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.5, "filter_order": "joint"},
                      {0, 1}),
    "sequential-does": ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.5}, {0}),
    # vLLM's PyTorch path, TensorRT-LLM, FlashInfer, HF keep all ties of the k-th
    "top-k-exact": ([0.4, 0.2, 0.2, 0.2], {"top_k": 2}, {0, 1}),
    "top-k-keeps-ties": ([0.4, 0.2, 0.2, 0.2], {"top_k": 2, "ties": "keep"}, {0, 1, 2, 3}),
    # FlashInfer and gemma keep all ties of the last token of top_p
    "top-p-cuts-ties": ([0.25] * 4, {"top_p": 0.5}, {0, 1}),
    "top-p-keeps-ties": ([0.25] * 4, {"top_p": 0.5, "ties": "keep"}, {0, 1, 2, 3}),
    "top-p-keeps-ties-of-its-last": (TIED, {"top_p": 0.5, "ties": "keep"}, {0, 1, 3}),
    "no-tie-beyond-the-first": (TIED, {"top_p": 0.4, "ties": "keep"}, {0}),
    # The mass of what top_k keeps with its ties is 0.8: half of it, and three quarters
    "top-k-ties-are-of-the-mass": (TIED, {"top_k": 2, "top_p": 0.5, "ties": "keep"}, {0}),
    "ties-of-both": (TIED, {"top_k": 2, "top_p": 0.75, "ties": "keep"}, {0, 1, 3}),
    "joint-keeps-ties":
        (TIED, {"top_k": 2, "top_p": 0.5, "ties": "keep", "filter_order": "joint"}, {0, 1, 3}),
    "just-over-the-mass-before": ([0.25] * 4, {"top_p": math.nextafter(0.5, 1)}, {0, 1, 2}),
    # SGLang, HF, llama.cpp take min_p last
    "min-p-before-top-p": ([0.5, 0.3, 0.2], {"min_p": 0.5, "top_p": 0.7}, {0, 1}),
    "min-p-shrinks-the-mass": ([0.5, 0.3, 0.2], {"min_p": 0.5, "top_p": 0.62}, {0}),
    "min-p-last-does-not":
        ([0.5, 0.3, 0.2], {"min_p": 0.5, "top_p": 0.62, "filter_order": "min_p_last"}, {0, 1}),
    "min-p-last-cuts": (LADDER, {"min_p": 0.3, "top_p": 0.8, "filter_order": "min_p_last"}, {0, 1}),
    # Before id 1 stands 0.4: more than 0.45 of the 0.8 that top_k leaves, less than 0.45 of all
    "min-p-last-after-top-k":
        (TIED, {"top_k": 3, "min_p": 0.4, "top_p": 0.45, "filter_order": "min_p_last"}, {0}),
    "min-p-last-of-all":
        (TIED, {"min_p": 0.4, "top_p": 0.45, "filter_order": "min_p_last"}, {0, 1}),
    "min-p-last-keeps-ties":
        (TIED, {"top_k": 3, "min_p": 0.4, "top_p": 0.51, "ties": "keep",
                "filter_order": "min_p_last"}, {0, 1, 3}),
    # transformers keeps these too; beside other filters it takes epsilon last
    "epsilon": (LADDER, {"epsilon_cutoff": 0.1}, {0, 1, 2}),
    "epsilon-keeps-the-likeliest": (LADDER, {"epsilon_cutoff": 0.75}, {0}),
    "epsilon-is-of-all-tokens": (LADDER, {"epsilon_cutoff": 0.3, "top_k": 2}, {0}),
    "epsilon-shrinks-the-mass": (LADDER, {"epsilon_cutoff": 0.1, "top_p": 0.85}, {0, 1}),
    "epsilon-comes-first-though-min-p-is-last":
        (LADDER, {"epsilon_cutoff": 0.1, "top_p": 0.85, "filter_order": "min_p_last"}, {0, 1}),
    # llama.cpp: two values, half each, so sigma is half their distance of log 3
    "sigma": ([0.375, 0.125, 0.375, 0.125], {"top_n_sigma": 1.9}, {0, 2}),
    "sigma-of-logits-before-temperature":
        ([0.375, 0.125, 0.375, 0.125], {"top_n_sigma": 1.9, "temperature": 9.0}, {0, 2}),
    "sigma-beyond": ([0.375, 0.125, 0.375, 0.125], {"top_n_sigma": 2.1}, {0, 1, 2, 3}),
    "sigma-comes-first": (LADDER, {"top_n_sigma": 1.5, "min_p": 0.3, "top_p": 0.75}, {0, 1}),
    # transformers keeps these too; an entropy of 1.875 bits makes e^-H 0.273
    "eta": (LADDER, {"eta_cutoff": 0.2}, {0, 1, 2}),
    "eta-itself-is-the-lesser": (LADDER, {"eta_cutoff": 0.06}, {0, 1, 2, 3, 4}),  # than 0.067
    "eta-is-of-all-tokens": (LADDER, {"eta_cutoff": 0.2, "top_k": 2}, {0, 1}),
    "top-k-off": (LADDER, {"top_k": -1}, {0, 1, 2, 3, 4}),
    "top-k-beyond": (LADDER, {"top_k": 99}, {0, 1, 2, 3, 4}),
    # vLLM forces the filters of a greedy request off as well
    "greedy": (LADDER, {"top_k": 1, "top_p": 0.1, "temperature": 0.0}, {0, 1, 2, 3, 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_kept_sets_worked_out_by_hand(name):
    probabilities, changes, expected = GOLDEN[name]
    logits = torch.tensor([probabilities]).log()
    params = SamplingParams(seed=0, **changes)
    batch = SamplingBatch.from_params([params], vocab_size=logits.shape[1])
    by_oracle = torch.from_numpy(oracle.kept_set(logits[0].numpy(), oracle_request(params)))
    for kept in (reference.kept_mask(logits, batch)[0], by_oracle):
        assert set(kept.nonzero().flatten().tolist()) == expected


# The ids that others keep of an entry of the table, where their rule is or might be another one.
OTHERS = {
    ("top-k-exact", by_transformers): {0, 1, 2, 3},  # as vLLM's PyTorch path and FlashInfer do
    ("top-p-cuts-ties", by_pivots): {0, 1, 2, 3},  # none of them is more likely
    ("top-p-cuts-ties", by_transformers): {2, 3},  # it sorts upwards
    ("min-p-shrinks-the-mass", by_transformers): {0, 1},  # min_p last: it finds two, takes none
    ("min-p-last-does-not", by_transformers): {0, 1},
    ("sequential-does", by_transformers): {0},  # 0.4 of 0.7 is over 0.5
    ("joint-does-not", by_pivots): {0, 1},
    ("mass-before-equal-to-p-goes", by_transformers): {0},
}


@pytest.mark.parametrize(("name", "theirs"), OTHERS)
def test_what_others_keep_is_as_the_table_says(name, theirs):
    probabilities, changes, _ = GOLDEN[name]
    kept = theirs(torch.tensor([probabilities]).log(), **changes)[0]
    assert set(kept.nonzero().flatten().tolist()) == OTHERS[name, theirs]


def _between(keep: Callable[[float], int], count: int, high: float) -> tuple[float, float]:
    """Return the neighbouring numbers between which a rule begins or ceases to keep so many."""
    low, at_high = 0.0, keep(high) >= count
    while low < (middle := (low + high) / 2) < high:
        if (keep(middle) >= count) == at_high:
            high = middle
        else:
            low = middle
    return low, high


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("rule", ENDING, ids=lambda rule: rule.name)
def test_a_rule_ends_at_the_number_at_which_the_oracles_does(rule, count):
    """To less than half a unit of a mass, so that neither may round it otherwise."""
    logits = -0.9 * torch.arange(30) + torch.rand(30, generator=torch.Generator().manual_seed(2))

    def request(number: float) -> SamplingParams:
        return SamplingParams(seed=1, temperature=0.9, **{rule.name: number})

    def keep(number: float) -> int:
        batch = SamplingBatch.from_params([request(number)], vocab_size=30)
        return int(reference.kept_mask(logits.unsqueeze(0), batch).sum())

    def oracle_keeps(number: float) -> int:
        return int(oracle.kept_set(logits.numpy(), oracle_request(request(number))).sum())

    ends = _between(keep, count, rule.high)
    kept = sorted(map(keep, ends))
    assert kept == [count - 1, count], f"{rule.name} of {ends} keeps {kept} of 30 tokens"
    beyond = ends[0] * (1 - 1e-13), ends[1] * (1 + 1e-13)
    found, expected = list(map(oracle_keeps, beyond)), list(map(keep, ends))
    assert found == expected, f"{rule.name} of {beyond}: the oracle keeps {found}, not {expected}"


def _whole_rows() -> reference._WholeRows:
    """Facts of rows of all kinds; in some of them most tokens have no mass."""
    logits = torch.stack(list(KINDS.values())).sort(dim=1, descending=True).values
    return reference._WholeRows(logits, order_words(logits), torch.full((len(logits),), 0.7))


def _read(rule: Rule, number: float, rows: reference._WholeRows) -> torch.Tensor:
    return torch.full((len(rows.logits),), rule.read(number, V), dtype=torch.float64)


@pytest.mark.parametrize("rule", ENDING, ids=lambda rule: rule.name)
def test_a_rule_that_is_off_keeps_every_token(rule):
    """Rows that have it and rows that do not share a step."""
    rows = _whole_rows()
    end = rule.end(rows, _read(rule, rule.off, rows))
    assert (rows.words >= end.unsqueeze(1)).all(), f"{rule.name}={rule.off} removes tokens"


@pytest.mark.parametrize("rule", ENDING, ids=lambda rule: rule.name)
def test_a_known_rule_ends_at_its_distance(rule):
    """Ranks leave out the logits below it before they meet."""
    rows = _whole_rows()
    for number in (rule.example, *VALUES[rule.name]):
        y = _read(rule, number, rows)
        at_y = bool((y <= 0).all()) and torch.equal(
            rule.end(rows, y), rows.least_word(y, rows.temperature)
        )
        assert at_y or not rule.known, f"{rule.name}={number} does not end at its distance"


class _OfEntropies:
    """Facts of rows whose mean exponents are these; the word of a limit is the limit."""

    def __init__(self, bits: torch.Tensor) -> None:
        self.moments = bits * 2.0**45

    def total_moment(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(self.moments, 2.0**45), self.moments

    def least_of_mass(self, limit: torch.Tensor) -> torch.Tensor:
        return limit


def test_the_limit_of_eta_is_exact_to_half_a_unit_of_a_mass():
    bits = torch.arange(0.0, 42.0, 0.03, dtype=torch.float64)
    rows: Any = _OfEntropies(bits)
    found = ETA_CUTOFF.end(rows, torch.full_like(bits, 0.5))
    exact = np.rint(np.sqrt(np.longdouble(0.5)) * np.exp2(40 - bits.numpy().astype(np.longdouble)))
    assert found.tolist() == exact.astype(np.int64).tolist()


class _Named(TorchDispatchMode):
    """Lists the operations that run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__.rstrip("_"))
        return func(*args, **(kwargs or {}))


class _Ones:
    """Facts of two rows that need no operations."""

    temperature = torch.ones(2)

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        return lambda *_: torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize("rule", ENDING, ids=lambda rule: rule.name)
def test_a_rule_rounds_as_it_would_alone(rule):
    """Powers and logarithms differ between devices, and `exp2` with the rows beside a row."""
    with _Named() as ran:
        rule.end(_Ones(), torch.full((2,), rule.example, dtype=torch.float64))
    inexact = ran.names & {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow"}
    assert not inexact, f"{rule.name} asks for {', '.join(sorted(inexact))}"


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_a_mass_one_unit_below_epsilon_goes(backend):
    """From hidden states, where no backend may weigh bounds of the logits in their place."""
    generator = torch.Generator().manual_seed(9)
    weight, hidden = (torch.randn(n, 24, generator=generator) / 2 for n in (500, 1))
    logits = reference.logits(hidden, weight)[0]
    q = masses(logits, logits.max(), torch.ones(())).sort(descending=True).values
    places, units = (1, 2, 4, 7), (0, 1)
    params = [
        SamplingParams(epsilon_cutoff=(int(q[place]) + unit) / int(q.sum()), seed=seed)
        for place, unit, seed in itertools.product(places, units, range(12))
    ]
    batch = SamplingBatch.from_params(params, vocab_size=500)
    rows = logits.expand(len(params), -1)
    kept = reference.kept_mask(rows, batch).sum(dim=1)
    assert kept[::12].tolist() == [place + 1 - unit for place in places for unit in units]
    if backend == "triton":  # its products are not exact
        sampler = LMHeadSampler(torch.empty(500, 0), backend=backend)
        drawn = sampler.sample_logits(rows.contiguous(), batch, 3).token_ids
    else:
        sampler = LMHeadSampler(weight, backend=backend)
        drawn = sampler(hidden.expand(len(params), -1).contiguous(), batch, 3).token_ids
    expected = reference.sample(rows, batch, 3).token_ids
    assert_same_rows(drawn, expected, params, rows, 3)


def test_the_largest_vocabulary_has_room_for_its_masses():
    vocab_size = word.MAX_VOCAB_SIZE
    batch = SamplingBatch.from_params([SamplingParams(top_p=0.75)], vocab_size=vocab_size)
    kept = reference.kept_mask(torch.full((1, vocab_size), 2.5), batch)[0]
    assert kept[: vocab_size * 3 // 4].all() and not kept[vocab_size * 3 // 4 :].any()


def test_a_batch_without_filters_has_no_filtered_rows():
    off = [
        SamplingParams(),
        SamplingParams(top_k=V, top_p=1.0),
        SamplingParams(top_k=-1),
        SamplingParams(temperature=0, top_k=3, top_p=0.2, min_p=0.1),
    ]
    assert SamplingBatch.from_params(off, vocab_size=V).plan.filters is None
    mixed = SamplingBatch.from_params([*off, SamplingParams(top_k=V - 1)], vocab_size=V)
    assert mixed.plan.filters.row_index.tolist() == [4]


def test_filtered_draws_follow_the_renormalised_softmax():
    logits, draws = KINDS["zipf"], 6000
    params = SamplingParams(top_k=40, top_p=0.9, min_p=0.01, seed=77)
    batch = SamplingBatch.from_params([params] * draws, vocab_size=V)
    row_noise = RowNoise(batch.temperature, batch.seed, torch.arange(draws), 1)
    stored = ShardLogits.of(logits.expand(draws, -1), batch, row_noise)
    words = sample_filtered(stored, batch.plan.filters, Ranks())
    token_ids, _ = word.decode(words.squeeze(1))

    one = SamplingBatch.from_params([params], vocab_size=V)
    mask = reference.kept_mask(logits.unsqueeze(0), one)[0]
    law = torch.softmax(logits.double().where(mask, -INF), 0)
    assert 5 < mask.sum() <= 40
    assert chi_squared(token_ids.numpy(), law.numpy()) > 1e-4
