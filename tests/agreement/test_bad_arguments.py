"""Wrong arguments: clear on one rank, the same on every rank, never a hang."""

import pytest
import torch
import torch.distributed as dist

from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tests.support.virtual import peer_of
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    sample,
)
from tpsample.core.checks import check_current

V, D = 10, 4

# Per argument: values that are wrong whatever the other ranks pass.
WRONG = {
    "lm_head_weight": [
        None,
        torch.zeros(5),
        torch.zeros(5, D, dtype=torch.int64),
        torch.zeros(5, D, dtype=torch.float64),
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
    "screening": ["fp8", True, 8],
    "desync_every": [-1, 1.0, None],
    "on_failed": [-2, 1.0, None, 2**20],
}
# Valid by themselves, but not what the other ranks pass. `screening` may differ between ranks.
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
    "desync_every": 3,
    "on_failed": 3,
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
    first, second = run_ranks(2, _build, cases)
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
    assert set(DIFFERENT) == names - {"group", "screening"}


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


def _batch(count: int = 2, vocab_size: int = V, **params) -> SamplingBatch:
    return SamplingBatch.from_params(
        [SamplingParams(**{"seed": 1, **params})] * count, vocab_size=vocab_size
    )


# Per argument of a step: values that are wrong whatever the other ranks pass.
WRONG_STEP: dict[str, list] = {
    "hidden_states": [
        torch.zeros(D),
        torch.zeros(2, D + 1),
        torch.zeros(2, D).bfloat16(),
        torch.zeros(D, 2).T,
        torch.zeros(5, D),
        None,
    ],
    "batch": [[SamplingParams()] * 2, _batch(3), _batch(2, V + 1), None],
    "positions": [
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        -1,
        1.0,
        None,
    ],
    "num_samples": [0, True, 3, "2"],
    "out": [
        SampleOutput.empty(torch.zeros(1, dtype=torch.int64), None),
        SampleOutput.empty(torch.zeros(2, dtype=torch.int64), 1),
        "out",
    ],
}
# Valid by themselves, but not what the other ranks pass. `screening` may differ between ranks.
DIFFERENT_STEP = {
    "hidden_states": {"hidden_states": torch.zeros(1, D), "batch": _batch(1), "positions": 0},
    "batch": {"batch": _batch(top_k=3)},
    "num_samples": {"num_samples": 2},
    "positions": {"positions": 1},
    "seeds": {"batch": _batch(seed=2)},
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in WRONG_STEP for value in WRONG_STEP[name]]
)
def test_step_arguments(name, value):
    told = "max_rows=4" if isinstance(value, int) and value == 3 else f"{name}|max_rows=4"
    with pytest.raises((TypeError, ValueError), match=told):
        _step(**{name: value})


def _steps(exchange: str, cases: list[dict]) -> list[tuple[str, str]]:
    """Each case on rank 1 alone, every time followed by a step that is right on both."""
    rank, results = dist.get_rank(), []
    sampler = LMHeadSampler(
        torch.ones(5, D),
        max_rows=4,
        exchange=exchange,
        backend="triton" if exchange == "peer" else "torch",
    )
    if exchange == "peer":
        peer_of(sampler).timeout_s = 1.0 * slowness()
    right = {"hidden_states": torch.zeros(2, D), "batch": _batch(), "positions": 0}
    expected = sampler(**right).token_ids.tolist()
    for case in cases:
        try:
            sampler(**{**right, **(case if rank == 1 else {})})
            sampler.check()
            results.append(("nothing raised", ""))
        except Exception as error:
            results.append((type(error).__name__, str(error)))
        if exchange == "peer" and rank == 1:  # its words would meet rank 0's of another step
            with pytest.raises(RankMismatch, match=r"call reset\(\)"):
                sampler(**right)
        elif exchange == "peer":
            assert sampler(**right).status.tolist() == [Status.PEER_LOST] * 2
        if exchange == "peer":
            sampler.reset()
        assert sampler(**right).token_ids.tolist() == expected
    return results


@pytest.mark.parametrize("exchange", ["collective", "p2p", "peer"])
def test_a_step_wrong_on_one_rank_raises_the_same_on_every_rank(exchange):
    cases = [{name: value} for name in WRONG_STEP for value in WRONG_STEP[name]]
    if exchange == "peer":
        cases = [{name: WRONG_STEP[name][0]} for name in list(WRONG_STEP)[:2]]
    first, second = run_ranks(2, _steps, exchange, cases)
    for case, one, two in zip(cases, first, second, strict=True):
        assert one == two and one[0] == "RankMismatch", f"{case}: {one}, {two}"
        assert one[1].startswith("rank 1: ") and (
            next(iter(case)) in one[1] or "max_rows" in one[1]
        )


@pytest.mark.parametrize("exchange", ["collective", "p2p"])
def test_steps_that_differ_raise_naming_each_value(exchange):
    first, second = run_ranks(2, _steps, exchange, list(DIFFERENT_STEP.values()))
    for name, one, two in zip(DIFFERENT_STEP, first, second, strict=True):
        assert one == two and one[0] == "RankMismatch", f"{name}: {one}, {two}"
        assert one[1].startswith(name) and "rank 0: " in one[1] and "rank 1: " in one[1]


def _skip_a_step() -> str:
    """Rank 1 leaves step 1 out: the others' step 1 meets its step 2."""
    sampler = LMHeadSampler(torch.ones(5, D), exchange="collective", backend="torch")
    right = {"hidden_states": torch.zeros(2, D), "batch": _batch()}
    sampler(**right, positions=0)
    with pytest.raises(RankMismatch) as error:
        sampler(**right, positions=1 + dist.get_rank())
    sampler(**right, positions=2)  # all raised, so all can go on
    return str(error.value)


def test_a_rank_that_skips_a_step_is_noticed():
    first, second = run_ranks(2, _skip_a_step)
    assert first == second
    assert first.startswith("positions: ") and "skipped a step" in first


def test_every_argument_of_a_step_is_covered():
    import inspect

    names = set(inspect.signature(LMHeadSampler.__call__).parameters) - {"self"}
    assert set(WRONG_STEP) == names


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


def test_a_step_needs_its_device_to_be_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current(torch.device("cuda:0"))
    with pytest.raises(ValueError, match=r"is on cuda:1, but the current device .* is cuda:0"):
        check_current(torch.device("cuda:1"))
