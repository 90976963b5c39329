"""Every public call and argument, wrong or different on one rank alone: every rank raises the same
text before anything is sent, no process ends, and the next step is right.

The step's own arguments are in test_bad_arguments.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.controls import bitmask_of
from tests.support.ranks import run_ranks
from tpsample import (
    LMHeadSampler,
    PeerLost,
    RankMismatch,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    sample_draft,
    verify,
    verify_logits,
)

V, D, B, K = 10, 4, 2, 1
SHARD = V // 2


def _params(**changes) -> list[SamplingParams]:
    return [SamplingParams(**{"seed": 1 + row, **changes}) for row in range(B)]


def _batch(vocab_size: int = V, rows: list[SamplingParams] | None = None) -> SamplingBatch:
    return SamplingBatch.from_params(_params() if rows is None else rows, vocab_size=vocab_size)


def _head(rank: int) -> torch.Tensor:
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
    return weight[SHARD * rank : SHARD * (rank + 1)].clone()


# Of each collective call: arguments that are right, and per argument values that are not.
RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "verify": lambda: {
        "hidden_states": torch.ones(B, K + 1, D),
        "draft_token_ids": torch.zeros(B, K, dtype=torch.int64),
        "batch": _batch(),
        "positions": 3,
        "method": "block",
        "draft": torch.zeros(B, K, SHARD),
        "lengths": torch.tensor([K] * B),
    },
    "verify_logits": lambda: {
        "local_logits": torch.zeros(B, K + 1, SHARD),
        "draft_token_ids": torch.zeros(B, K, dtype=torch.int64),
        "batch": _batch(),
        "positions": 3,
        "method": "block",
        "draft": torch.zeros(B, K, SHARD),
        "lengths": torch.tensor([K] * B),
    },
    "sample_draft": lambda: {
        "draft_logits": torch.zeros(B, SHARD),
        "batch": _batch(),
        "positions": 3,
        "index": 0,
        "method": "rejection",
    },
    "prompt_logprobs": lambda: {
        "hidden_states": torch.ones(3, D),
        "token_ids": torch.tensor([1, 2, 3]),
        "top": 1,
    },
    "sample_logits": lambda: {
        "local_logits": torch.zeros(B, SHARD),
        "batch": _batch(),
        "positions": 3,
        "num_samples": 2,
        "out": None,
    },
}
NO_BATCH = (None, [SamplingParams()], _batch(V + 1), _batch(rows=_params()[:1]))
NO_POSITIONS = (None, 1.0, -1, True, torch.zeros(B + 1).long(), torch.zeros(B))
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "verify": {
        "hidden_states": (
            None,
            torch.ones(B, K + 2, D),
            torch.ones(B, K + 1, D).bfloat16(),
            torch.ones(B, D, K + 1).transpose(1, 2),
        ),
        "draft_token_ids": (None, torch.zeros(B, K), torch.zeros(B).long(), [[1], [2]]),
        "batch": NO_BATCH,
        "positions": NO_POSITIONS,
        "method": ("typical", None, "coupled"),
        "draft": (torch.zeros(B, K, V), "draft", torch.zeros(B, K, SHARD).long()),
        "lengths": ([K] * B, torch.zeros(B), torch.zeros(B + 1).long(), torch.zeros(B, 1).long()),
    },
    "sample_draft": {
        "draft_logits": (None, torch.zeros(B, V), torch.zeros(B), torch.zeros(B, SHARD).long()),
        "batch": NO_BATCH,
        "positions": NO_POSITIONS,
        "index": (0.5, "a", 2**70, -1, None, True),
        "method": ("typical", None),
    },
    "prompt_logprobs": {
        "hidden_states": (None, torch.ones(3, D + 1), torch.ones(3), torch.ones(3, D).half()),
        "token_ids": (None, torch.tensor([1, 2, V]), torch.tensor([1, 2, -1]), torch.ones(3)),
        "top": (-1, 1.0, None, V + 1),
    },
    "sample_logits": {
        "local_logits": (
            None,
            torch.zeros(B, V),
            torch.zeros(SHARD),
            torch.zeros(B, SHARD).double(),
            torch.zeros(5, SHARD),
            torch.zeros(SHARD, B).T,
        ),
        "batch": NO_BATCH,
        "positions": NO_POSITIONS,
        "num_samples": (0, 1.0),
        "out": (1, SampleOutput.empty(torch.zeros(B).long(), 3)),
    },
}
# Right by themselves, but not what the other rank passes; and what the error begins with.
DIFFERENT: dict[str, dict[str, tuple[Any, str]]] = {
    "verify": {
        "hidden_states": (None, ""),  # not compared: the sizes and the drafts are
        "draft_token_ids": (torch.ones(B, K, dtype=torch.int64), "token_ids"),
        "batch": (_batch(rows=_params(top_k=3)), "batch: row 0: top_k"),
        "positions": (4, "positions"),
        "method": ("rejection", "call"),
        "draft": (None, "call"),
        "lengths": (torch.tensor([0] * B), "token_ids"),
    },
    "sample_draft": {
        "draft_logits": (None, ""),
        "batch": (_batch(rows=_params(temperature=0.5)), "batch: row 0: temperature"),
        "positions": (4, "positions"),
        "index": (1, "num_samples"),
        "method": ("block", "call"),
    },
    "prompt_logprobs": {
        "hidden_states": (None, ""),
        "token_ids": (torch.tensor([1, 2, 4]), "token_ids"),
        "top": (2, "num_samples"),
    },
    "sample_logits": {
        "local_logits": (None, ""),  # not compared: each rank has its own
        "batch": (_batch(rows=_params(top_k=3)), "batch: row 0: top_k"),
        "positions": (4, "positions"),
        "num_samples": (3, "num_samples"),
        "out": (None, ""),  # each rank's own
    },
}
WRONG["verify_logits"] = {
    **{name: wrong for name, wrong in WRONG["verify"].items() if name != "hidden_states"},
    "local_logits": (
        None,
        torch.zeros(B, K + 2, SHARD),
        torch.zeros(B, K + 1, V),
        torch.zeros(B, K + 1, SHARD).double(),
    ),
}
DIFFERENT["verify_logits"] = {
    **{name: pair for name, pair in DIFFERENT["verify"].items() if name != "hidden_states"},
    "local_logits": (None, ""),  # not compared: each rank has its own
}
VERIFIES: dict[str, Callable[..., Any]] = {
    "verify": verify,
    "verify_logits": verify_logits,
    "sample_draft": sample_draft,
}


def _call(sampler: LMHeadSampler, name: str, arguments: dict[str, Any]) -> Any:
    if name in ("prompt_logprobs", "sample_logits"):
        return getattr(sampler, name)(**arguments)
    return VERIFIES[name](sampler, **arguments)


def _outcome(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing raised", ""


def _sampler(exchange: str = "collective", **arguments) -> LMHeadSampler:
    backend = "triton" if exchange == "peer" else "torch"
    weight = _head(dist.get_rank())
    return LMHeadSampler(weight, exchange=exchange, backend=backend, max_rows=8, **arguments)


def _step(sampler: LMHeadSampler, batch: SamplingBatch | None = None) -> list[int]:
    batch = batch or _batch()
    return sampler(torch.ones(batch.rows, D), batch, 0).token_ids.tolist()


def _collective(exchange: str, cases: list[tuple[str, str, Any]]) -> list[tuple[str, str]]:
    """Each case on rank 1 alone, every time followed by a step that is right on both."""
    sampler, found = _sampler(exchange), []
    expected = _step(sampler)
    for name, argument, value in cases:
        arguments = RIGHT[name]()
        if dist.get_rank() == 1:
            arguments[argument] = value
        found.append(_outcome(lambda n=name, a=arguments: _call(sampler, n, a)))
        assert _step(sampler) == expected
    return found


@pytest.mark.parametrize("exchange", ["collective", "p2p"])
@pytest.mark.parametrize("name", WRONG)
def test_a_call_wrong_on_one_rank_raises_the_same_on_every_rank(name, exchange):
    cases = [(name, argument, value) for argument in WRONG[name] for value in WRONG[name][argument]]
    first, second = run_ranks(2, _collective, exchange, cases)
    for case, one, two in zip(cases, first, second, strict=True):
        assert one == two and one[0] == "RankMismatch", f"{case}: {one}, {two}"
        assert one[1].startswith("rank 1: ") and case[1] in one[1], f"{case}: {one}"


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_that_differ_raise_the_same_naming_what_does(name):
    different = {argument: pair for argument, pair in DIFFERENT[name].items() if pair[1]}
    cases = [(name, argument, value) for argument, (value, _) in different.items()]
    first, second = run_ranks(2, _collective, "collective", cases)
    for one, two, (_, told) in zip(first, second, different.values(), strict=True):
        assert one == two and one[0] == "RankMismatch", f"{one}, {two}"
        assert one[1].startswith(told) and "rank 0: " in one[1] and "rank 1: " in one[1]


@pytest.mark.parametrize("name", WRONG)
def test_every_argument_is_covered(name):
    own = getattr(LMHeadSampler, name, None)
    function = VERIFIES.get(name, own)
    arguments = set(inspect.signature(function).parameters) - {"self", "sampler"}
    assert arguments == set(WRONG[name]) == set(DIFFERENT[name])


def _other_calls() -> list[tuple[str, str]]:
    """Rank 1 makes another call than rank 0."""
    sampler, found = _sampler(), []
    expected = _step(sampler)
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: _step(sampler),
        "compare": sampler.compare,
        **{name: lambda n=name: _call(sampler, n, RIGHT[n]()) for name in RIGHT},
    }
    for one in calls:
        for other in calls:
            found.append(_outcome(calls[one if dist.get_rank() == 0 else other]))
            if one == other:
                assert found.pop()[0] == "nothing raised"
            assert _step(sampler) == expected
    return found


def test_another_call_on_one_rank_raises_the_same_on_every_rank():
    first, second = run_ranks(2, _other_calls)
    assert len(first) == 42 and first == second
    assert all(kind == "RankMismatch" for kind, _ in first)
    assert all(text.startswith("call: every rank must make the same call") for _, text in first)
    assert "rank 0: step, rank 1: compare" in first[0][1]


# Changes of a batch, which no rank hears of before the next step; the right one, then wrong ones.
CHANGES: dict[str, list[Callable[[SamplingBatch], Any]]] = {
    "append": [
        lambda batch: batch.append(torch.tensor([3, 4])),
        lambda batch: batch.append(torch.tensor([3, 4, 5])),
        lambda batch: batch.append([3, 4]),
        lambda batch: batch.append(torch.tensor([3.0, 4.0])),
    ],
    "add": [
        lambda batch: batch.add(SamplingParams(seed=5)),
        lambda batch: batch.add(SamplingParams(seed=5, stop_token_ids=[V])),
        lambda batch: batch.add({"seed": 5}),
        lambda batch: batch.add(SamplingParams(seed=5), output_token_ids=[V]),
        lambda batch: batch.add(SamplingParams(seed=5), prompt_token_ids=3),
    ],
    "drop": [
        lambda batch: batch.drop(0),
        lambda batch: batch.drop(2),
        lambda batch: batch.drop([0, -1]),
        lambda batch: batch.drop("0"),
        lambda batch: batch.drop(None),
    ],
    "permute": [
        lambda batch: batch.permute([1, 0]),
        lambda batch: batch.permute([1, 1]),
        lambda batch: batch.permute([0]),
        lambda batch: batch.permute(None),
        lambda batch: batch.permute([0.0, 1.0]),
    ],
    "update": [
        lambda batch: batch.update(1, SamplingParams(top_k=2, seed=2)),
        lambda batch: batch.update(2, SamplingParams()),
        lambda batch: batch.update(1, None),
        lambda batch: batch.update(1, SamplingParams(min_tokens=1, stop_token_ids=[1])),
        lambda batch: batch.update("1", SamplingParams()),
        lambda batch: batch.update(1, SamplingParams(), output_token_ids=[V]),
    ],
    "grammar_bitmask": [
        lambda batch: setattr(batch, "grammar_bitmask", bitmask_of([{1}, {2}], V)),
        lambda batch: setattr(batch, "grammar_bitmask", bitmask_of([{1}], V)),
        lambda batch: setattr(batch, "grammar_bitmask", torch.zeros(2, 2, dtype=torch.int32)),
        lambda batch: setattr(batch, "grammar_bitmask", "bits"),
    ],
    "forced_token_ids": [
        lambda batch: setattr(batch, "forced_token_ids", torch.tensor([1, 2])),
        lambda batch: setattr(batch, "forced_token_ids", torch.tensor([1])),
        lambda batch: setattr(batch, "forced_token_ids", [1, 2]),
    ],
    "temperature": [lambda batch: batch.temperature.fill_(0.25)],
    "seed": [lambda batch: batch.seed.add_(1)],
}


def _changing(name: str) -> list[tuple[str, str]]:
    """Rank 1's change is refused, or forgotten; both step; then rank 1 makes it after all."""
    sampler, found = _sampler(), []
    right, *wrong = CHANGES[name]
    for change in [*wrong, lambda batch: None]:
        params = _params(presence_penalty=0.5)
        batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=3)
        _step(sampler, batch)
        if dist.get_rank() == 0:
            right(batch)
        elif change is not None:
            refused = _outcome(lambda b=batch, c=change: c(b))
            assert refused[0] in ("TypeError", "ValueError") or change(batch) is None
        found.append(_outcome(lambda b=batch: _step(sampler, b)))
        if dist.get_rank() == 1:
            right(batch)
        found.append(("tokens", str(_step(sampler, batch))))
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_refused_or_forgotten_on_one_rank_is_told_by_the_next_step(name):
    first, second = run_ranks(2, _changing, name)
    assert first == second
    told = {
        "append": "tokens so far",
        "add": "hidden_states rows",
        "drop": "hidden_states rows",
        "permute": "batch: row|seeds",
        "update": "batch: row 1: ",
        "temperature": "temperatures",
        "seed": "seeds",
    }.get(name, name)
    for kind, text in first[::2]:
        assert kind == "RankMismatch", f"{kind}: {text}"
        assert any(text.startswith(way) for way in told.split("|")), text


