"""Arguments of the constructor: wrong on one rank, every rank raises the same, and none hangs."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import outcome
from tests.support.ranks import same_on_ranks
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
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
    "logit_scale": [0, -1.0, float("nan"), "1", None],
    "logit_softcap": [0.0, -30.0, float("inf"), "30"],
    "max_rows": [0, -4, 1.5, 2**20 + 1],
    "exchange": ["nccl", None, 1],
    "chunks": [0, 65, 1.0],
    "backend": ["cuda", None],
    "screening": ["fp8", True, 8],
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
    "backend": "triton",
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
        weight = arguments.pop("lm_head_weight")
        results.append(outcome(lambda w=weight, a=arguments: LMHeadSampler(w, **a)))
    return results


def _require_same_error(cases: list[tuple[str, object]]) -> None:
    for (name, value), one in zip(cases, same_on_ranks(2, _build, cases), strict=True):
        assert one[0] == "RankMismatch", f"{name}={value!r}: {one}"
        told = {"lm_head_weight": ("lm_head_weight", "hidden_size", "shard")}.get(name, (name,))
        assert any(word in one[1] for word in told), f"{name}={value!r}: {one}"


def test_wrong_on_one_rank_raises_the_same_on_every_rank():
    _require_same_error([(name, value) for name, values in WRONG.items() for value in values])


def test_ranks_that_differ_all_raise_naming_each_value():
    _require_same_error(list(DIFFERENT.items()))


def test_every_argument_of_the_constructor_is_covered():
    names = set(inspect.signature(LMHeadSampler.__init__).parameters) - {"self"}
    assert set(WRONG) == names
    assert set(DIFFERENT) == names - {"group", "screening"}


def _weights() -> list[tuple[str, str]]:
    """Weights that were not sliced, three that were, and one that is padded."""
    weight, rank = torch.randn(V, D, generator=torch.Generator().manual_seed(3)), dist.get_rank()
    half = weight[5 * rank : 5 * rank + 5]
    cases: list[tuple[torch.Tensor, int | None]] = [
        *((weight, V), (weight, None), (weight[:5], V), (torch.cat([weight, weight]), V)),
        *((half, V), (half, None), (torch.zeros(5, D), V)),
        (half if rank == 0 else torch.cat([half, weight[:1]]), V),
    ]
    return [outcome(lambda w=w, v=v: LMHeadSampler(w, vocab_size=v)) for w, v in cases]


def test_a_weight_that_was_not_sliced_is_refused():
    found = same_on_ranks(2, _weights)
    for kind, text in found[:4]:
        assert kind == "RankMismatch" and text.startswith("lm_head_weight: "), text
        assert "VocabShard.even(vocab_size, rank, world_size)" in text
    assert {kind for kind, _ in found[4:]} == {"nothing raised"}


def _whole_logits() -> list[tuple[str, str]]:
    """Heads without a weight beside shards: two whole ones, and two that were cut."""
    shard = VocabShard.even(V, dist.get_rank(), 2)
    cases: list[tuple[int, int | None]] = [(V, V), (V, None), (V // 2, None), (V // 2 + 1, None)]
    return [
        outcome(lambda r=rows, v=size: LMHeadSampler(torch.empty(r, 0), vocab_size=v, shard=shard))
        for rows, size in cases
    ]


def test_whole_logits_with_shards_are_refused():
    found = same_on_ranks(2, _whole_logits)
    for kind, text in found[:2]:
        assert kind == "RankMismatch" and "every rank holds at least as many" in text, text
    assert {kind for kind, _ in found[2:]} == {"nothing raised"}


def test_a_process_that_has_peers_does_not_sample_by_itself(monkeypatch):
    weight = torch.randn(V, D)
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "2")
        for build in (LMHeadSampler, lambda w: sample(w[:1], w, [SamplingParams()], positions=0)):
            with pytest.raises(ValueError, match=rf"^group: {name}=2 says .*init_process_group"):
                build(weight)
        said = rf'^group: "alone" takes the {V} rows .* and {name}=2 says that it has peers'
        with pytest.warns(UserWarning, match=said) as warned:
            LMHeadSampler(weight, group="alone", backend="torch")
        assert warned[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LMHeadSampler(weight, vocab_size=V, group="alone", backend="torch")
        monkeypatch.setenv(name, "1")
        LMHeadSampler(weight)


def test_a_lone_weight_that_ends_in_zeros_is_warned_of():
    weight = torch.cat([torch.randn(V, D), torch.zeros(1, D)])
    with pytest.warns(UserWarning, match="ends in a row of zeros") as warned:
        LMHeadSampler(weight, backend="torch")
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LMHeadSampler(weight, vocab_size=V, backend="torch")
        LMHeadSampler(weight, vocab_size=V + 1, backend="torch")
        LMHeadSampler(weight, shard=VocabShard(0, V + 1), backend="torch")
        LMHeadSampler(torch.zeros(V, D), backend="torch")


def test_no_rows_is_an_empty_output():
    sampler = LMHeadSampler(torch.zeros(V, D), backend="torch")
    batch = SamplingBatch.from_params([], vocab_size=V)
    out = sampler(torch.zeros(0, D), batch, 0, num_samples=2)
    assert out.token_ids.shape == (0, 2) and out.status.shape == (0,)


def test_a_step_needs_its_device_to_be_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current(torch.device("cuda:0"))
    with pytest.raises(ValueError, match=r"is on cuda:1, but the current device .* is cuda:0"):
        check_current(torch.device("cuda:1"))
