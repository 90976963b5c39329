"""Batches that differ between ranks: the next step says so, and in which row and field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import B, D, V, batch_of, call, outcome, params_of, sampler_of, step
from tests.support.fields import VALUES, one_with
from tests.support.ranks import same_on_ranks
from tests.support.rows import bitmask_of
from tpsample import SamplingBatch, SamplingParams, VocabShard

# Changes of a batch, which no rank hears of before the next step; the right one, then wrong ones.
CHANGES: dict[str, list[Callable[[SamplingBatch], Any]]] = {
    "append": [
        lambda batch: batch.append(torch.tensor([3, 4])),
        lambda batch: batch.append(torch.tensor([3, 4, 5])),
        lambda batch: batch.append(torch.tensor([3])),
        lambda batch: batch.append([3, 4]),
        lambda batch: batch.append(torch.tensor([3.0, 4.0])),
    ],
    "add": [
        lambda batch: batch.add(SamplingParams(seed=5)),
        lambda batch: batch.add(SamplingParams(seed=5, stop_token_ids=[V])),
        lambda batch: batch.add({"seed": 5}),
        lambda batch: batch.add(SamplingParams(seed=5, logprob_token_ids=[V])),
        lambda batch: batch.add(SamplingParams(seed=5), prompt_token_ids=["x"]),
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
        lambda batch: batch.permute([0, True]),
    ],
    "update": [
        lambda batch: batch.update(1, SamplingParams(top_k=2, seed=2)),
        lambda batch: batch.update(2, SamplingParams()),
        lambda batch: batch.update(1, None),
        lambda batch: batch.update(1, SamplingParams(min_tokens=1, stop_token_ids=[1])),
        lambda batch: batch.update("1", SamplingParams()),
        lambda batch: batch.update(1, SamplingParams(), output_token_ids=[V]),
        lambda batch: batch.update(1, SamplingParams(), output_token_ids=[1.0]),
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
    sampler, found = sampler_of(), []
    right, *wrong = CHANGES[name]
    for change in [*wrong, lambda batch: None]:
        params = params_of(presence_penalty=0.5)
        batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=3)
        step(sampler, batch)
        if dist.get_rank() == 0:
            right(batch)
        elif change is not None:
            refused = outcome(lambda b=batch, c=change: c(b))
            assert refused[0] in ("TypeError", "ValueError") or change(batch) is None
        found.append(outcome(lambda b=batch: step(sampler, b)))
        if dist.get_rank() == 1:
            right(batch)
        found.append(("tokens", str(step(sampler, batch))))
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_refused_or_forgotten_on_one_rank_is_told_by_the_next_step(name):
    found = same_on_ranks(2, _changing, name)
    told = {
        "append": "tokens so far",
        "add": "hidden_states rows",
        "drop": "hidden_states rows",
        "permute": "batch: row|seeds",
        "update": "batch: row 1: ",
        "temperature": "temperatures",
        "seed": "seeds",
    }.get(name, name)
    for kind, text in found[::2]:
        assert kind == "RankMismatch", f"{kind}: {text}"
        assert any(text.startswith(way) for way in told.split("|")), text


def _unprepared() -> list[tuple[str, str]]:
    """Of a batch that was appended to, the shard's counts are known on rank 0 alone."""
    sampler, found = sampler_of(), []
    for wrong in (None, VocabShard(0, V + 1), (0, V)):
        batch = SamplingBatch.from_params(params_of(presence_penalty=1.0), vocab_size=V)
        if dist.get_rank() == 0:
            batch.prepare(sampler.shard)
        elif wrong is not None:
            outcome(lambda b=batch, shard=wrong: b.prepare(shard))
        batch.append(torch.tensor([1, 2]))
        found.append(outcome(lambda b=batch: step(sampler, b)))
    return found


def test_a_shard_that_one_rank_did_not_prepare_is_told_to_all():
    for kind, text in same_on_ranks(2, _unprepared):
        assert kind == "RankMismatch"
        assert text.startswith("rank 1: batch: tokens were appended before a sampler of")


def _unseeded() -> tuple[list[tuple[str, str]], list[list[int]]]:
    """Calls that are refused because one rank's rows have seeds and the other's wait for theirs."""
    sampler, rank, found, seeds = sampler_of(), dist.get_rank(), [], []
    waiting = [SamplingParams()] * B
    pairs = [
        (params_of(), waiting),
        ([SamplingParams(), SamplingParams()], [SamplingParams(), SamplingParams(seed=0)]),
        ([SamplingParams(), SamplingParams(seed=0)], [SamplingParams(seed=0), SamplingParams()]),
    ]
    for pair in pairs:
        for name in ("step", "verify", "sample_draft"):
            batch = batch_of(rows=pair[rank])

            def make(name: str = name, batch: SamplingBatch = batch) -> Any:
                if name == "step":
                    return step(sampler, batch)
                return call(sampler, name, batch=batch)

            found.append(outcome(make))
            out = sampler(torch.ones(B, D), batch_of(rows=waiting), 0)
            seeds.append(out.seeds.tolist())
            sampler.compare()
    return found, seeds