def _unprepared() -> list[tuple[str, str]]:
    """Of a batch that was appended to, the shard's counts are known on rank 0 alone."""
    sampler, found = _sampler(), []
    for wrong in (lambda batch: None, lambda batch: batch.prepare(VocabShard(0, V + 1))):
        batch = SamplingBatch.from_params(_params(presence_penalty=1.0), vocab_size=V)
        if dist.get_rank() == 0:
            batch.prepare(sampler.shard)
        else:
            _outcome(lambda b=batch, w=wrong: w(b))
        batch.append(torch.tensor([1, 2]))
        found.append(_outcome(lambda b=batch: _step(sampler, b)))
    return found


def test_a_shard_that_one_rank_did_not_prepare_is_told_to_all():
    first, second = run_ranks(2, _unprepared)
    assert first == second
    for kind, text in first:
        assert kind == "RankMismatch"
        assert text.startswith("rank 1: batch: tokens were appended before a sampler of")


def _counted() -> list[int]:
    """Steps by number, after calls that emit no token, a verification, and a step refused."""
    sampler = _sampler()
    counts: list[int] = []
    roll: Any = sampler.exchange.ranks.roll
    for call in (
        lambda: _step(sampler),
        sampler.compare,
        lambda: _call(sampler, "prompt_logprobs", RIGHT["prompt_logprobs"]()),
        lambda: _call(sampler, "sample_draft", RIGHT["sample_draft"]()),
        lambda: _call(sampler, "verify", RIGHT["verify"]()),
        lambda: sampler(torch.ones(B + dist.get_rank(), D), _batch(), 0),
        lambda: _step(sampler) if dist.get_rank() else sampler.compare(),
        lambda: _step(sampler),
    ):
        _outcome(call)
        counts.append(roll.step)
    return counts


