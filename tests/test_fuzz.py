"""Random rows against the oracle: no id outside the vocabulary, no rank that disagrees.

`pytest -m long` samples a million rows; each test prints what it compared.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import tpsample.exchange.choice
from tests.agreement import NEAR_TIE
from tests.fuzz import Problem, problem
from tests.ranks import run_ranks
from tpsample import LMHeadSampler, SampleOutput, reference
from tpsample.exchange.peer_memory import VirtualWorld

EXCHANGES = ("collective", "p2p", "two_level")


def _differences(found: Problem, out: SampleOutput, near_tie: float) -> tuple[int, int]:
    """(rows that are not the oracle's, ids outside the vocabulary)."""
    case = found.case
    logits = reference.logits(case.hidden_states, case.weight, **found.head)
    how = {"philox_rounds": found.philox_rounds}
    expected = reference.sample(
        logits, case.batch, case.positions, num_samples=found.num_samples, **how
    )
    tokens, wanted = (x.view(len(logits), -1) for x in (out.token_ids, expected.token_ids))
    wrong = (tokens != wanted).any(dim=1) | (out.status != expected.status)
    outside = (tokens < -1) | (tokens >= case.vocab_size)
    for row in wrong.nonzero().flatten().tolist() if near_tie else ():
        scores = [
            reference.scores(logits, case.batch, case.positions, sample=s, **how)[row]
            for s in range(tokens.shape[1])
        ]
        apart = [s[w] - s[t] for s, w, t in zip(scores, wanted[row], tokens[row], strict=True)]
        wrong[row] = bool(torch.stack(apart).abs().max() >= near_tie)
    return int(wrong.sum()), int(outside.sum())


def _fuzz(first_seed: int, num_rows: int, max_rows: int) -> tuple[int, int, int]:
    """Sample random problems until the ranks have sampled `num_rows` rows together.

    Every step is compared across ranks by digest, and with the oracle by one rank in turn.

    Returns:
        Rows, rows that are not the oracle's, ids outside the vocabulary; over all ranks' turns.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pick = random.Random(first_seed)
    rows = turn = wrong = outside = 0
    while rows < num_rows:
        found = problem(pick, world_size, max_rows)
        shard, head = found.shards[rank], dict(found.head)
        if head["bias"] is not None:
            head["bias"] = head["bias"][shard.start : shard.stop]
        exchange = pick.choice(EXCHANGES)
        tpsample.exchange.choice.socket.gethostname = lambda: "ab"[rank % 2]
        case = found.case
        sampler = LMHeadSampler(
            case.weight[shard.start : shard.stop],
            vocab_size=case.vocab_size,
            shard=shard,
            exchange=exchange,
            chunks=found.chunks,
            philox_rounds=found.philox_rounds,
            max_rows=3 * max_rows,
            backend="torch",
            **head,
        )
        out = sampler(case.hidden_states, case.batch, case.positions, num_samples=found.num_samples)
        sampler.compare()
        sampler.close()
        if turn % world_size == rank:
            differ, beyond = _differences(found, out, near_tie=0.0)
            if differ or beyond:
                print(f"seed {first_seed}, problem {turn}: {differ} rows, {exchange}")
            wrong, outside = wrong + differ, outside + beyond
        rows, turn = rows + len(out.status), turn + 1
    return rows, wrong, outside


def _require_none_wrong(results: list[tuple[int, int, int]], what: str) -> None:
    rows = results[0][0]
    wrong, outside = (sum(result[i] for result in results) for i in (1, 2))
    line = f"{rows} rows, {wrong} differ from the oracle, {outside} ids outside the vocabulary"
    print(f"fuzz, {what}: {line}, 0 steps differ between ranks")
    assert (wrong, outside) == (0, 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_rows_on_ranks(world_size):
    results = run_ranks(world_size, _fuzz, world_size, 500, 64)
    _require_none_wrong(results, f"{world_size} ranks")


def _virtual(first_seed: int, num_rows: int) -> tuple[int, int, int]:
    """The kernels and `peer`, several ranks in this process, in the interpreter."""
    pick = random.Random(first_seed)
    rows = wrong = outside = 0
    while rows < num_rows:
        world_size = pick.choice([1, 2, 3, 5])
        found = problem(pick, world_size, 16, plain=True)
        case = found.case
        world = VirtualWorld(found.shards)
        samplers = [
            LMHeadSampler(
                case.weight[shard.start : shard.stop],
                group=ranks,
                chunks=found.chunks,
                philox_rounds=found.philox_rounds,
            )
            for shard, ranks in zip(found.shards, world.ranks, strict=True)
        ]
        outputs = world.step(
            samplers,
            case.hidden_states,
            case.batch,
            case.positions,
            num_samples=found.num_samples,
        )
        assert all(torch.equal(out.token_ids, outputs[0].token_ids) for out in outputs)
        differ, beyond = _differences(found, outputs[0], NEAR_TIE)
        rows, wrong, outside = rows + len(case.params), wrong + differ, outside + beyond
    return rows, wrong, outside


def test_random_rows_through_the_kernels():
    _require_none_wrong([_virtual(1, 40)], "virtual ranks, interpreter")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tenth", range(10))
def test_a_million_random_rows_on_ranks(tenth):
    world_size = 2 + tenth % 3
    arguments = (1000 + tenth, 100_000, 512)
    results = run_ranks(world_size, _fuzz, *arguments, timeout_s=3500, group_timeout_s=300)
    _require_none_wrong(results, f"tenth {tenth}, {world_size} ranks")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_random_rows_through_the_kernels():
    _require_none_wrong([_virtual(1000, 10_000)], "virtual ranks, interpreter")


def test_the_suite_sees_a_wrong_token_and_an_impossible_one():
    found = problem(random.Random(5), 1, 8)
    case = found.case
    logits = reference.logits(case.hidden_states, case.weight, **found.head)
    how = {"num_samples": found.num_samples, "philox_rounds": found.philox_rounds}
    out = reference.sample(logits, case.batch, case.positions, **how)
    assert _differences(found, out, 0.0) == (0, 0)
    out.token_ids.view(-1)[0] = case.vocab_size
    assert _differences(found, out, 0.0) == (1, 1)
