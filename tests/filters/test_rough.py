"""Rows that upper ends of their logits decide draw the same as from the logits themselves."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.same_rows import assert_same_rows
from tests.support.screening import HEADS, ODD_HEADS, problem
from tests.support.settings import settings_of
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    reference,
)
from tpsample.backends.numba_ import launch as native_backend
from tpsample.backends.numba_.launch import NativeBackend
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.numba_.row_kinds import kinds_of
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.row_noise import RowNoise
from tpsample.filters.thresholds import thresholds_of
from tpsample.ranks.ranks import Ranks
from tpsample.request.row_filter import BEST_SCORES
from tpsample.request.step import Found

V, D = 1500, 40
KINDS = [
    {"top_p": 0.9},
    {"top_p": 0.4, "temperature": 0.6},
    {"top_p": 0.9, "temperature": 3.0, "ties": "keep"},
    {"top_p": 0.6, "top_k": 20, "filter_order": "joint"},
    {"top_p": 0.9, "min_p": 0.2, "filter_order": "min_p_last"},
    {"top_k": 300},
    {"top_k": 300, "ties": "keep"},
    {"top_p": 0.9, "top_k": 150, "filter_order": "joint", "temperature": 2.0},
    {"min_p": 0.02},
    {"min_p": 0.6, "temperature": 5.0},
    {"top_p": 0.3, "min_p": 0.01},
]
OTHERS = [{"top_p": 0.8, "min_p": 0.1}, {"top_k": 400, "top_p": 0.9}, {"top_p": 0.7, "logprobs": 2}]


def stores_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list to which every step adds how many rows it needed the logits of after all."""
    counts, store = [], NativeBackend._store_logits

    def counted(self: NativeBackend, step: object, rows: Tensor, *memory: Tensor) -> None:
        counts.append(len(rows))
        store(self, step, rows, *memory)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeBackend, "_store_logits", counted)
    return counts


@pytest.mark.parametrize("name", HEADS)
def test_draws_of_rough_rows(name, monkeypatch):
    """Alone and beside rows that store their logits; of zeros every token ties with every other."""
    stores, rows = stores_of(monkeypatch), 0
    heads = itertools.cycle(ODD_HEADS[:5])
    for batch_size, samples, more in itertools.product((1, 7), (1, 2), ([], OTHERS)):
        case = replace(problem(name, V, batch_size, D), head=next(heads))
        kinds = itertools.islice(itertools.cycle(more + KINDS), batch_size)
        fields = [{"repetition_penalty": 1.3}, {}]
        params = [SamplingParams(seed=i, **kind, **fields[i % 2]) for i, kind in enumerate(kinds)]
        tokens = [[1, 2, 3]] * batch_size
        batch = SamplingBatch.from_params(params, vocab_size=V, output_token_ids=tokens)
        drawn, status = [], []
        for backend in ("numba", "torch"):
            head = {"logit_scale": case.head.logit_scale, "logit_softcap": case.head.logit_softcap}
            sampler = LMHeadSampler(case.weight, backend=backend, **head)
            out = sampler(case.hidden_states, batch, 3, num_samples=samples)
            drawn.append(out.token_ids)
            status.append(out.status)
        assert_same_rows(*drawn, params)
        assert torch.equal(*status)
        rows += len(kinds_of(batch.plan).rough)
    assert rows > 20
    if name == "normal":
        assert sum(stores) < rows / 4
    if name == "zeros":
        assert stores