def test_steps_are_counted_alike_on_every_rank_whatever_is_refused():
    assert run_ranks(2, _counted) == [[0, 0, 0, 0, 1, 1, 1, 2]] * 2


# --- seeds


def _unseeded() -> tuple[list[tuple[str, str]], list[list[int]]]:
    """Calls that are refused because one rank's rows have seeds and the other's wait for theirs."""
    sampler, rank, found, seeds = _sampler(), dist.get_rank(), [], []
    waiting = [SamplingParams()] * B
    pairs = [
        (_params(), waiting),
        ([SamplingParams(), SamplingParams()], [SamplingParams(), SamplingParams(seed=0)]),
        ([SamplingParams(), SamplingParams(seed=0)], [SamplingParams(seed=0), SamplingParams()]),
    ]
    for pair in pairs:
        for name in ("step", "verify", "sample_draft"):
            batch = _batch(rows=pair[rank])

            def call(name: str = name, batch: SamplingBatch = batch) -> Any:
                if name == "step":
                    return _step(sampler, batch)
                return _call(sampler, name, RIGHT[name]() | {"batch": batch})

            found.append(_outcome(call))
            out = sampler(torch.ones(B, D), _batch(rows=waiting), 0)
            seeds.append(out.seeds.tolist())
            sampler.compare()
    return found, seeds


