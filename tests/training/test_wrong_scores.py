"""Wrong arguments of a score are refused by name; on several ranks every rank refuses them."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from tests.support.other_gpu import OnAnotherGpu
from tests.support.ranks import run_ranks
from tpsample import PeerLost, RankMismatch, VocabShard
from tpsample.output import KeptSets
from tpsample.training import KeptTokens, kept_logprobs

V, D = 20, 4
SETS = [[3, 5], None, [19, 0, 7]]


def _arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(3, D, generator=generator),
        "lm_head_weight": torch.randn(V, D, generator=generator),
        "token_ids": torch.tensor([5, 2, 0]),
        "kept": KeptTokens.from_lists(SETS),
        "temperature": torch.full((3,), 0.7),
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_states": torch.zeros(3, D + 1)}, r"hidden_states: expected a tensor \[N, 4\]"),
    ({"hidden_states": torch.zeros(3, D).double()}, "hidden_states: expected .* float32"),
    ({"lm_head_weight": torch.nn.Linear(D, V)}, "lm_head_weight: .* pass the parameter"),
    ({"lm_head_weight": torch.zeros(V, D, device="meta")}, "lm_head_weight: is on the meta device"),
    (
        {"lm_head_weight": torch.zeros(V, 0), "hidden_states": torch.zeros(3, 0)},
        r"lm_head_weight: expected \[V_local, D\] with D > 0, got torch.float32 \(20, 0\) on cpu",
    ),
    ({"token_ids": torch.tensor([5, 2])}, r"token_ids: expected a tensor \[3\]"),
    ({"token_ids": torch.tensor([5, -1, 0])}, r"token_ids: expected ids in \[0, 20\), got -1"),
    ({"token_ids": torch.tensor([4, 2, 0])}, "token_ids: row 0 drew id 4, which is not in its set"),
    ({"kept": [[3], None, [0]]}, "kept: expected KeptTokens, .* KeptTokens.from_lists"),
    ({"kept": KeptTokens.from_lists([[5], None])}, r"kept.offsets: expected a tensor \[4\]"),
    (
        {"kept": KeptTokens.from_lists([[5], None, [0, 20]])},
        r"kept.token_ids: expected ids in \[0, 20\), got 20; pass sets of this vocabulary",
    ),
    ({"kept": KeptTokens.from_lists([[5, 3, 5], None, [0]])}, "kept: row 0 lists id 5 twice"),
    ({"temperature": 0.0}, "temperature: .* got 0.0 in row 0; a greedy token has no distribution"),
    ({"temperature": torch.tensor([1.0, torch.nan, 1.0])}, "temperature: .* got nan in row 1"),
    ({"temperature": torch.ones(3, requires_grad=True)}, "temperature: .* temperature.detach()"),
    ({"temperature": torch.ones((), requires_grad=True)}, "temperature: .* temperature.detach()"),
    ({"temperature": torch.ones(2)}, r"temperature: expected a tensor \[3\]"),
    ({"logit_scale": -1.0}, "logit_scale: expected a finite fp32 number > 0, got -1.0"),
    ({"logit_softcap": 0}, "logit_softcap: expected None or a finite fp32 number > 0, got 0"),
    ({"sparse": True}, "sparse: a row that kept every id has a dense gradient; pass sparse=False"),
    ({"shard": VocabShard(0, V + 1)}, "lm_head_weight: rank 0 needs 21 rows"),
    ({"shard": range(3)}, "shard: expected a VocabShard, got range"),
    ({"group": 3}, "group: expected a torch process group"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG, ids=lambda value: str(value)[:40])
def test_one_rank_is_told(wrong, told):
    with pytest.raises((TypeError, ValueError), match=told):
        kept_logprobs(**{"group": "alone"} | _arguments() | wrong)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (([1, 2], [1, 2], [False]), "kept.offsets: expected numbers that never fall, from 0 to"),
        (([0, 2, 1], [1], [False, False]), "kept.offsets: expected numbers that never fall"),
        (([0, 1], [1], [True]), "kept: row 0 has 1 ids and whole is True"),
        (([0, 0], [], [False]), "kept: row 0 has 0 ids and whole is False"),
        (([0, 1], [1], [True, False]), r"kept.whole: expected a tensor \[1\]"),
        (([], [], []), r"kept.offsets: expected a tensor \[N \+ 1\] that begins with 0, got "),
    ],
)
def test_sets_that_do_not_fit_together_are_refused(arguments, told):
    offsets, ids, whole = arguments
    with pytest.raises(ValueError, match=told):
        KeptTokens(
            torch.tensor(offsets, dtype=torch.int64),
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(whole, dtype=torch.bool),
        )


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (9, r"rows \[0\] kept up to 9 ids.* with kept_cap=9 or more"),
        (0, r"rows \[0\] have no token to score; name the others by rows="),
    ],
)
def test_a_row_without_a_set_is_refused(size, told):
    kept = KeptSets(
        offsets=torch.tensor([0, 0]),
        token_ids=torch.empty(0, dtype=torch.int64),
        log_masses=torch.empty(0),
        sizes=torch.tensor([size]),
        whole=torch.tensor([False]),
        overflow=torch.tensor([size > 0]),
    )
    with pytest.raises(ValueError, match=told):
        KeptTokens.of_step(kept)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (torch.tensor([0, 3]), r"^rows: expected rows in \[0, 3\), got \[0, 3\]"),
        (torch.tensor([-1]), r"^rows: expected rows in \[0, 3\), got \[-1\]"),
        (torch.tensor([True, False]), r"^rows: expected a tensor \[3\] of bool on cpu, got "),
        ([0, 1], r"^rows: expected a tensor \[N\] of int64 on cpu, got \[0, 1\]"),
        (torch.tensor([2, 1]), r"^kept: rows \[1\] have no token to score; name the others"),
        (torch.tensor([0, 2]), r"^kept: rows \[0\] kept up to 9 ids.* with kept_cap=9 or more"),
    ],
)
def test_rows_that_have_no_set_to_take_are_refused(rows, told):
    kept = KeptSets(
        offsets=torch.tensor([0, 0, 0, 2]),
        token_ids=torch.tensor([7, 3]),
        log_masses=torch.zeros(2),
        sizes=torch.tensor([9, 0, 2]),
        whole=torch.tensor([False] * 3),
        overflow=torch.tensor([True, False, False]),
    )
    with pytest.raises(ValueError, match=told):
        KeptTokens.of_step(kept, rows)
    assert KeptTokens.of_step(kept, torch.tensor([2, 2])).token_ids.tolist() == [7, 3, 7, 3]


def _each_wrong(cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    """Score with one argument that differs on rank 1; return what this rank was told."""
    rank, texts = dist.get_rank(), []
    shard = VocabShard.even(V, rank, 2)
    for wrong, _ in cases:
        given = _arguments() | {"shard": shard}
        given["lm_head_weight"] = given["lm_head_weight"][shard.start : shard.stop]
        with pytest.raises(RankMismatch) as told:
            kept_logprobs(**given | (wrong if rank == 1 else {}))
        texts.append(str(told.value))
    scores = kept_logprobs(**_right(shard))
    assert scores.logprobs.isfinite().all(), "the next call is right"
    return texts


def _right(shard: VocabShard) -> dict[str, Any]:
    given = _arguments() | {"shard": shard}
    return given | {"lm_head_weight": given["lm_head_weight"][shard.start : shard.stop]}


ON_ONE_RANK: list[tuple[dict[str, Any], str]] = [
    ({"hidden_states": torch.ones(3, D)}, "hidden_states: numbers: must be the same on every rank"),
    (
        {
            "hidden_states": torch.ones(3, D).double(),
            "lm_head_weight": torch.zeros(10, D).double(),
        },
        "hidden_states: dtype: must be the same on every rank, got rank 0: torch.float32, rank 1: "
        "torch.float64",
    ),
    (
        {
            "hidden_states": torch.ones(1, D),
            "token_ids": torch.tensor([5]),
            "kept": KeptTokens.from_lists([[5]]),
            "temperature": 1.0,
        },
        "hidden_states: shape: must be the same on every rank, got rank 0: [3, 4], rank 1: [1, 4]",
    ),
    ({"hidden_states": torch.ones(2, D)}, "rank 1: token_ids: expected a tensor [2]"),
    ({"token_ids": torch.tensor([3, 2, 0])}, "token_ids: numbers: must be the same"),
    (
        {"kept": KeptTokens.from_lists([[3, 5], None, [0]])},
        "kept: offsets: numbers: must be the same",
    ),
    (
        {"kept": KeptTokens.from_lists([[5, 3], None, [19, 0, 7]])},
        "kept: token_ids: numbers: must be the same on every rank, got rank 0: digest ",
    ),
    ({"temperature": 0.8}, "temperature: numbers: must be the same on every rank"),
    ({"logit_scale": 2.0}, "logit_scale: must be the same on every rank"),
    ({"logit_softcap": 2.0}, "logit_softcap: must be the same on every rank"),
    ({"shard": None}, "rank 1: shard: expected a VocabShard on each of several ranks"),
    ({"shard": VocabShard(0, 10)}, "shard: the ranks' shards must tile"),
    ({"lm_head_weight": None}, "rank 1: lm_head_weight: expected a floating tensor"),
    (
        {"lm_head_weight": torch.zeros(10, D).to_sparse()},
        "rank 1: lm_head_weight: expected a dense",
    ),
    ({"lm_head_weight": torch.zeros(10, D, device="meta")}, "rank 1: "),
    ({"hidden_states": torch.zeros(3, D).to_sparse()}, "rank 1: hidden_states: expected a dense"),
    ({"temperature": 10**400}, "rank 1: temperature: expected 1e-05 to 1.27e+30, got inf"),
    (
        {"temperature": "0.7"},
        "rank 1: temperature: expected a number, or a tensor of float32 with one of each row, got "
        "'0.7'",
    ),
    ({"shard": (10, 20)}, "rank 1: shard: expected a VocabShard, got (10, 20)"),
    ({"group": 3}, "rank 1: group: expected a torch process group"),
    (
        {"hidden_states": _arguments()["hidden_states"].requires_grad_()},
        "gradient of hidden_states: must be the same on every rank, got rank 0: False",
    ),
]


def test_every_rank_is_told_of_what_is_wrong_on_one():
    for texts in run_ranks(2, _each_wrong, ON_ONE_RANK):
        for text, (_, told) in zip(texts, ON_ONE_RANK, strict=True):
            assert told in text


def _whole_weight(given: dict[str, Any]) -> str:
    with pytest.raises(RankMismatch) as told:
        kept_logprobs(**given, shard=VocabShard.even(V, dist.get_rank(), 2))
    return str(told.value)


def _score_alone() -> str:
    """Rank 1 does not come."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    told = ""
    if rank == 0:
        with pytest.raises(PeerLost) as lost:
            kept_logprobs(**_right(VocabShard.even(V, 0, 2)))
        told = str(lost.value)
        store.set("told", "")
    store.wait(["told"])
    return told


