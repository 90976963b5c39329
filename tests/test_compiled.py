"""Model code under torch.compile samples as it does outside, without a graph break."""

import gc
import weakref

import pytest
import torch

from tests.support.cases import Case
from tests.support.scaled_model import Model
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, sample, sample_draft, verify


@pytest.mark.parametrize(
    ("compiler", "sampler_backend"),
    [
        ("eager", "torch"),
        ("aot_eager", "triton"),
        *long(
            ("eager", "triton"),
            ("aot_eager", "torch"),
            ("inductor", "triton"),
            ("inductor", "torch"),
        ),
    ],
)
def test_the_same_tokens_with_fullgraph_and_changing_batches(compiler, sampler_backend):
    torch._dynamo.reset()
    cases = [Case.make(300, rows) for rows in (4, 7, 5)]
    model = Model(cases[0], sampler_backend)
    compiled = torch.compile(model, backend=compiler, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for case in cases:
            for arguments in ((case.positions, None), (case.positions, 3), (9, None)):
                expected, status = model(case.hidden_states, case.batch, *arguments)
                token_ids, compiled_status = compiled(case.hidden_states, case.batch, *arguments)
                assert torch.equal(token_ids, expected)
                assert torch.equal(compiled_status, status)


def test_the_operator_keeps_its_promises():
    case = Case.make(300, 4)
    sampler = LMHeadSampler(case.weight, backend="torch")
    batch = case.batch
    tensors = (case.hidden_states, batch.temperature, batch.seed, case.positions)
    for num_samples in (0, 2):
        torch.library.opcheck(
            torch.ops.tpsample.sample, (*tensors, None, None, num_samples, sampler.handle, 0)
        )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_operator_keeps_no_tensor_of_the_step(backend):
    """They may lie in a memory pool that torch.compile takes for its own again."""
    case = Case.make(300, 4)
    sampler = LMHeadSampler(case.weight, backend=backend)
    given = [case.hidden_states, case.batch.temperature, case.batch.seed, case.positions]
    given = [tensor.clone() for tensor in given]
    results = torch.ops.tpsample.sample(*given, None, None, 0, sampler.handle, 0)
    alive = [weakref.ref(tensor) for tensor in (*given, *results)]
    del given, results
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.parametrize("names", [(), ("top_k",), ("top_k", "top_p", "min_p")], ids="-".join)
def test_a_full_graph_takes_a_new_batch_of_tensors_in_each_step(names):
    torch._dynamo.reset()
    case = Case.make(300, 4)
    model, pick = Model(case, "torch"), torch.Generator().manual_seed(4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(4):
        its = {
            "temperature": torch.rand(4, generator=pick) + 0.5,
            "seed": torch.arange(4) + step,
            "top_k": torch.randint(0, 9, (4,), generator=pick),
            "top_p": torch.rand(4, generator=pick) + 1e-3,
            "min_p": torch.rand(4, generator=pick) / 9,
        }
        its = {name: its[name] for name in ("temperature", "seed", *names)}
        batch = SamplingBatch.from_tensors(vocab_size=300, **its)
        with torch.no_grad():
            found = compiled(case.hidden_states, batch, case.positions + step)
            expected = model(case.hidden_states, batch, case.positions + step)
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_captured_graph_gives_the_memory_of_its_steps_back(backend, monkeypatch):
    """Under mode="reduce-overhead" a tensor that lives on is an error, elsewhere a leak."""
    torch._dynamo.reset()
    case = Case.make(300, 4)
    model = Model(case, backend)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr("tpsample.pipeline.capturing", lambda device: True)
    alive = []

    def noted(*arguments, **options):
        step = begin(*arguments, **options)
        alive.extend(map(weakref.ref, (step.hidden_states, step.out.token_ids, step.out.seeds)))
        return step

    begin, model.sampler.pipeline.begin = model.sampler.pipeline.begin, noted
    with torch.no_grad():
        for _ in range(2):
            compiled(case.hidden_states, case.batch, case.positions)
    gc.collect()
    assert len(alive) == 6 and [ref() for ref in alive] == [None] * 6


def test_a_captured_graph_keeps_what_a_batch_forgets(monkeypatch):
    """A batch whose rows change makes another plan; a graph still reads the tensors of the old."""
    monkeypatch.setattr("tpsample.pipeline.capturing", lambda device: True)
    case = Case.make(300, 2)
    sampler = LMHeadSampler(case.weight, backend="torch")
    params = [SamplingParams(seed=row, top_k=3) for row in range(2)]
    batch = SamplingBatch.from_params(params, vocab_size=300)
    plan, out = weakref.ref(batch.plan), sampler(case.hidden_states, batch, case.positions)
    kept_out = weakref.ref(out.token_ids)
    del out
    sampler.pipeline.forget_step()
    batch.drop(1)
    gc.collect()
    assert plan() is not None and kept_out() is None


def test_two_samplers_do_not_share_a_number():
    case = Case.make(300, 4)
    first, second = (LMHeadSampler(case.weight, backend="torch") for _ in range(2))
    assert first.handle != second.handle
    handle = second.handle
    del first
    third = LMHeadSampler(case.weight, backend="torch")
    assert third.handle != handle


PARAMS = {
    "no seed": {"seed": None, "temperature": 0.0},
    "filters": {"top_p": 0.8},
    "logprobs": {"logprobs": 2},
    "penalties": {"frequency_penalty": 1.0},
    "plain": {},
}


@pytest.mark.parametrize("name", PARAMS)
def test_what_needs_the_host_runs_outside_of_the_graph(name):
    torch._dynamo.reset()
    case = Case.make(300, 4)
    model = Model(case, "torch")
    params = [SamplingParams(**{"seed": row, **PARAMS[name]}) for row in range(4)]
    expected = SamplingBatch.from_params(params, vocab_size=300)
    batch = SamplingBatch.from_params(params, vocab_size=300)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for position in (5, 6):
            right, _ = model(case.hidden_states, expected, position)
            found, _ = compiled(case.hidden_states, batch, position)
            assert torch.equal(found, right)
            batch.append(found)
            expected.append(right)
    rows = batch.select(torch.arange(4))
    with torch.no_grad():
        assert torch.equal(
            compiled(case.hidden_states, rows, 9)[0], model(case.hidden_states, rows, 9)[0]
        )


@pytest.mark.parametrize(
    "name", ["sample_logits", "verify", "sample_draft", "prompt_logprobs", "sample", "fork"]
)
def test_other_calls_run_outside_of_the_graph(name):
    torch._dynamo.reset()
    case = Case.make(300, 4)
    sampler, batch = LMHeadSampler(case.weight, backend="torch"), case.batch
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    params, ids, drafts = case.params, torch.arange(4), torch.arange(4).unsqueeze(1)
    states = torch.stack([case.hidden_states] * 2, dim=1)
    call = {
        "sample_logits": lambda x: sampler.sample_logits(x * 2, batch, 5).token_ids + 1,
        "verify": lambda x: verify(sampler, states, drafts, batch, x.ndim).token_ids + 1,
        "sample_draft": lambda x: sample_draft(sampler, x * 2, batch, 5, 0).token_ids + 1,
        "prompt_logprobs": lambda x: sampler.prompt_logprobs(states[:, 0], 2 * ids).values + x.ndim,
        "sample": lambda x: sample(states[:, 0], case.weight, params, positions=x.ndim).token_ids,
        "fork": lambda x: x + sum(p.fork(2)[1].seed % 5 for p in params),
    }[name]
    with torch.no_grad():
        assert torch.equal(torch.compile(call, backend="eager")(logits), call(logits))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=rf"tpsample: (\w+\.)?{name} is no part of a graph of"):
            torch.compile(call, backend="eager", fullgraph=True)(logits)


def stale_mask(batch):
    batch.grammar_bitmask = torch.full((4, 10), -1, dtype=torch.int32)
    batch.update(0, SamplingParams(seed=5))


@pytest.mark.parametrize("made", ["from_params", "of_slots", "from_tensors"])
def test_a_batch_may_be_built_in_a_compiled_function(made):
    torch._dynamo.reset()
    case = Case.make(300, 2)
    sampler = LMHeadSampler(case.weight, backend="torch")

    def model(hidden_states: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        if made == "from_params":
            batch = SamplingBatch.from_params(case.params, vocab_size=300)
        elif made == "of_slots":
            batch = SamplingBatch.of_slots(4, vocab_size=300)
            batch.put([0, 1], case.params)
            batch = batch.select(torch.tensor([0, 1]))
        else:
            numbers = {"temperature": temperature, "seed": torch.tensor([1000, 1001])}
            batch = SamplingBatch.from_tensors(vocab_size=300, **numbers)
        return sampler(2 * hidden_states, batch, case.positions).token_ids + 1

    given = case.hidden_states, case.batch.temperature.clone()
    assert torch.compile(model, backend="eager")(*given).equal(model(*given))


@pytest.mark.parametrize(
    ("params", "options", "change"),
    [
        ([{}] * 4, {}, None),
        ([{"seed": 1, "logprobs": 1}] * 4, {}, None),
        ([{"seed": 1, "top_p": 0.5}] * 4, {"kept_cap": 5}, None),
        ([{"seed": 1}] * 3, {}, None),
        ([{"seed": 1}] * 4, {}, stale_mask),
        ([{"seed": 1}] * 4, {}, lambda batch: batch.free(1)),
    ],
    ids=["no seed", "logprobs", "kept_cap", "too few", "stale mask", "empty"],
)
def test_what_needs_the_host_is_refused_in_a_full_graph(params, options, change):
    torch._dynamo.reset()
    case = Case.make(300, 4)
    model = Model(case, "torch")
    given = [SamplingParams(**each) for each in params]
    batch = SamplingBatch.from_params(given, vocab_size=300, **options)
    if change is not None:
        change(batch)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match=r"tpsample: inside torch\.compile every"):
        compiled(case.hidden_states, batch, case.positions)
