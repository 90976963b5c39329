"""Wrong arguments: clear on one rank, the same on every rank, never a hang."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    sample,
)

V, D = 10, 4

# Per argument: values that are wrong whatever the other ranks pass.
WRONG = {
    "lm_head_weight": [
        None,
        torch.zeros(5),
        torch.zeros(5, D, dtype=torch.int64),
        torch.zeros(5, D, dtype=torch.float64),
        torch.zeros(5, 0),
        torch.zeros(D, 5).T,
        torch.zeros(2, D),
    ],
    "vocab_size": [0, -1, 2**20 + 1, 2.5, "10", True],
    "shard": [(0, 5), VocabShard(0, 6), VocabShard(8, 13)],
    "group": ["world", 3],
    "bias": [torch.zeros(4), torch.zeros(5, dtype=torch.int64), [0.0] * 5, torch.zeros(5, 1)],
    "logit_scale": [0, float("nan"), "1", None],
    "logit_softcap": [0.0, -30.0, float("inf"), "30"],
    "max_rows": [0, -4, 1.5, 2**20 + 1],
    "exchange": ["nccl", None, 1],
    "chunks": [0, 65, 1.0],
    "philox_rounds": [0, 8, "10"],
    "backend": ["cuda", None],
}
# Valid by themselves, but not what the other ranks pass.
DIFFERENT = {
    "lm_head_weight": torch.zeros(5, D + 1),
    "vocab_size": V - 1,
    "shard": VocabShard(4, 9),
    "bias": torch.zeros(5),
    "logit_scale": 2.0,
    "logit_softcap": 30.0,
    "max_rows": 128,
    "exchange": "p2p",
    "chunks": 2,
    "philox_rounds": 7,
    "backend": "triton",
}


def _arguments(rank: int) -> dict:
    return {
        "lm_head_weight": torch.zeros(5, D),
        "vocab_size": V,
        "shard": VocabShard(5 * rank, 5 * rank + 5),
        "backend": "torch",
        "exchange": "collective",
    }


def _build(cases: list[tuple[str, object]]) -> list[tuple[str, str]]:
    rank, results = dist.get_rank(), []
    for name, value in cases:
        arguments = _arguments(rank)
        if rank == 1:
            arguments[name] = value
        try:
            LMHeadSampler(arguments.pop("lm_head_weight"), **arguments)
            results.append(("nothing raised", ""))
        except Exception as error:
            results.append((type(error).__name__, str(error)))
    return results


def _require_same_error(cases: list[tuple[str, object]]) -> None:
    first, second = run_ranks(2, _build, cases, timeout_s=60)
    for (name, value), one, two in zip(cases, first, second, strict=True):
        assert one == two, f"{name}={value!r}"
        assert one[0] == "RankMismatch", f"{name}={value!r}: {one}"
        told = {"lm_head_weight": ("lm_head_weight", "hidden_size", "shard")}.get(name, (name,))
        assert any(word in one[1] for word in told), f"{name}={value!r}: {one}"


def test_wrong_on_one_rank_raises_the_same_on_every_rank():
    _require_same_error([(name, value) for name, values in WRONG.items() for value in values])


def test_ranks_that_differ_all_raise_naming_each_value():
    _require_same_error(list(DIFFERENT.items()))


def test_every_argument_of_the_constructor_is_covered():
    import inspect

    names = set(inspect.signature(LMHeadSampler.__init__).parameters) - {"self"}
    assert set(WRONG) == names
    assert set(DIFFERENT) == names - {"group"}


@pytest.mark.parametrize("name", [n for n in WRONG if n not in ("group",)])
def test_one_rank_raises_its_own_error(name):
    for value in WRONG[name]:
        arguments = {"lm_head_weight": torch.zeros(5, D), "backend": "torch", name: value}
        if name == "shard" and value == VocabShard(0, 6):
            arguments["vocab_size"] = 6
        if name == "lm_head_weight" and isinstance(value, torch.Tensor) and len(value) == 2:
            arguments["vocab_size"] = V
        with pytest.raises((TypeError, ValueError)):
            LMHeadSampler(arguments.pop("lm_head_weight"), **arguments)


def _step(**changes) -> None:
    sampler = LMHeadSampler(torch.zeros(V, D), max_rows=4, backend="torch")
    arguments = {
        "hidden_states": torch.zeros(2, D),
        "batch": SamplingBatch.from_params([SamplingParams(seed=1)] * 2, vocab_size=V),
        "positions": torch.zeros(2, dtype=torch.int64),
        **changes,
    }
    sampler(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_states", torch.zeros(D)),
        ("hidden_states", torch.zeros(2, D + 1)),
        ("hidden_states", torch.zeros(2, D).bfloat16()),
        ("hidden_states", torch.zeros(D, 2).T),
        ("hidden_states", None),
        ("batch", [SamplingParams()] * 2),
        ("batch", SamplingBatch.from_params([SamplingParams()] * 3, vocab_size=V)),
        ("batch", SamplingBatch.from_params([SamplingParams()] * 2, vocab_size=V + 1)),
        ("positions", torch.zeros(3, dtype=torch.int64)),
        ("positions", torch.zeros(2, dtype=torch.int32)),
        ("positions", -1),
        ("positions", 1.0),
        ("num_samples", 0),
        ("num_samples", True),
        ("out", SampleOutput.empty(torch.zeros(1, dtype=torch.int64), None)),
        ("out", SampleOutput.empty(torch.zeros(2, dtype=torch.int64), 1)),
    ],
)
def test_step_arguments(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        _step(**{name: value})


def test_too_many_rows_and_samples():
    with pytest.raises(ValueError, match="max_rows=4"):
        _step(num_samples=3)


def test_an_output_is_written_again():
    sampler = LMHeadSampler(torch.eye(V, D), backend="torch")
    batches = [
        SamplingBatch.from_params([SamplingParams(seed=seed)] * 3, vocab_size=V) for seed in (1, 2)
    ]
    out = sampler(torch.zeros(3, D), batches[0], 0)
    again = sampler(torch.zeros(3, D), batches[1], 7, out=out)
    fresh = sampler(torch.zeros(3, D), batches[1], 7)
    assert again is out
    assert torch.equal(out.token_ids, fresh.token_ids) and torch.equal(out.seeds, fresh.seeds)


def test_no_rows_is_an_empty_output():
    sampler = LMHeadSampler(torch.zeros(V, D), backend="torch")
    batch = SamplingBatch.from_params([], vocab_size=V)
    out = sampler(torch.zeros(0, D), batch, 0, num_samples=2)
    assert out.token_ids.shape == (0, 2) and out.status.shape == (0,)


def test_a_wrong_request_is_refused_before_the_step():
    with pytest.raises(TypeError, match="params"):
        sample(torch.zeros(1, D), torch.zeros(V, D), {"temperature": 1}, positions=0)


def test_rank_mismatch_is_a_value_error():
    assert issubclass(RankMismatch, ValueError)
