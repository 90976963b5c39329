"""Model code under torch.compile samples as it does outside, without a graph break."""

import weakref

import pytest
import torch

from tests.support.cases import Case
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, UnsupportedParameter


class Model(torch.nn.Module):
    """One layer and the sampler."""

    def __init__(self, case: Case, backend: str) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.sampler = LMHeadSampler(case.weight, backend=backend)

    def forward(self, hidden_states, batch, positions, num_samples=None):
        hidden_states = (hidden_states.float() * self.scale).to(hidden_states.dtype)
        out = self.sampler(hidden_states, batch, positions, num_samples=num_samples)
        return out.token_ids + 0, out.status


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
        torch.library.opcheck(torch.ops.tpsample.sample, (*tensors, num_samples, sampler.handle))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_operator_keeps_no_tensor_of_the_step(backend):
    """They may lie in a memory pool that torch.compile takes for its own again."""
    case = Case.make(300, 4)
    sampler = LMHeadSampler(case.weight, backend=backend)
    given = [case.hidden_states, case.batch.temperature, case.batch.seed, case.positions]
    given = [tensor.clone() for tensor in given]
    results = torch.ops.tpsample.sample(*given, 0, sampler.handle)
    alive = [weakref.ref(tensor) for tensor in (*given, *results)]
    del given, results
    assert [ref() for ref in alive] == [None] * len(alive)


def test_two_samplers_do_not_share_a_number():
    case = Case.make(300, 4)
    first, second = (LMHeadSampler(case.weight, backend="torch") for _ in range(2))
    assert first.handle != second.handle
    handle = second.handle
    del first
    third = LMHeadSampler(case.weight, backend="torch")
    assert third.handle != handle


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(seed=1, top_k=3)])
def test_what_needs_the_host_is_refused_while_compiling(params):
    torch._dynamo.reset()
    case = Case.make(300, 4)
    model = Model(case, "torch")
    batch = SamplingBatch.from_params([params] * 4, vocab_size=300)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match=r"inside torch\.compile") as raised:
        compiled(case.hidden_states, batch, case.positions)
    causes, error = [], raised.value
    while error is not None:
        causes.append(type(error))
        error = error.__cause__
    assert UnsupportedParameter in causes or "UnsupportedParameter" in str(raised.value)
