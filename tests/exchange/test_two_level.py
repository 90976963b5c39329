"""Ranks of several hosts, by false host names: the oracle's tokens, bytes and lost ranks."""

import logging
import socket
from dataclasses import replace
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpsample.agreement.construction
import tpsample.exchange
import tpsample.exchange.peer
from tests.support.cases import Case, own_sampler
from tests.support.limits import slowness
from tests.support.ranks import same_on_ranks
from tests.support.tiers import long
from tpsample import (
    LMHeadSampler,
    PeerLost,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    reference,
)
from tpsample.exchange import make_exchange
from tpsample.exchange.base import levels
from tpsample.exchange.inboxes import SharedFiles
from tpsample.ranks.process import ProcessRanks, ranks_of
from tpsample.settings import Settings

HOSTS = {
    "2x2": "aabb",
    "2x4": "aaaabbbb",
    "interleaved": "abab",
    "uneven": "aaabb",
    "three hosts": "aabc",
    "one host": "aaa",
    "alone each": "ab",
}
FILTERED = [
    SamplingParams(seed=1, top_k=5, logprobs=3),
    SamplingParams(seed=2, top_p=0.7),
    SamplingParams(seed=3, min_p=0.1, logprobs=1),
    SamplingParams(seed=4, top_k=20, top_p=0.9),
    SamplingParams(temperature=0),
    SamplingParams(seed=5),
]


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_every_column_has_a_rank_of_every_host_and_every_rank_a_column(hosts):
    columns = {tuple(levels(hosts, rank)[1]) for rank in range(len(hosts))}
    assert sorted(rank for column in columns for rank in column) == list(range(len(hosts)))
    for column in columns:
        assert {hosts[rank] for rank in column} == set(hosts)
    for rank, host in enumerate(hosts):
        assert levels(hosts, rank)[0] == [r for r, other in enumerate(hosts) if other == host]


def _sampler(case: Case, hosts: str, backend: str = "torch", **arguments) -> LMHeadSampler:
    rank = dist.get_rank()
    socket.gethostname = lambda: hosts[rank]
    options = {"exchange": "two_level", "backend": backend, **arguments}
    return own_sampler(case.weight, even=False, **options)


def _sample(case: Case, filtered: list, hosts: str) -> tuple[list, list, list]:
    rows = []
    for chunks, swaps_on in ((1, ("cpu",)), (3, ())):  # as on CPUs, then as on GPUs, over gloo
        tpsample.exchange.SWAPS_ON = swaps_on
        sampler = _sampler(case, hosts, chunks=chunks)
        out = sampler(case.hidden_states, case.batch, case.positions)
        several = sampler(case.hidden_states, case.batch, case.positions, num_samples=3)
        assert torch.equal(several.token_ids[:, 0], out.token_ids)
        sampler.compare()
        rows.append(out.token_ids.tolist())
    batch = SamplingBatch.from_params(filtered, vocab_size=case.vocab_size)
    out = sampler(case.hidden_states, batch, case.positions)
    probs = out.logprobs
    return rows, out.token_ids.tolist(), probs.token_ids.tolist()


@pytest.mark.parametrize("hosts", ["uneven", "one host", *long("2x2", "2x4")])
def test_tokens_filters_and_logprobs_are_the_oracles(hosts):
    case, filtered, hosts = Case.make(300, 6), FILTERED, HOSTS[hosts]
    rows, tokens, listed = same_on_ranks(len(hosts), _sample, case, filtered, hosts)
    batch = SamplingBatch.from_params(filtered, vocab_size=300)
    expected = case.oracle().token_ids.tolist()
    logits = reference.logits(case.hidden_states, case.weight)
    oracle = reference.sample(logits, batch, case.positions)
    assert rows == [expected] * 2
    assert tokens == oracle.token_ids.tolist()
    assert listed == oracle.logprobs.token_ids.tolist()


def _summing(hosts: str) -> list[str]:
    """A library of one of both levels adds up integers where their maximum is asked for."""
    real, told = ProcessRanks.start_all_reduce, []
    for level in ("all", "inside", "between"):

        def sum_of(ranks: ProcessRanks, tensor: Any, op: Any, level: str = level) -> Any:
            wrong = level in ranks._name and op == dist.ReduceOp.MAX
            return real(ranks, tensor, dist.ReduceOp.SUM if wrong else op)

        ProcessRanks.start_all_reduce = sum_of
        tpsample.exchange.SWAPS_ON = ()
        exchange = "collective" if level == "all" else "two_level"
        with pytest.raises(RankMismatch) as raised:
            _sampler(Case.make(60, 3), hosts, exchange=exchange)
        told.append(str(raised.value))
    return told


def test_a_library_that_returns_sums_for_maxima_is_named_when_a_sampler_is_built():
    told = same_on_ranks(4, _summing, "aabb")
    for text, size in zip(told, (4, 2, 2), strict=True):
        assert f"should return [{2**62 + size - 1}, {size}], this library returned [" in text
        assert 'pass exchange="p2p"' in text


