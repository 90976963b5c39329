"""Rows with filters, penalties and masks stand in a full graph; what is refused is in
tests/test_compiled.py."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.cases import Case, own_sampler
from tests.support.ranks import same_on_ranks
from tests.support.scaled_model import Model
from tests.support.tiers import long
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    compiled,
)
from tpsample.filters import finish
from tpsample.request.graph_rows import GraphRows

TABLES = {
    "top_k over 256": {"top_k": 280},
    "top_k": {"top_k": 200},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
    "min_tokens and bad_words": {
        "min_tokens": 2,
        "stop_token_ids": [1],
        "bad_words": [[5, 6]],
    },
}
QUICK = ("top_k", "penalties")
COMPILERS = ("eager", "aot_eager", "inductor")
ALL = [*itertools.product(TABLES, COMPILERS, ["torch"])]
ALL += [*itertools.product(TABLES, ["aot_eager"], ["triton"]), ("top_k", "inductor", "triton")]
TRIED = [each for each in ALL if each[0] in QUICK and each[1:] == ("aot_eager", "torch")]


def tables_of(case: Case, name: str, **options) -> SamplingBatch:
    params = [SamplingParams(seed=row, **TABLES[name]) for row in range(len(case.params))]
    prompts = [[3, row] for row in range(len(params))]
    return SamplingBatch.from_params(
        params, vocab_size=case.vocab_size, prompt_token_ids=prompts, **options
    )


@pytest.mark.parametrize(
    ("name", "compiler", "sampler_backend"),
    [*TRIED, *long(*(each for each in ALL if each not in TRIED))],
)
def test_filters_penalties_and_masks_stand_in_a_full_graph(name, compiler, sampler_backend):
    torch._dynamo.reset()
    case = Case.make(300, 4)
    model = Model(case, sampler_backend)
    compiled = torch.compile(model, backend=compiler, fullgraph=True, dynamic=True)
    batches = tables_of(case, name), tables_of(case, name)

    def same(states, position, *num_samples):
        for batch, step in zip(batches, (compiled, model), strict=True):
            found.append(step(states, batch, position, *num_samples)[0])
        assert torch.equal(*found[-2:])

    found = []
    with torch.no_grad():
        same(case.hidden_states, 2, 3)
        for position in range(2, 5):
            same(case.hidden_states, position)
            for batch in batches:
                batch.append(found[-1])
        for batch in batches:
            batch.update(1, SamplingParams(seed=9, top_k=1))
            batch.drop(0)
        same(case.hidden_states[1:], 9)
        mask = torch.zeros(3, 10, dtype=torch.int32)
        for position, bits in ((10, 5), (11, 8)):
            for batch in batches:
                batch.grammar_bitmask = mask
            mask[:, 2] = bits
            same(case.hidden_states[1:], position)
        assert found[-1].tolist() == [67] * 3


def test_a_graph_may_write_what_the_step_reads():
    """Writes in a graph reach the caller's tensors after the graph, so the step is handed them."""
    torch._dynamo.reset()
    case = Case.make(300, 4)
    batches = tables_of(case, "top_k"), tables_of(case, "top_k")
    mask, forced = torch.full((4, 10), -1, dtype=torch.int32), torch.full((4,), -1)

    def step(batch, temperature, seed):
        batch.temperature.copy_(temperature)
        batch.seed.copy_(seed)
        batch.grammar_bitmask[:3].fill_(7)
        batch.forced_token_ids[3:].fill_(77)
        return sampler(case.hidden_states, batch, 5).token_ids + 0

    sampler, found = LMHeadSampler(case.weight, backend="torch"), []
    given = torch.tensor([0.1, 9.0, 1e-9, 1.0]), torch.arange(4) + 50
    for batch, call in zip(
        batches, (torch.compile(step, backend="aot_eager", fullgraph=True), step), strict=True
    ):
        batch.grammar_bitmask, batch.forced_token_ids = mask.clone(), forced.clone()
        found.append(call(batch, *given).tolist())
    assert found[0] == found[1] and found[0][3] == 77