def test_a_rank_that_does_not_score_is_looked_for():
    told, _ = run_ranks(2, _score_alone, group_timeout_s=1)
    assert told.startswith("kept_logprobs: rank 1 did not answer. If all ranks live, look for an e")


def test_a_whole_weight_on_every_rank_is_refused():
    for text in run_ranks(2, _whole_weight, _arguments()):
        assert "rank 0 and rank 1 hold the same 20 rows" in text


def test_a_dtensor_of_hidden_states_is_refused():
    from torch.distributed.tensor import DTensor

    class Given(DTensor):
        pass

    states: Tensor = torch.Tensor._make_subclass(Given, torch.zeros(3, D))  # type: ignore
    with pytest.raises(
        TypeError, match=r"^hidden_states: got a DTensor; .* hidden_states.full_tensor\(\)"
    ):
        kept_logprobs(**_arguments() | {"hidden_states": states, "group": "alone"})


@pytest.mark.parametrize("name", ["hidden_states", "lm_head_weight", "temperature"])
def test_a_tangent_of_forward_mode_is_refused(name):
    given = _arguments() | {"group": "alone"}
    with forward_ad.dual_level():
        given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(ValueError, match=rf"^{name}: has a tangent of .*; pass {name}.detach"):
            kept_logprobs(**given)
        assert kept_logprobs(**given | {name: given[name].detach()}).logprobs.isfinite().all()