class Ends:
    """Upper ends of some logits, at random above them by no more than their error bound."""

    def __init__(self, num_samples: int, top_k: int = 400) -> None:
        generator = torch.Generator().manual_seed(6)
        kinds = {"top_p": 0.9, "top_k": top_k, "filter_order": "joint"}, OTHERS[0]
        params = [
            SamplingParams(seed=i, temperature=t, **kind)
            for i, (kind, t) in enumerate(itertools.product(kinds, (0.3, 1.0, 3)))
        ]
        rows = len(params)
        batch = SamplingBatch.from_params(params, vocab_size=V)
        noise = RowNoise(batch.temperature, batch.seed, torch.arange(rows), num_samples)
        logits = torch.randn(rows, V, generator=generator) * 3
        logits[:, 7:500:9] = -torch.inf
        logits[1, 5] = 90.0
        error_bound = torch.tensor([0.0, 1e-5, 1e-3, 0.1, 0.0, 1e3])
        ends = logits + error_bound.unsqueeze(1) * 0.99 * torch.rand(rows, V, generator=generator)
        filters = batch.plan.filters
        self.plain = ShardLogits.of(logits, batch, noise)
        nothing = torch.zeros(1, rows, num_samples, 0, dtype=torch.int64)
        first = torch.zeros(1, rows, 1, dtype=torch.int64)
        found = Found(first, nothing, error_bound, torch.arange(rows), lambda *_: None)
        self.rough = NativeShardLogits.of(ends, batch, noise, found=found)
        self.best = self.plain.best_scores(BEST_SCORES)
        plain = replace(self.plain, top=word.value_of(self.best[:, 0]))
        self.thresholds = thresholds_of(plain, filters, Ranks())


def test_best_words_of_upper_ends_are_those_that_were_found():
    """The ends themselves have other scores; rows without an error bound are looked at again."""
    ends = Ends(2)
    found = ends.rough.rough
    assert found is not None
    words = word.pack(torch.randn(1, 6, 2, 2 * BEST_SCORES), torch.arange(2 * BEST_SCORES))
    rough = replace(ends.rough, found=found._replace(best=words))
    best = rough.best_scores(BEST_SCORES)[:, 1:].unflatten(1, (2, 2, -1))
    scores, orders = best.unbind(dim=1)
    assert torch.equal(orders.flatten(1), rough.words_of(word.token_of(scores).flatten(1)))
    known = found.error_bound > 0
    assert torch.equal(scores[known], words[0].topk(BEST_SCORES, dim=2).values[known])
    exact, cut = ends.best[:, 1:].unflatten(1, (2, 2, -1))[:, 0], torch.zeros(6, dtype=torch.int64)
    drawn = replace(rough, top=word.value_of(ends.best[:, 0])).best_kept(cut)
    assert torch.equal(drawn, torch.where(known[:, None], words[0].amax(dim=2), exact[:, :, 0]))
    assert torch.equal(scores[~known], exact[~known]) and known.sum() == 4


