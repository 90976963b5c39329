"""The trace of a generation: the oracle's top k and entropies, in buffers that are made once."""

import json
import math

import pytest
import torch

from tests.support.cases import own_sampler
from tests.support.memory import Largest
from tests.support.ranks import run_ranks
from tpsample import (
    LMHeadSampler,
    Logprobs,
    SamplingBatch,
    SamplingParams,
    TopKTrace,
    reference,
    verify_logits,
)

V, D, ROWS, STEPS, K = 4099, 4, 3, 12, 6

GENERATOR = torch.Generator().manual_seed(9)
WEIGHT = torch.randn(V, D, generator=GENERATOR)
HIDDEN = torch.randn(STEPS, ROWS, D, generator=GENERATOR)
PARAMS = [
    SamplingParams(seed=1, logprobs=K),
    SamplingParams(seed=2, logprobs=K + 2, top_p=0.7, temperature=1.4),
    SamplingParams(temperature=0.0, logprobs=K),
]
"""Plain, filtered and greedy; one row asks for more than the trace keeps."""


def _record(steps: int) -> tuple[TopKTrace, list[torch.Tensor], int]:
    """A trace, the tokens of each step, and the most elements of any tensor meanwhile."""
    sampler = own_sampler(WEIGHT, even=False, max_rows=ROWS)
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V)
    tokens = []
    with Largest() as largest:
        trace = TopKTrace(ROWS, STEPS, K)
        made = [t.data_ptr() for t in vars(trace).values() if isinstance(t, torch.Tensor)]
        for step in range(steps):
            out = sampler(HIDDEN[step], batch, step)
            trace.record(out)
            tokens.append(out.token_ids)
    kept = [t.data_ptr() for t in vars(trace).values() if isinstance(t, torch.Tensor)]
    assert made == kept
    return trace, tokens, largest.elements


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_step_is_the_oracles(world_size):
    steps = STEPS - 1
    for trace, tokens, elements in run_ranks(world_size, _record, steps):
        found = trace.tensors()
        for step in range(steps):
            log_softmax = reference.logits(HIDDEN[step], WEIGHT).double().log_softmax(dim=1)
            top = log_softmax.topk(K, dim=1)
            entropies = torch.special.entr(log_softmax.exp()).sum(dim=1)
            drawn = log_softmax.gather(1, tokens[step].unsqueeze(1)).squeeze(1)
            assert torch.equal(found["token_ids"][:, step].long(), tokens[step])
            assert torch.equal(found["top_token_ids"][:, step].long(), top.indices)
            for name, exact in (
                ("top_logprobs", top.values), ("entropies", entropies), ("logprobs", drawn)
            ):  # fmt: skip
                assert (found[name][:, step] - exact).abs().max() < 2e-6
        assert found["lengths"].tolist() == [steps] * ROWS
        assert found["top_logprobs"].shape == (ROWS, steps, K)
        # No more than the head [V, D]: nothing has an axis of steps and one of V.
        assert elements <= 4 * V


def _logprobs(rows: int, width: int) -> Logprobs:
    shape = (rows, width)
    values = torch.zeros(shape, dtype=torch.float64)
    return Logprobs(torch.ones(shape, dtype=torch.int64), values, torch.ones(shape), values[:, 0])


def test_what_lies_behind_the_end_of_a_row_is_blank(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="needs the extra hf")
    trace = TopKTrace(2, 5, 3)
    for _ in range(4):
        trace.record(_logprobs(2, 4))
    path = tmp_path / "run.safetensors"
    trace.save(path, lengths=[1, 4], metadata={"prompts": json.dumps(["a", "b"])})
    with safetensors.safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert json.loads(file.metadata()["prompts"]) == ["a", "b"]
    assert found["lengths"].tolist() == [1, 4]
    assert found["token_ids"].tolist() == [[1, -1, -1, -1], [1, 1, 1, 1]]
    assert found["top_token_ids"].shape == (2, 4, 3)
    assert (found["top_token_ids"][0, 1:] == -1).all() and (found["top_token_ids"][1] == 1).all()
    for name in ("logprobs", "entropies", "top_logprobs"):
        assert found[name][0, 1:].isnan().all() and not found[name][1].isnan().any()
    assert {found[n].dtype for n in ("token_ids", "top_token_ids")} == {torch.int32}


def test_another_default_device_changes_no_recorded_step():
    trace = TopKTrace(2, 3, 3)
    trace.record(_logprobs(2, 4))
    with torch.device("meta"):
        found = trace.tensors([1, 0])
    assert found["lengths"].tolist() == [1, 0]
    assert found["token_ids"].tolist() == [[1], [-1]]


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (None, r"got None; ask for them with SamplingParams\(logprobs=3\)"),
        (_logprobs(2, 3), r"at least k = 3 more, got \(2, 3\)"),
        (_logprobs(1, 4), "expected 2 rows"),
    ],
)
def test_what_does_not_fit_is_refused(logprobs, message):
    with pytest.raises(ValueError, match=message):
        TopKTrace(2, 5, 3).record(logprobs)


