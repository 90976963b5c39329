"""gloo ranks: bitwise the oracle's tokens, whatever the ranks, shards, chunks and exchange."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpsample.exchange
from benchmarks.lab.virtual_ranks import even_shards
from tests.support.cases import Case, own_sampler, uneven_shards
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
)
from tpsample.ranks.roll_call import RollCall

CASES = [(1, 1000), (2, 49152), (2, 7), (3, 1000), (4, 7), (8, 1000)]
EVERY = itertools.product([1, 2, 3, 4, 8], [49152, 50257, 151936, 1000, 7])
ROWS = 6
EXCHANGES = ("swap", "collective", "p2p")


def _take(exchange: str) -> str:
    """The argument for an exchange; "collective" and "p2p" are then those of GPUs, over gloo."""
    tpsample.exchange.SWAPS_ON = ("cpu",) if exchange == "swap" else ()
    return "collective" if exchange == "swap" else exchange


def _sample_all_ways(case: Case, shards: list[VocabShard], expected: torch.Tensor) -> int:
    """Every exchange and chunk count; rows permuted, padded with strangers, and split.

    Args:
        expected: int64 [ROWS, samples]; a step of one sample draws the first.
    """
    shard = shards[dist.get_rank()]
    weight = case.weight[shard.start : shard.stop]
    steps = 0
    for exchange in EXCHANGES:
        for chunks in (1, 4):
            sampler = LMHeadSampler(
                weight, vocab_size=case.vocab_size, shard=shard, exchange=_take(exchange),
                chunks=chunks, backend="torch",
            )  # fmt: skip
            padded = Case.make(case.vocab_size, 2 * ROWS).beside(case)
            order = [3, 0, 5, 2, 4, 1]
            for rows, index, out_rows in (
                (case, list(range(ROWS)), slice(None)),
                (case.rows(order), order, slice(None)),
                (case.rows([4, 5]), [4, 5], slice(None)),
                (padded, list(range(ROWS)), slice(2 * ROWS, None)),
            ):
                out = sampler(rows.hidden_states, rows.batch, rows.positions)
                assert out.token_ids[out_rows].tolist() == expected[index, 0].tolist(), (
                    f"{exchange}, {chunks} chunks"
                )
                assert (out.status == Status.OK).all()
                steps += 1
            several = (case.hidden_states, case.batch, case.positions)
            out = sampler(*several, num_samples=expected.shape[1])
            assert torch.equal(out.token_ids, expected)
    return steps


@pytest.mark.parametrize(
    ("world_size", "vocab_size"), [*CASES, *long(*(case for case in EVERY if case not in CASES))]
)
def test_tokens_are_the_oracles(world_size, vocab_size):
    case = Case.make(vocab_size, ROWS)
    cut = even_shards if vocab_size in (49152, 151936) else uneven_shards
    shards = cut(vocab_size, world_size)
    expected = case.oracle(num_samples=3).token_ids
    assert torch.equal(expected[:, 0], case.oracle().token_ids)
    steps = run_ranks(world_size, _sample_all_ways, case, shards, expected)
    assert steps == [24] * world_size


def _bytes_sent(exchange: str, chunks: int) -> int:
    sampler = LMHeadSampler(
        torch.zeros(4, 2),
        vocab_size=16,
        exchange=_take(exchange),
        chunks=chunks,
        max_rows=256,
        backend="torch",
    )
    return sampler.exchange.bytes_sent(256)


def test_bytes_sent():
    assert run_ranks(4, _bytes_sent, "swap", 2) == [3 * 8 * 256] * 4
    assert run_ranks(4, _bytes_sent, "p2p", 1) == [3 * 8 * 256] * 4
    assert run_ranks(4, _bytes_sent, "p2p", 2) == [2 * 3 * 8 * 256] * 4
    assert run_ranks(4, _bytes_sent, "collective", 1) == [2 * 3 * 8 * 256 // 4] * 4


PROCESSED = {"logprobs_mode": "processed_logprobs"}
MESSAGES: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain": ({}, 6, 1),
    "top_k": ({"top_k": 50, "top_p": 0.9}, 6, 1),
    "top_k of many rows": ({"top_k": 256}, 129, 2),
    "top_p": ({"top_p": 0.9}, 6, 2),
    "logprobs": ({"logprobs": 3, "logprob_token_ids": [7, 299]}, 6, 2),
    "logprobs of samples": ({"logprobs": 3}, 6, 2),
    "logprobs of greedy rows": ({"logprobs": 0, "temperature": 0.0}, 6, 2),
    "logprobs of top_k": ({"logprobs": 3, "top_k": 50}, 6, 2),
    "processed logprobs of top_p": ({"top_p": 0.9, "logprobs": 3, **PROCESSED}, 1, 3),
    "processed logprobs of many rows": ({"top_p": 0.9, "logprobs": 3, **PROCESSED}, 6, 4),
    "logprobs of an id": ({"logprobs": 3, "logprob_token_ids": [7], "top_k": 50}, 6, 3),
}
"""Requests, how many rows ask them, and messages to every peer."""


def _messages(exchange: str) -> dict[str, tuple[int, bool]]:
    """By kind, how often a step waits for the other ranks, one latency each, and is it right?"""
    generator = torch.Generator().manual_seed(4)
    weights = [torch.rand(100, 2, generator=generator) for _ in range(dist.get_world_size())]
    own = weights[dist.get_rank()]
    sampler = LMHeadSampler(own, vocab_size=300, exchange=exchange, backend="torch")
    alone = LMHeadSampler(torch.cat(weights), group="alone", backend="torch")
    found = {}
    for kind, (changes, rows, _) in MESSAGES.items():
        params = [SamplingParams(seed=seed, **changes) for seed in range(rows)]
        batch = SamplingBatch.from_params(params, vocab_size=300)
        hidden_states = torch.ones(rows, 2)
        samples = 3 if kind == "logprobs of samples" else None
        sampler(hidden_states, batch, 0)
        with mock.patch.object(RollCall, "wait", autospec=True, side_effect=RollCall.wait) as waits:
            out = sampler(hidden_states, batch, 1, num_samples=samples)
        its, right = alone(hidden_states, batch, 1, num_samples=samples), True
        if its.logprobs is not None:
            fields = "token_ids", "values", "ranks", "entropies"
            right = all(getattr(out.logprobs, f).equal(getattr(its.logprobs, f)) for f in fields)
        found[kind] = waits.call_count, right and torch.equal(out.token_ids, its.token_ids)
    return found


@pytest.mark.parametrize("exchange", ["collective", "p2p"])
def test_a_step_is_one_message_to_every_peer_and_with_top_p_two(exchange):
    expected = {kind: (messages, True) for kind, (_, _, messages) in MESSAGES.items()}
    assert run_ranks(3, _messages, exchange) == [expected] * 3


def _left_alone(case: Case, rank_1_at: int) -> bool:
    """A step of other positions, or of other rows, on rank 1: nothing is returned or changed."""
    sampler = own_sampler(case.weight)
    out = sampler(case.hidden_states, case.batch, case.positions)
    before = [tensor.clone() for tensor in (out.token_ids, out.status, out.seeds)]
    other = case.rows([0, 2]) if rank_1_at < 0 and dist.get_rank() == 1 else case
    given = out if other is case else None
    with pytest.raises(RankMismatch, match=r"^(positions|hidden_states rows): "):
        at = other.positions + rank_1_at * dist.get_rank()
        sampler(other.hidden_states, other.batch, at.clamp(min=0), out=given)
    now = (out.token_ids, out.status, out.seeds)
    same = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    again = sampler(case.hidden_states, case.batch, case.positions).token_ids
    return same and torch.equal(again, before[0])


@pytest.mark.parametrize("rank_1_at", [3, -1], ids=["positions", "rows"])
def test_a_step_that_differs_changes_nothing_and_the_next_is_right(rank_1_at):
    assert run_ranks(2, _left_alone, Case.make(100, 4), rank_1_at) == [True, True]