def test_a_masked_row_has_no_first_word():
    """A min_p stores no upper ends, and in its memory are those of an earlier step."""
    case = problem("normal", V, 1, D)
    sampler = LMHeadSampler(case.weight, backend="numba", on_failed=0)
    for hidden_states, fields, bits, status in (
        (case.hidden_states * math.nan, {"top_p": 0.5}, -1, Status.NAN),
        (case.hidden_states, {"min_p": 0.1}, 0, Status.EMPTY),
    ):
        batch = SamplingBatch.from_params([SamplingParams(seed=1, **fields)], vocab_size=V)
        batch.grammar_bitmask = torch.full((1, -(-V // 32)), bits, dtype=torch.int32)
        assert sampler(hidden_states, batch, 3).status.tolist() == [status]


def test_no_kernel_is_called_for_no_rows(monkeypatch):
    """Kernels are made for at least one; with none they would write past their memory."""
    calls: list[object] = []
    monkeypatch.setattr(native_backend, "in_ranges", lambda *arguments: calls.append(arguments))
    case = problem("normal", V, 2, D)
    batch = SamplingBatch.from_params([SamplingParams(top_p=0.9, seed=1)] * 2, vocab_size=V)
    local = NativeBackend(settings_of(case.weight, VocabShard(0, V)))
    step = local.prepare(
        case.hidden_states, batch._view_of(2), torch.zeros(2, dtype=torch.int64), 1
    )
    raw, none = torch.zeros(2, V), torch.empty(0, dtype=torch.int64)
    local._store_logits(step, none, none, raw, raw[:0])
    assert not calls
    local._store_logits(step, torch.tensor([1]), torch.tensor([0]), raw, raw[:0])
    assert len(calls) == 1


@pytest.mark.parametrize("fields", [{"top_k": 60, "filter_order": "joint"}, {"min_p": 0.02}])
def test_rows_that_their_bounds_leave_open(fields, monkeypatch):
    """Of ends far above the logits both bounds of a total, and all best scores, are wrong."""
    case, draw, rows = problem("normal", V, 40, D), native_backend.draw, range(40)
    top_p = [0.01 * 1.1**seed if "top_k" in fields else 1.0 for seed in rows]
    params = [SamplingParams(seed=i, temperature=3.0, top_p=top_p[i], **fields) for i in rows]
    batch, stores = SamplingBatch.from_params(params, vocab_size=V), stores_of(monkeypatch)

    def loosened(kernel: object, *arguments: Any) -> None:
        in_ranges(kernel, *arguments)
        if kernel is draw:
            best, error_bound = arguments[-4], arguments[-2]
            error_bound[:] = 2.5 if "top_k" in fields else error_bound
            best[:] = 0 if "min_p" in fields else best

    in_ranges = native_backend.in_ranges
    monkeypatch.setattr(native_backend, "in_ranges", loosened)
    drawn = []
    for backend in ("numba", "torch"):
        sampler = LMHeadSampler(case.weight, backend=backend)
        drawn.append(sampler(case.hidden_states, batch, 3).token_ids)
    assert_same_rows(*drawn, params)
    assert len(kinds_of(batch.plan).rough) == 40 and sum(stores) > 5, stores


@pytest.mark.parametrize(("fields", "count"), [({"top_p": 0.1}, 32), ({"top_k": 300}, 16)])
def test_more_candidates_decide_flat_rows(fields, count, monkeypatch):
    """With 8 candidates, 18 of these 40 rows with top_p 0.1 would store their logits."""
    case, stores = problem("normal", V, 40, D), stores_of(monkeypatch)
    params = [SamplingParams(seed=i, temperature=50.0, **fields) for i in range(40)]
    drawn = []
    for backend in ("numba", "torch"):
        batch = SamplingBatch.from_params(params, vocab_size=V)
        sampler = LMHeadSampler(case.weight, backend=backend)
        drawn.append(sampler(case.hidden_states, batch, 3).token_ids)
    assert_same_rows(*drawn, params)
    assert kinds_of(batch.plan).num_best == count and sum(stores) <= 5, stores


@pytest.mark.parametrize("fields", [{"min_p": 0.05}, {"top_k": 300, "ties": "keep"}], ids=str)
def test_a_row_that_is_open_stores_what_its_rule_keeps(fields):
    """Many of the others are left out."""
    count = 4000
    case = problem("normal", count, 2, D)
    params = [SamplingParams(**fields, seed=i) for i in (1, 2)]
    batch = SamplingBatch.from_params(params, vocab_size=count)
    assert len(kinds_of(batch.plan).rough) == 2
    local = NativeBackend(settings_of(case.weight, VocabShard(0, count)))
    step = local.prepare(
        case.hidden_states, batch._view_of(2), torch.zeros(2, dtype=torch.int64), 1
    )
    raw, both = torch.zeros(2, count), torch.arange(2)
    local._store_logits(step, both, both, raw, raw[:0])
    logits = case.hidden_states.double() @ case.weight.double().T
    kept = reference.kept_mask(logits.float(), batch)
    assert (raw[kept] > -torch.inf).all() and kept.any(dim=1).all()
    assert (raw == -torch.inf).sum() > count
    assert torch.allclose(raw[kept].double(), logits[kept], atol=1e-5)


def test_kept_sets_of_all_ids_are_counted(monkeypatch):
    """Their logits are stored if a mask or a NaN leaves fewer, and then they are right."""
    case, stores = problem("normal", V, 4, D), stores_of(monkeypatch)
    case.hidden_states[1, 0] = torch.nan
    masked = {"allowed_token_ids": [5, 9, 700]}
    for fields, count in (
        ([{}, {"temperature": 0.0}, {"top_p": 0.5}, {"temperature": 2.0}], 0),
        ([{}, {}, {"top_k": 5}, {"temperature": 0.0}], 2),  # a row with a NaN among them
        ([{}, {"temperature": 0.0}, masked, {"top_k": 3, "top_p": 0.9}], 2),
    ):
        params = [SamplingParams(seed=i, **each) for i, each in enumerate(fields)]
        batch = SamplingBatch.from_params(params, vocab_size=V, kept_cap=50)
        batch.temperature[3] = 0.0  # which the requests do not know
        kept = []
        for backend in ("numba", "torch"):
            out = LMHeadSampler(case.weight, backend=backend)(case.hidden_states, batch, 3)
            assert out.kept is not None
            its = out.kept.token_ids, out.kept.offsets, out.kept.sizes, out.kept.whole
            kept.append([out.token_ids, *its, out.kept.overflow, out.kept.log_masses])
        assert all(map(torch.equal, *kept)), (fields, kept)
        assert kept[0][4][0] and sum(stores) == count, stores
        stores.clear()


@pytest.mark.parametrize("num_samples", [1, 3])
def test_sums_are_within_their_bounds(num_samples):
    """Both are as near to the sum as the error bound allows; a large one tells nothing."""
    ends = Ends(num_samples)
    marks = num_samples * BEST_SCORES
    mass, number, total = ends.plain.before(ends.best, ends.thresholds, BEST_SCORES).split(
        [marks, marks, 1], dim=1
    )
    sums = ends.rough.before(ends.best, ends.thresholds, BEST_SCORES).view(-1, 4, marks + 1)
    orders = ends.plain._orders(ends.best, BEST_SCORES)
    top, asked = word.value_of(ends.best[:, 0]), orders > 0
    own = ends.plain.masses(word.value_of(orders), top) * asked
    exact = torch.cat([mass, total], dim=1), torch.cat([mass + own, total], dim=1)
    assert (sums[:, 0] <= exact[0]).all() and (exact[1] <= sums[:, 1]).all()
    assert (sums[:, 2, :-1] <= number).all() and (number + asked <= sums[:, 3, :-1]).all()
    assert 6 * num_samples < asked.sum() < 2 * asked.numel() // 3
    gap = (sums[:, 1] - sums[:, 0]) - (exact[1] - exact[0])
    assert (gap[[0, 4]] <= 3e-4 * exact[1][[0, 4]] + 10 * V).all()
    spread = torch.tensor([0.0, 1e-5, 1e-3 / 3, 0.1 / 0.3, 0.0])
    assert (gap[:5, -1] <= (2 * spread + 3e-4) * total[:5, 0] + 10 * V).all()
    assert not sums[5, 0].any() and (sums[5, 1] == V * 2**40).all()
    without = Ends(num_samples, top_k=0)  # numbers are not sent where no row asks for them
    half = without.rough.before(without.best, without.thresholds, BEST_SCORES)
    assert torch.equal(half, sums[:, :2].flatten(1))


def test_what_is_decided_is_as_from_the_sums():
    """Of marks that the bounds leave open the row is undecided."""
    ends, counts = Ends(1), [0, 0]
    exact = ends.plain.before(ends.best, ends.thresholds, BEST_SCORES)
    words = ends.plain.first_kept(ends.best, exact, ends.thresholds, BEST_SCORES).words
    sums = ends.rough.before(ends.best, ends.thresholds, BEST_SCORES)
    for row in range(len(sums)):
        for wider in (0, 2**30, 2**36, 2**39, 2**41):
            part = sums.clone()
            part.view(-1, 4, BEST_SCORES + 1)[row, 0] -= wider
            part.view(-1, 4, BEST_SCORES + 1)[row, 1] += wider
            found, decided, _ = ends.rough.first_kept(ends.best, part, ends.thresholds, BEST_SCORES)
            assert torch.equal(found[decided], words[decided])
            counts[int(decided[row])] += 1
    assert min(counts) > 3