def _differ(case: Case, hosts: str, culprit: int) -> str:
    sampler = _sampler(case, hosts)
    at = case.positions + (dist.get_rank() == culprit)
    with pytest.raises(RankMismatch, match="positions: row 0") as error:
        sampler(case.hidden_states, case.batch, at)
    tokens = sampler(case.hidden_states, case.batch, case.positions).token_ids
    assert torch.equal(tokens, case.oracle().token_ids)
    return str(error.value)


@pytest.mark.parametrize(("hosts", "culprit"), [("aabb", 1), *long(("aaabb", 2), ("aabc", 3))])
def test_a_call_that_differs_on_one_host_is_told_to_all(hosts, culprit):
    assert same_on_ranks(len(hosts), _differ, Case.make(60, 3), hosts, culprit)


def _no_shared_memory() -> tuple[list[str], str]:
    """Rank 1 cannot map its peers' memory; once with, once without a way out."""
    told = BufferingHandler(9)
    logging.getLogger("tpsample").addHandler(told)
    ranks = ranks_of(None)
    if ranks.rank == 1:

        def refuse(*_):
            raise RuntimeError("planted")

        SharedFiles.map_file = refuse
    settings = Settings(ranks, torch.zeros(1, 1), 1, VocabShard(0, 1), exchange="peer", max_rows=4)
    assert make_exchange(replace(settings, may_fall_back=True)).name == "collective"
    with pytest.raises(RankMismatch) as error:
        make_exchange(settings)
    return [record.getMessage() for record in told.buffer], str(error.value)


def test_auto_takes_collective_on_all_ranks_together_if_peer_cannot_be_set_up():
    warned, raised = same_on_ranks(2, _no_shared_memory)
    assert raised == "rank 1: planted"
    assert warned == [f'exchange: "peer" cannot be set up, using "collective": {raised}']


def _peer_inside(case: Case, hosts: str) -> tuple[list, list, str, str]:
    """`peer` inside the hosts: tokens, filters, then rank 3 stays away from a step."""
    sampler = _sampler(case, hosts, backend="triton", chunks=2, on_failed=9)
    exchange: Any = sampler.exchange
    exchange.timeout_s = 3.0 * slowness()
    kind = type(exchange).__name__
    tokens = [sampler(case.hidden_states, case.batch, case.positions).token_ids.tolist()]
    several = sampler(case.hidden_states, case.batch, case.positions, num_samples=2)
    tokens.append(several.token_ids.tolist())
    batch = SamplingBatch.from_params(FILTERED, vocab_size=case.vocab_size)
    filtered = sampler(case.hidden_states, batch, case.positions).token_ids.tolist()
    sampler.check()
    before = sampler.counters()["bytes_sent"]
    for steps in (1, 2, 3):
        sampler(case.hidden_states[:1], batch.select(torch.tensor([5])), 0)
        # A word of each chunk inside the host; a word and 4 integers on lost ranks between hosts.
        assert sampler.counters()["bytes_sent"] - before == steps * 8 * (2 + 1 + 4)
    lost = ""
    if dist.get_rank() == 3:
        # It takes part between the hosts, but its kernel pushes nothing inside its own.
        sampler.local.best_words = lambda *_: None
    out = sampler(case.hidden_states, case.batch, case.positions)
    assert (out.token_ids == 9).all() and (out.status == Status.PEER_LOST).all()
    with pytest.raises(PeerLost) as error:
        sampler.check()
    lost = f"{error.value.ranks}"
    if dist.get_rank() == 3:
        del sampler.local.best_words
    sampler.reset()
    tokens.append(sampler(case.hidden_states, case.batch, case.positions).token_ids.tolist())
    sampler.check()
    return tokens, filtered, kind, lost


def test_peer_inside_the_hosts():
    case = Case.make(60, 6)
    tokens, filtered, kind, lost = same_on_ranks(4, _peer_inside, case, "aabb")
    assert kind == "PeerExchange"
    plain = case.oracle().token_ids.tolist()
    assert tokens == [plain, case.oracle(num_samples=2).token_ids.tolist(), plain]
    batch = SamplingBatch.from_params(FILTERED, vocab_size=60)
    logits = reference.logits(case.hidden_states, case.weight)
    assert filtered == reference.sample(logits, batch, case.positions).token_ids.tolist()
    # Rank 3 itself is lost to both ranks of its host, and the other host hears of it.
    assert lost == "(3,)"


def _old_torch() -> list[str]:
    told = BufferingHandler(9)
    logging.getLogger("tpsample").addHandler(told)
    if dist.get_rank() == 1:
        tpsample.agreement.construction.versions = lambda: {"torch": "1.0"}
    LMHeadSampler(torch.zeros(3, 2), vocab_size=6, backend="torch")
    return [record.getMessage() for record in told.buffer]


def test_versions_that_differ_are_a_warning_on_every_rank():
    (warned,) = same_on_ranks(2, _old_torch)
    assert "versions differ between ranks" in warned and "1.0" in warned