def test_a_refused_call_draws_no_seeds():
    """Later rows without a seed are given the same one on every rank."""
    (first, seeds), (second, others) = run_ranks(2, _unseeded)
    assert first == second and seeds == others
    assert len({seed for pair in seeds for seed in pair}) == 2 * len(seeds)
    for kind, text in first:
        assert kind == "RankMismatch" and text.startswith("rows without a seed"), text


def _drew_another() -> tuple[str, str]:
    sampler = _sampler()
    if dist.get_rank() == 1:
        _batch(rows=[SamplingParams()]).draw_seeds(sampler.settings.seeds)
    return _outcome(lambda: _step(sampler, _batch(rows=[SamplingParams()] * B)))


def test_a_rank_that_drew_other_seeds_is_told_before_rows_are_given_theirs():
    first, second = run_ranks(2, _drew_another)
    assert first == second and first[0] == "RankMismatch"
    assert first[1].startswith("rows without a seed: ")
    assert "rank 0: [0, 1] after 0 drawn seeds, rank 1: [0, 1] after 1 drawn seeds" in first[1]


def _near_seeds() -> list[tuple[str, str]]:
    """Pairs that are equal modulo 2^61 - 1, or to a hash that takes -1 for -2."""
    pairs = [(2**64 - 1, 2**64 - 2), (5, 5 + 2**61 - 1), (0, 2**61 - 1), (-1, -2), (7, 2**63 + 7)]
    sampler, rank, found = _sampler(), dist.get_rank(), []
    for pair in pairs:
        batch = _batch(rows=[SamplingParams(seed=pair[rank])] * B)
        found.append(_outcome(lambda b=batch: _step(sampler, b)))
    for pair in ((0, 2**61 - 1), (2**62, 2**62 + 2**61 - 1)):
        positions = torch.tensor([pair[rank], 3])
        found.append(_outcome(lambda p=positions: sampler(torch.ones(B, D), _batch(), p)))
    return found