def test_a_step_on_a_gpu_goes_by_fixed_rounds_inside_a_graph(monkeypatch):
    torch._dynamo.reset()
    case, waits = Case.make(300, 4), []
    model = Model(case, "torch")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    batch, own = tables_of(case, "top_p"), tables_of(case, "top_p", fixed_rounds=True)
    with torch.no_grad():
        expected, _ = model(case.hidden_states, batch, 5)

        def noted(*arguments, may_read, **named):
            waits.append(may_read)
            return filtered(*arguments, may_read=may_read, **named)

        filtered = finish.sample_filtered
        monkeypatch.setattr(finish, "sample_filtered", noted)
        monkeypatch.setattr("tpsample.request.graph_rows.readable", lambda device: False)
        assert torch.equal(compiled(case.hidden_states, batch, 5)[0], expected)
    assert waits == [False]
    plan = batch.plan.in_fixed_rounds
    assert plan.text == own.plan.text and plan.stored_index is batch.plan.stored_index


class Made(TorchDispatchMode):
    """Notes every tensor in new memory that an operator of torch returns."""

    def __init__(self):
        super().__init__()
        self.alive = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in old:
                self.alive.append(weakref.ref(each))
        return out


@pytest.mark.parametrize("name", TABLES)
def test_after_a_step_outside_the_operator_keeps_no_new_tensor(name, monkeypatch):
    """CUDA graph trees refuse tensors that live on in their memory. `moving_on` notes on CPUs."""
    case = Case.make(300, 4)
    sampler, batch = LMHeadSampler(case.weight, backend="torch"), tables_of(case, name)
    sampler(case.hidden_states, batch, case.positions)
    monkeypatch.setattr(SamplingBatch, "_note_step", None)
    monkeypatch.setattr(GraphRows, "_note_step", lambda *_: None)
    monkeypatch.setattr("tpsample.request.graph_rows.readable", lambda device: False)
    given = case.hidden_states, batch.temperature, batch.seed, case.positions, None, None
    with Made() as made:
        compiled._sample._init_fn(*given, 0, sampler.handle, batch._handle)
    gc.collect()
    assert made.alive and [x().shape for x in made.alive if x() is not None] == []


def test_a_graph_of_a_batch_that_has_changed_or_is_gone_says_so():
    case = Case.make(300, 4)
    sampler = LMHeadSampler(case.weight, backend="torch")

    class Step(torch.nn.Module):
        def forward(self, rows):
            return sampler(rows, batch, 5).token_ids

    batch = tables_of(case, "top_k")
    graph = torch.export.export(Step(), (case.hidden_states,)).module()
    expected = Step()(case.hidden_states)
    assert torch.equal(graph(case.hidden_states), expected)
    copied = copy.deepcopy(batch)
    batch.update(0, SamplingParams(seed=9))
    with pytest.raises(RuntimeError, match="batch: a graph was compiled or exported for one that"):
        graph(case.hidden_states)
    batch = copied
    graph = torch.export.export(Step(), (case.hidden_states,)).module()
    assert torch.equal(graph(case.hidden_states), expected)
    batch = copied = None
    gc.collect()
    with pytest.raises(RuntimeError, match="or compile or export again"):
        graph(case.hidden_states)


def _on_ranks() -> list[str]:
    case, rank = Case.make(300, 4), dist.get_rank()
    sampler = own_sampler(case.weight, backend="torch")
    batch = tables_of(case, "penalties")

    def step(rows, position):
        return sampler(rows, batch, position).token_ids

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    right = compiled(case.hidden_states, 5)
    batch.append(right + rank)
    with pytest.raises(RankMismatch) as error:
        compiled(case.hidden_states, 6)
    return [str(right.tolist()), str(error.value).split(";")[0]]


def test_ranks_compare_tokens_so_far_inside_a_graph():
    case = Case.make(300, 4)
    expected = LMHeadSampler(case.weight, backend="torch")
    token_ids = expected(case.hidden_states, tables_of(case, "penalties"), 5).token_ids
    right, told = same_on_ranks(2, _on_ranks)
    assert right == str(token_ids.tolist()) and "tokens so far" in told
