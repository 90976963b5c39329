"""The launches of a step, and the memory that it leaves: words are zero between steps."""

import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab.calls import Calls, counted
from tests.support import host_reads
from tests.support.cases import Case, own_sampler
from tests.support.commands import run_command
from tests.support.local_step import tile
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, compiled
from tpsample.request.step import Inputs, Step


def _second_step(sampler: LMHeadSampler, case: Case, num_samples: int | None = None) -> Calls:
    """Return what a step into an output of an earlier one launches; its tokens are checked."""
    batch, expected = case.batch, case.oracle(num_samples)
    out = sampler(case.hidden_states, batch, case.positions, num_samples=num_samples)
    out.token_ids.fill_(-2)
    given = (case.hidden_states, batch, case.positions)
    launches = counted(lambda: sampler(*given, num_samples=num_samples, out=out))
    assert torch.equal(out.token_ids, expected.token_ids)
    return launches


@pytest.mark.parametrize("num_samples", [None, 2])
def test_one_rank_launches_two_kernels_and_nothing_else(num_samples):
    """No other operator: nothing is allocated, filled, copied or read by the host."""
    case = Case.make(301, 5)
    launches = _second_step(LMHeadSampler(case.weight), case, num_samples)
    assert launches.kernels == ["lm_head", "decode"]
    assert launches.operators == []


def test_the_compiled_operator_adds_its_outputs_alone():
    """Call what `torch.compile` calls in place of the sampler."""
    case = Case.make(301, 5)
    sampler, batch = LMHeadSampler(case.weight), case.batch
    given = (case.hidden_states, batch.temperature, batch.seed, case.positions)
    given = (*given, None, None, 0, sampler.handle, compiled.PLAIN)
    inside = compiled._sample._init_fn  # a dispatch mode does not look into the operator
    inside(*given)
    token_ids = torch.empty(0)

    def call() -> None:
        nonlocal token_ids
        token_ids, _ = inside(*given)

    launches = counted(call)
    assert torch.equal(token_ids, case.oracle().token_ids)
    assert launches.kernels == ["lm_head", "decode"]
    assert launches.operators == ["aten.empty.memory_format"] * 3  # tokens, status, seeds


def _on_a_rank(case: Case, exchange: str, chunks: int) -> Calls:
    host_reads.meet_on_devices()
    sampler = own_sampler(case.weight, exchange=exchange, chunks=chunks, backend="triton")
    local: Any = sampler.local
    local.tile = tile(16, 8, 16)  # tiles for every chunk
    launches = _second_step(sampler, case)
    dist.barrier()
    sampler.close()
    return launches


@pytest.mark.parametrize(
    ("exchange", "chunks", "kernels", "operators"),
    [
        *long(("collective", 1, ["lm_head", "decode"], ["c10d.allreduce_.default"])),
        ("collective", 3, ["lm_head"] * 3 + ["decode"], ["c10d.allreduce_.default"] * 3),
        ("p2p", 1, ["lm_head", "decode"], ["c10d.recv_.default", "c10d.send.default"]),
        *long(("peer", 1, ["lm_head", "peer_finish"], [])),
        ("peer", 3, ["lm_head", "peer_finish"], []),
    ],
)
def test_ranks_launch_two_kernels_and_their_exchange(exchange, chunks, kernels, operators):
    expected = Calls(kernels, operators, [])
    assert run_ranks(2, _on_a_rank, Case.make(99, 5), exchange, chunks) == [expected] * 2


def test_the_count_sees_what_it_forbids():
    """An int for the positions fills a tensor, a missing output allocates one."""
    case = Case.make(37, 2)
    sampler = LMHeadSampler(case.weight)
    launches = counted(lambda: sampler(case.hidden_states, case.batch, 7))
    assert "aten.fill_.Scalar" in launches.operators
    assert "aten.empty.memory_format" in launches.operators


@pytest.mark.parametrize("chunks", [1, 2])
def test_words_are_zero_between_steps(chunks):
    case = Case.make(301, 5)
    sampler = LMHeadSampler(case.weight, chunks=chunks)
    assert torch.equal(
        sampler(case.hidden_states, case.batch, case.positions).token_ids, case.oracle().token_ids
    )
    assert (sampler.exchange.words == 0).all()
    fewer = case.rows([4, 2])
    out = sampler(fewer.hidden_states, fewer.batch, fewer.positions, num_samples=2)
    assert torch.equal(out.token_ids, fewer.oracle(2).token_ids)
    assert (sampler.exchange.words == 0).all()


def test_a_step_that_never_finished_leaves_nothing_to_the_next():
    """Words of the first step are larger than any of the second."""
    case = Case.make(301, 5)
    sampler = LMHeadSampler(case.weight)
    louder = Case(case.hidden_states * 64, case.weight, case.params, case.positions)
    abandoned = sampler.pipeline.start(Inputs(louder.hidden_states), louder.batch, louder.positions)
    assert (sampler.exchange.words[..., :5] > 0).all()
    out = sampler(case.hidden_states, case.batch, case.positions)
    assert torch.equal(out.token_ids, case.oracle().token_ids)
    assert isinstance(abandoned, Step)

    sampler.pipeline.start(Inputs(louder.hidden_states), louder.batch, louder.positions)
    sampler.exchange.reset()
    assert (sampler.exchange.words == 0).all()


def test_the_host_overhead_is_measured():
    """In a process that compiles; how long it takes is not asserted."""
    command = ("-m", "benchmarks.questions.host_overhead", "--steps", 20, "--rows", 4)
    done = run_command(sys.executable, *command)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    steps = {name: its for name, its in found.items() if isinstance(its, dict) and "calls" in its}
    assert all(each > 0 for its in steps.values() for each in its.values())
    plain = steps.pop("plain")
    assert plain["calls"] >= plain["files"]
    assert len(steps) == 6 and all(its["calls"] > plain["calls"] for its in steps.values())