def test_no_two_seeds_or_positions_are_taken_for_one():
    first, second = run_ranks(2, _near_seeds)
    assert first == second
    for kind, text in first[:5]:
        assert kind == "RankMismatch" and text.startswith("seeds: ")
    for kind, text in first[5:]:
        assert kind == "RankMismatch" and text.startswith("positions: ")


def _written_otherwise() -> list[list[int]]:
    ways = [
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
        ({"logit_bias": {1: 2, 3: 4.0}}, {"logit_bias": {3: 4, 1: 2.0}}),
        ({"bad_words": [[1, 2]]}, {"bad_words": ((1, 2),)}),
    ]
    sampler, rank = _sampler(), dist.get_rank()
    return [_step(sampler, _batch(rows=_params(**way[rank]))) for way in ways]


def test_equal_requests_written_otherwise_are_no_difference():
    first, second = run_ranks(2, _written_otherwise)
    assert first == second


REQUESTS = [
    {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"ties": "keep"},
    {"filter_order": "joint"}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]},
    {"bad_words": [[1, 2]]}, {"min_tokens": 2, "stop_token_ids": [1]}, {"stop_token_ids": [1]},
    {"logprobs": 1}, {"logprob_token_ids": [1]}, {"logprobs_mode": "raw_logits"},
    {"repetition_scope": "output"},
]  # fmt: skip