@pytest.mark.parametrize("name", ["hidden_states", "lm_head_weight"])
@pytest.mark.parametrize("learns", ["hidden_states", "lm_head_weight"])
def test_a_tensor_of_inference_mode_is_refused_where_gradients_are_wanted(name, learns):
    given = _arguments() | {"group": "alone"}
    given[learns].requires_grad_()
    with torch.inference_mode():
        given[name] = given[name].clone().requires_grad_(name == learns)
    with pytest.raises(ValueError, match=rf"^{name}: is a tensor of inference mode, .* {name}.cl"):
        kept_logprobs(**given)
    with torch.no_grad():
        assert kept_logprobs(**given).logprobs.isfinite().all()
    given[name] = given[name].clone()
    (gradient,) = torch.autograd.grad(kept_logprobs(**given).logprobs.sum(), given[learns])
    assert gradient.any()


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transforms_of_functions_are_refused(transform):
    """They hand wrappers to the call, which have no memory."""
    given = _arguments() | {"group": "alone"}
    states = given.pop("hidden_states")
    scores = transform(lambda own: kept_logprobs(own, **given).logprobs.sum())
    with pytest.raises(RuntimeError, match=r"^hidden_states: has no numbers of its own inside a "):
        scores(states.expand(2, -1, -1) if transform is torch.vmap else states)