def test_a_device_that_is_not_here_is_named():
    with pytest.raises(ValueError, match=r"^device: torch has no 'gpu' here "):
        TopKTrace(2, 5, 3, device="gpu")


@pytest.mark.parametrize("method", ["definition", "step", "coupled", "rejection"])
def test_chosen_tokens_are_not_taken_for_likely_ones(method):
    """A batch has as many columns for them as for likely ones, in each row of it."""
    chosen = {"logprobs": 1, "logprob_token_ids": [5, 6, 7]}
    params = [SamplingParams(seed=1, **chosen), SamplingParams(seed=2, top_k=2, logprobs=2)]
    sampler = LMHeadSampler(torch.empty(9, 0), backend="torch")
    plain = SamplingParams(seed=3)  # so that not all rows ask
    batch = SamplingBatch.from_params([*params, plain], vocab_size=9)
    logits, drafts = torch.arange(27.0).view(3, 9), torch.empty(3, 0, dtype=torch.int64)
    if method == "definition":
        found = reference.sample(logits, batch, 0).logprobs
    elif method == "step":
        found = sampler.sample_logits(logits, batch, 0).logprobs
    else:
        out = verify_logits(sampler, logits.unsqueeze(1), drafts, batch, 0, method=method)
        found = out.logprobs
    assert found.token_ids.shape == (3, 6) and found.num_chosen == 3
    with pytest.raises(ValueError, match=r"at least k = 3 .* got \(3, 6\) with 3 from"):
        TopKTrace(3, 5, 3).record(found)
    with pytest.raises(ValueError, match=r"^count: expected at most the 2 likely tokens .* got 3;"):
        found.top(3)
    TopKTrace(3, 5, 2).record(found)
    ids, values = found.top(2)
    assert ids.tolist() == [[8, -1], [8, 7], [-1, -1]] and values.shape == ids.shape


def test_rows_that_moved_are_seen_by_their_seeds():
    sampler = LMHeadSampler(torch.eye(9), backend="torch")
    params = [SamplingParams(seed=seed, logprobs=2) for seed in range(3)]
    batch, trace = SamplingBatch.from_params(params, vocab_size=9), TopKTrace(3, 4, 2)
    for position in range(2):
        trace.record(sampler(torch.ones(3, 9), batch, position))
    batch.permute([0, 2, 1])
    with pytest.raises(ValueError, match=r"^step: row 1 has another seed .* begin another trace$"):
        trace.record(sampler(torch.ones(3, 9), batch, 2))
    assert trace.step == 2


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, "x", ["x"], {"a": "\ud800"}])
def test_metadata_are_texts_by_name(metadata, tmp_path):
    with pytest.raises(TypeError, match=r"^metadata: expected texts of UTF-8 by name, .* got "):
        TopKTrace(1, 2, 1).save(tmp_path / "trace", metadata=metadata)
    assert not list(tmp_path.iterdir())


def test_a_full_trace_refuses_another_step():
    trace = TopKTrace(2, 1, 3)
    trace.record(_logprobs(2, 4))
    with pytest.raises(ValueError, match="room for 1 steps"):
        trace.record(_logprobs(2, 4))
    for lengths in ([1], [1, 2], [-1, 0], [0.5, 1], [True, False], {0, 1}, 1):
        with pytest.raises(ValueError, match="lengths: expected 2"):
            trace.tensors(lengths)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 1.5, 1), (1, 1, True)])
def test_wrong_sizes(sizes):
    with pytest.raises(ValueError, match="expected an int from 1 to 2147483647"):
        TopKTrace(*sizes)


def test_a_row_without_a_token_is_blank():
    sampler = LMHeadSampler(torch.full((9, 1), math.nan), backend="torch")
    batch = SamplingBatch.from_params([SamplingParams(seed=0, logprobs=2)], vocab_size=9)
    trace = TopKTrace(1, 1, 2)
    trace.record(sampler(torch.ones(1, 1), batch, 0).logprobs)
    assert trace.token_ids.item() == -1 and trace.entropies.isnan().all()
    assert (trace.top_token_ids == -1).all() and trace.top_logprobs.isnan().all()


def test_several_samples_are_refused():
    batch = SamplingBatch.from_params([SamplingParams(seed=1, logprobs=2)], vocab_size=9)
    step = LMHeadSampler(torch.zeros(9, 2))(torch.zeros(1, 2), batch, 0, num_samples=3)
    with pytest.raises(ValueError, match="step: expected one token per row, got 3 samples"):
        TopKTrace(1, 2, 2).record(step)