def _other_requests() -> list[tuple[str, str]]:
    sampler, found = _sampler(), []
    for other in REQUESTS:
        batch = _batch(rows=[_params()[0], *_params(**(other if dist.get_rank() else {}))[1:]])
        found.append(_outcome(lambda b=batch: _step(sampler, b)))
        _step(sampler)
    return found


def test_ranks_with_other_requests_are_told_the_row_and_the_field():
    first, second = run_ranks(2, _other_requests)
    assert first == second
    for other, (kind, text) in zip(REQUESTS, first, strict=True):
        assert kind == "RankMismatch"
        assert any(text.startswith(f"batch: row 1: {field}: ") for field in other), text
    assert set(SamplingParams.__dataclass_fields__) - {"seed"} == {f for o in REQUESTS for f in o}


# --- leaving, closing, resetting


def _interrupted() -> list[tuple[str, str]]:
    """Ctrl-C on rank 1, in the middle of a step."""
    sampler, found = _sampler(), []
    expected, run = _step(sampler), sampler.local.best_words

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        sampler.local.best_words = interrupt
        with pytest.raises(KeyboardInterrupt):
            _step(sampler)
        sampler.local.best_words = run
        found.append(_outcome(lambda: _step(sampler)))
    else:
        found.append(_outcome(lambda: _step(sampler)))
    sampler.reset()
    assert _step(sampler) == expected
    return found


def test_an_interrupted_rank_says_so_and_takes_no_step_before_reset():
    first, second = run_ranks(2, _interrupted, group_timeout_s=2)
    assert first[0][0] == "PeerLost" and "rank 1: KeyboardInterrupt" in first[0][1]
    assert second[0][0] == "RankMismatch" and "call reset() on every rank" in second[0][1]


def _closed() -> list[tuple[str, str]]:
    sampler = _sampler()
    if dist.get_rank() == 1:
        sampler.close()
    calls = [lambda: _step(sampler), sampler.compare]
    calls += [lambda n=name: _call(sampler, n, RIGHT[n]()) for name in RIGHT]
    return [_outcome(call) for call in calls]


def test_a_sampler_closed_on_one_rank_is_told_to_all():
    first, second = run_ranks(2, _closed)
    assert first == second
    for kind, text in first:
        assert (kind, text) == (
            "RankMismatch",
            "rank 1: sampler: closed; build a new LMHeadSampler",
        )


def test_a_closed_sampler_raises_on_a_rank_alone():
    sampler = LMHeadSampler(torch.randn(V, D))
    sampler.close()
    for call in (lambda: _step(sampler), sampler.compare, sampler.check, sampler.reset):
        with pytest.raises(RuntimeError, match="closed; build a new"):
            call()
    sampler.close()