def test_a_refused_call_draws_no_seeds():
    """Later rows without a seed are given the same one on every rank."""
    found, seeds = same_on_ranks(2, _unseeded)
    assert len({seed for pair in seeds for seed in pair}) == 2 * len(seeds)
    for kind, text in found:
        assert kind == "RankMismatch" and text.startswith("rows without a seed"), text


FIELDS = one_with(name for name in VALUES if name != "seed")
# Seeds that are equal modulo 2^61 - 1, or to a hash that takes -1 for -2.
SEEDS = [(2**64 - 1, 2**64 - 2), (5, 5 + 2**61 - 1), (0, 2**61 - 1), (-1, -2), (7, 2**63 + 7)]
SAME = [
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
    ({"logit_bias": {1: 2, 3: 4.0}}, {"logit_bias": {3: 4, 1: 2.0}}),
    ({"bad_words": [[1, 2]]}, {"bad_words": ((1, 2),)}),
]
PAIRS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    *(({}, each, [f"batch: row 1: {field}: " for field in each]) for each in FIELDS),
    *(({"seed": one}, {"seed": other}, ["seeds: "]) for one, other in SEEDS),
    *((one, other, [""]) for one, other in SAME),
]
"""Fields of the second request on rank 0 and on rank 1, and how ranks are told, or "" if not."""


def _pairs() -> list[tuple[str, str]]:
    """Return the texts for each pair, then for two pairs of positions, each before a right step,
    and for slots; at last one rank has drawn another seed before."""
    sampler, rank, found = sampler_of(), dist.get_rank(), []
    for one, other, _ in PAIRS:
        fields = {"seed": 2, **(other if rank else one)}
        batch = batch_of(rows=[params_of()[0], SamplingParams(**fields)])
        found.append(outcome(lambda b=batch: step(sampler, b)))
        step(sampler)
    for pair in ((0, 2**61 - 1), (2**62, 2**62 + 2**61 - 1)):
        positions = torch.tensor([pair[rank], 3])
        found.append(outcome(lambda p=positions: sampler(torch.ones(B, D), batch_of(), p)))
    slots = torch.tensor([rank, 1 - rank])
    found.append(outcome(lambda: sampler(torch.ones(B, D), batch_of().select(slots), 9)))
    if rank == 1:
        batch_of(rows=[SamplingParams()])._draw_seeds(sampler.settings.seeds)
    unseeded = batch_of(rows=[SamplingParams()] * B)
    return [*found, outcome(lambda: step(sampler, unseeded))]


def test_ranks_with_other_requests_seeds_or_positions_are_told_which():
    *found, slots, drawn = same_on_ranks(2, _pairs)
    positions = ({}, {}, ["positions: "])
    for (one, other, told), (kind, text) in zip([*PAIRS, *[positions] * 2], found, strict=True):
        assert kind == ("RankMismatch" if told[0] else "nothing raised"), (one, other, text)
        assert any(map(text.startswith, told)), text
    of_slots = "slots: row 0: must be the same on every rank, got rank 0: 0, rank 1: 1"
    assert slots == ("RankMismatch", of_slots)
    assert drawn[1].startswith("rows without a seed: ")
    assert "rank 0: [0, 1] after 0 drawn seeds, rank 1: [0, 1] after 1 drawn seeds" in drawn[1]


def _slots() -> list[tuple[str, str]]:
    """Return the texts of steps over slots whose requests, then masks differ between ranks."""
    sampler, rank = sampler_of(), dist.get_rank()
    found: list[tuple[str, str]] = []
    batch = SamplingBatch.of_slots(4, vocab_size=sampler.vocab_size)
    batch.put([0, 3], [SamplingParams(seed=1), SamplingParams(temperature=0, seed=0)])

    def take(slots: list[int]) -> None:
        rows = batch.select(torch.tensor(slots))
        if rank and batch.requests[2].top_k == 2:
            rows.grammar_bitmask = torch.full((B, -(-sampler.vocab_size // 32)), -1).int()
        found.append(outcome(lambda: sampler(torch.ones(B, D), rows, len(found))))

    if rank:
        batch.free(3)
    take([0, 3])
    batch.put(3, SamplingParams(seed=2, top_k=2 + rank))
    take([3, 0])
    batch.put([2, 3], [SamplingParams(seed=2, top_k=2)] * 2)
    take([3, 0])
    return found


def test_requests_of_a_selection_are_told_by_slot():
    empty, other, mask = same_on_ranks(2, _slots)
    same = "must be the same on every rank, got"
    assert empty == ("RankMismatch", f"batch: slot 3: request: {same} rank 0: one, rank 1: none")
    assert other == ("RankMismatch", f"batch: slot 3: top_k: {same} rank 0: 2, rank 1: 3")
    kind, text = mask
    assert kind == "RankMismatch"
    assert text.startswith(f"grammar_bitmask: {same} rank 0: None, rank 1: "), text
    assert "dict" not in text