def test_the_sets_of_several_steps_follow_one_another():
    first, second = KeptTokens.from_lists([[7, 3], None]), KeptTokens.from_lists([[1], [2, 9, 4]])
    both = KeptTokens.cat([first, second])
    expected = KeptTokens.from_lists([[7, 3], None, [1], [2, 9, 4]])
    for name in ("offsets", "token_ids", "whole"):
        assert torch.equal(getattr(both, name), getattr(expected, name))
    with pytest.raises(ValueError, match=r"^parts: expected at least one KeptTokens, got none"):
        KeptTokens.cat([])
    with pytest.raises(TypeError, match=r"^parts: expected a list of KeptTokens, got \[None\]"):
        KeptTokens.cat([None])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "ids",
    [
        *(7, [7.9], [2**70], [True, False], [[7], [3]], "73"),
        *(torch.tensor([7.9]), torch.ones(V).bool()),
    ],
)
def test_what_lists_no_ids_is_no_set(ids):
    with pytest.raises(TypeError, match=r"^sets\[1\]: expected a sequence of token ids, or None"):
        KeptTokens.from_lists([[7, 3], ids])


def test_sets_of_lists_are_made_in_half_the_time_of_torch():
    lists = [list(range(500)) for _ in range(100)]

    def quickest(make: Callable[[], object]) -> float:
        return min(timeit.repeat(make, number=1, repeat=5))

    of_torch = quickest(lambda: [torch.tensor(ids) for ids in lists])
    assert quickest(lambda: KeptTokens.from_lists(lists)) < of_torch / 2


def test_a_sparse_tensor_is_no_set():
    with pytest.raises(ValueError, match=r"^sets\[1\]: expected a dense tensor, got one of "):
        KeptTokens.from_lists([[7, 3], torch.tensor([1, 0]).to_sparse()])


def test_a_step_without_sets_is_told_how_to_ask_for_them():
    with pytest.raises(TypeError, match=r"^kept: expected the KeptSets .* built with kept_cap="):
        KeptTokens.of_step(None)  # type: ignore[arg-type]


def test_tensors_without_numbers_and_devices_that_are_not_here_are_told_of():
    with pytest.raises(ValueError, match=r"^temperature: is on the meta device, so it has no num"):
        kept_logprobs(**_arguments() | {"temperature": torch.tensor(1.0, device="meta")})
    kept = KeptTokens.from_lists([[3]])
    parts = (part.to("meta") for part in (kept.offsets, kept.token_ids, kept.whole))
    with pytest.raises(ValueError, match=r"^kept: is on the meta device, so it has no ids; build"):
        KeptTokens(*parts)
    with pytest.raises(ValueError, match=r"^device: torch has no 'gpu' here \("):
        KeptTokens.from_lists([[3]], device="gpu")


def test_a_weight_on_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch):
    """Kernels start on the current GPU, and would read the memory of another."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"^lm_head_weight: is on cuda:1, .* is cuda:0; call"):
        kept_logprobs(**_arguments() | {"lm_head_weight": OnAnotherGpu(V, D)})