def _reset_alone() -> str:
    """Rank 1 resets while rank 0 steps; both recover when rank 0 resets too."""
    sampler = _sampler()
    expected = _step(sampler)
    if dist.get_rank() == 0:
        with pytest.raises(PeerLost) as lost:
            _step(sampler)
        assert lost.value.ranks == () or 1 in lost.value.ranks
    sampler.reset()
    assert _step(sampler) == expected
    return "recovered"


def test_a_reset_on_one_rank_waits_for_the_others():
    assert run_ranks(2, _reset_alone, group_timeout_s=2) == ["recovered"] * 2


# --- construction


def _whole_weight(cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found = []
    for case in cases:
        arguments = dict(case)
        weight = arguments.pop("weights")[dist.get_rank()]
        found.append(_outcome(lambda w=weight, a=arguments: LMHeadSampler(w, **a)))
    return found


def test_a_weight_that_was_not_sliced_is_refused():
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(3))
    both, halves = [weight] * 2, [weight[:SHARD], weight[SHARD:]]
    wrong = [
        {"weights": both, "vocab_size": V},
        {"weights": both},
        {"weights": [weight[:SHARD]] * 2, "vocab_size": V},
        {"weights": [torch.cat([weight, weight])] * 2, "vocab_size": V},
    ]
    right = [
        {"weights": halves, "vocab_size": V},
        {"weights": halves},
        {"weights": [torch.cat([half, weight[:1]]) for half in halves], "vocab_size": V},
        {"weights": [torch.zeros(SHARD, D)] * 2},
    ]
    first, second = run_ranks(2, _whole_weight, wrong + right)
    assert first == second
    for kind, text in first[: len(wrong)]:
        assert kind == "RankMismatch" and text.startswith("lm_head_weight: "), text
        assert "VocabShard.even(vocab_size, rank, world_size)" in text
    assert {kind for kind, _ in first[len(wrong) :]} == {"nothing raised"}


def test_a_rank_alone_with_too_few_rows_disagrees_with_nobody():
    with pytest.raises(ValueError, match="lm_head_weight: rank 0 needs 10 rows") as error:
        LMHeadSampler(torch.zeros(5, D), vocab_size=V)
    assert not isinstance(error.value, RankMismatch)


def _alone() -> list[int]:
    """A process group of one rank, which has nobody to leave behind."""
    sampler = LMHeadSampler(torch.cat([_head(0), _head(1)]), backend="torch")
    expected = _step(sampler)
    with pytest.raises(ValueError, match="hidden_states") as error:
        sampler(torch.ones(B + 1, D), _batch(), 0)
    assert not isinstance(error.value, RankMismatch)
    with pytest.raises(ValueError, match="token_ids"):
        sampler.prompt_logprobs(torch.ones(1, D), torch.tensor([V]))
    assert _step(sampler) == expected
    return expected


def test_a_group_of_one_rank_steps_on_after_an_error():
    run_ranks(1, _alone)


class DTensor(torch.Tensor):
    """Goes by the name of torch's."""


@pytest.mark.parametrize("argument", ["lm_head_weight", "hidden_states", "draft_logits"])
def test_a_dtensor_is_refused_with_the_way_out(argument):
    told = rf"{argument}: got a DTensor; pass its part on this rank, {argument}.to_local\(\)"
    tensor = torch.zeros(B, D).as_subclass(DTensor)
    with pytest.raises(TypeError, match=told):
        if argument == "lm_head_weight":
            LMHeadSampler(tensor)
        elif argument == "hidden_states":
            LMHeadSampler(torch.zeros(V, D))(tensor, _batch(), 0)
        else:
            sampler = LMHeadSampler(torch.zeros(D, D))
            sample_draft(sampler, tensor, _batch(D), 0, 0)


def test_a_device_mesh_is_refused_with_the_way_out():
    class Mesh:
        def get_group(self) -> None: ...

    with pytest.raises(TypeError, match=r"group: .*; pass its group, .get_group\(\)"):
        LMHeadSampler(torch.zeros(V, D), group=Mesh())
