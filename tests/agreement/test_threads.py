"""A second thread in a sampler is told so, as is a call in the middle of another of its thread, and
two samplers of one group take turns."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import calls as collective
from tests.support.calls import CALLS, V, batch_of, outcome, sampler_of
from tests.support.cases import Case, own_sampler
from tests.support.interrupts import Interrupt, interrupt_at
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
    sample_draft,
)
from tpsample.core import one_thread

BUSY = "sampler: a call is running in another thread"
INSIDE = "sampler: this call began in the middle of another one of this thread"
BUSY_BATCH = "batch: a call is running in another thread; give each thread a batch of its own"


def _while_in_a_step(
    sampler: LMHeadSampler, case: Case, call: Callable[[], object], *, threads: int
) -> str:
    """Return what a call in the middle of a step is told, which stays right.

    Args:
        threads: 2 for a call of another thread, 1 for one of the same.
    """
    inside, told = sampler.local.best_words, []

    def pause(*args: object, **named: object) -> None:
        if threads == 1:
            told.append(": ".join(outcome(call)))
        else:
            with ThreadPoolExecutor(1) as pool:
                told.append(": ".join(pool.submit(outcome, call).result()))
        inside(*args, **named)  # type: ignore[arg-type]

    sampler.local.best_words = pause  # type: ignore[method-assign]
    out = sampler(case.hidden_states, case.batch, case.positions)
    sampler.local.best_words = inside  # type: ignore[method-assign]
    assert torch.equal(out.token_ids, case.oracle().token_ids)
    return told[0]


@pytest.mark.parametrize(
    ("threads", "message"), [(2, f"{BUSY}; build a sampler per thread"), (1, INSIDE)]
)
def test_a_call_in_the_middle_of_another_is_told(threads, message):
    case = Case.make(40, 3)
    sampler = LMHeadSampler(case.weight, backend="torch")
    logits = torch.zeros(3, 40)
    calls: list[Callable[[], object]] = [
        lambda: sampler(case.hidden_states, case.batch, case.positions),
        lambda: sampler.sample_logits(logits, case.batch, case.positions),
        lambda: sampler.prompt_logprobs(case.hidden_states, torch.zeros(3).long()),
        *(sampler.compare, sampler.refresh, sampler.reset, sampler.close, sampler.check),
        sampler.warm_up,
    ]
    for call in calls:
        told = _while_in_a_step(sampler, case, call, threads=threads)
        assert told.startswith(f"RuntimeError: {message}"), told
    out = sampler(case.hidden_states, case.batch, case.positions)
    assert torch.equal(out.token_ids, case.oracle().token_ids)


SECOND = LMHeadSampler(torch.ones(40, 8), backend="torch")
CHANGES: dict[str, Callable[[SamplingBatch], object]] = {
    "put": lambda batch: batch.put(0, SamplingParams(top_k=1)),
    "free": lambda batch: batch.free(0),
    "drop": lambda batch: batch.drop(2),
    "add": lambda batch: batch.add(SamplingParams()),
    "permute": lambda batch: batch.permute([2, 1, 0]),
    "append": lambda batch: batch.append(torch.zeros(3).long()),
    "a step": lambda batch: SECOND(torch.ones(3, 8), batch, 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_batch_does_not_change_in_the_middle_of_a_step_of_its_thread(name):
    """As in the handler of a signal, which would leave the step with rows of both."""
    sampler, states = LMHeadSampler(torch.randn(40, 8), backend="torch"), torch.randn(3, 8)
    params = [SamplingParams(seed=row, presence_penalty=0.5) for row in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=40, max_rows=4)
    expected, inside, told = sampler(states, batch, 0).token_ids, sampler.local.best_words, []

    def pause(*args: object, **named: object) -> None:
        told.append(outcome(lambda: CHANGES[name](batch)))
        inside(*args, **named)  # type: ignore[arg-type]

    sampler.local.best_words = pause  # type: ignore[method-assign]
    assert torch.equal(sampler(states, batch, 0).token_ids, expected)
    ((kind, text),) = told
    assert kind == "RuntimeError"
    assert text.startswith("batch: this call came in the middle of another one of this thread")
    CHANGES[name](batch)


def test_a_call_that_was_interrupted_as_it_ended_is_not_in_the_way():
    case, within = Case.make(40, 3), one_thread.__file__
    sampler = LMHeadSampler(case.weight, backend="torch")
    take = partial(sampler, case.hidden_states, case.batch, case.positions)
    for instruction in range(1, interrupt_at(None, take, within) + 1):
        with pytest.raises(Interrupt):
            interrupt_at(instruction, take, within)
        assert torch.equal(take().token_ids, case.oracle().token_ids), instruction


def test_a_second_thread_in_a_batch_is_told():
    case = Case.make(40, 3)
    sampler, other = (LMHeadSampler(case.weight, backend="torch") for _ in range(2))
    slots = SamplingBatch.of_slots(4, vocab_size=40)
    for slot, params in enumerate(case.params):
        slots.put(slot, params)
    rows, three = slots.select(torch.arange(3)), torch.zeros(3).long()
    logits = torch.zeros(3, 40)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: other(case.hidden_states, rows, case.positions),
        "sample_draft": lambda: sample_draft(other, logits, rows, 0, 0),
        "definition": lambda: reference.sample(logits, rows, 0),
        "draw_seeds": lambda: other.draw_seeds(rows),
        "prepare": lambda: rows.prepare(VocabShard(0, 40)),
        "copy": lambda: copy.copy(slots),
        "pickle": lambda: pickle.dumps(rows),
        "append": lambda: rows.append(three),
        "select": lambda: slots.select(three),
        "put": lambda: slots.put(3, SamplingParams()),
        "free": lambda: slots.free(2),
    }
    inside = sampler.local.best_words
    for name, call in calls.items():
        told: list[str] = []

        def pause(*args: object, call=call, told=told, **named: object) -> None:
            with ThreadPoolExecutor(1) as pool:
                told.append(str(pool.submit(call).exception()))
            inside(*args, **named)  # type: ignore[arg-type]

        sampler.local.best_words = pause  # type: ignore[method-assign]
        out = sampler(case.hidden_states, rows, case.positions)
        assert torch.equal(out.token_ids, case.oracle().token_ids)
        assert told == [BUSY_BATCH], name
    for call in calls.values():  # and afterwards, none is in the way
        call()


@contextmanager
def _busy(batch: SamplingBatch) -> Iterator[None]:
    """Let another thread of this rank be in a step of the batch, by a sampler of its own."""
    sampler = LMHeadSampler(torch.zeros(V, 1), backend="torch", group="alone")
    inside, began, end = sampler.local.best_words, threading.Event(), threading.Event()

    def pause(*args: object, **named: object) -> None:
        began.set()
        end.wait()
        inside(*args, **named)  # type: ignore[arg-type]

    sampler.local.best_words = pause  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(sampler, torch.zeros(batch.rows, 1), batch, 0)
        began.wait()
        try:
            yield
        finally:
            end.set()
            step.result()


WITH_A_BATCH = [name for name, arguments in CALLS.items() if "batch" in arguments]


def _calls_while_rank_0_is_busy() -> list[str]:
    """Return what every call is told whose batch is busy on rank 0 alone; the next one is right."""
    sampler, told = sampler_of(), []
    for name in WITH_A_BATCH:
        made = partial(collective.call, sampler, name, batch=(batch := batch_of()))
        with _busy(batch) if dist.get_rank() == 0 else nullcontext():
            told.append(f"{name}: {outcome(made)}")
        made()
    return told


def test_a_batch_that_is_busy_on_one_rank_is_told_to_every_rank():
    assert len(WITH_A_BATCH) == 5
    error = "RankMismatch", f"rank 0: {BUSY_BATCH}"
    expected = [f"{name}: {error}" for name in WITH_A_BATCH]
    assert run_ranks(2, _calls_while_rank_0_is_busy, group_timeout_s=10) == [expected, expected]


@pytest.mark.parametrize("steps", [60, *long(2000)])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_threads_draw_their_own_tokens_or_are_told(backend, steps):
    """Four threads with batches of their own over one sampler."""
    if backend == "numba":
        pytest.importorskip("numba", reason="needs the extra cpu")
    case = Case.make(1000, 8)
    sampler, begin = LMHeadSampler(case.weight, backend=backend), threading.Barrier(4)

    def serve(number: int) -> tuple[int, int]:
        params = [SamplingParams(top_p=0.9, seed=100 * number + row) for row in range(8)]
        batch = SamplingBatch.from_params(params, vocab_size=1000)
        mine = Case(case.hidden_states, case.weight, params, case.positions)
        right, refused, expected = 0, 0, mine.oracle().token_ids
        begin.wait()
        for _ in range(steps):
            try:
                out = sampler(mine.hidden_states, batch, mine.positions)
            except RuntimeError as error:
                assert str(error).startswith(BUSY)
                refused += 1
            else:
                assert torch.equal(out.token_ids, expected)
                right += 1
        return right, refused

    with ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(serve, number) for number in range(4)]]
    print(f"{backend}, right and refused steps by thread: {found}")
    assert sum(right + refused for right, refused in found) == 4 * steps
    assert any(right for right, _ in found)


def _two_threads(steps: int) -> tuple[int, int]:
    """Return how many steps of a sampler per thread were right, and how many were told to differ.

    The ranks' threads take turns in any order.
    """
    case = Case.make(40, 3)
    samplers = [own_sampler(case.weight) for _ in range(2)]
    expected, begin = case.oracle().token_ids, threading.Barrier(2)

    def serve(sampler: LMHeadSampler) -> tuple[int, int]:
        right = told = 0
        begin.wait()
        for _ in range(steps):
            try:
                out: SampleOutput = sampler(case.hidden_states, case.batch, case.positions)
            except RankMismatch as error:
                assert str(error).startswith("sampler: every rank must call the same one")
                told += 1
            else:
                assert torch.equal(out.token_ids, expected)
                right += 1
        return right, told

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(serve, samplers))
    return sum(right for right, _ in found), sum(told for _, told in found)


@pytest.mark.parametrize("steps", [40, *long(1000)])
def test_samplers_of_two_threads_over_one_group_take_turns(steps):
    """A call that meets another sampler's on the other rank is told so, on both ranks alike."""
    first, second = run_ranks(2, _two_threads, steps)
    print(f"2 ranks, right steps and those that were told to differ: {first}, {second}")
    assert first == second and sum(first) == 2 * steps


def _build_beside_steps(times: int) -> tuple[int, int, int]:
    """Return how many steps were right and how many builds were done, and how many were told.

    One thread steps and another one builds; on each rank they take turns in any order.
    """
    case = Case.make(40, 3)
    sampler, expected, begin = (
        own_sampler(case.weight),
        case.oracle().token_ids,
        threading.Barrier(2),
    )

    def serve(call: Callable[[], object]) -> tuple[int, int]:
        done = told = 0
        begin.wait()
        for _ in range(times):
            try:
                call()
            except RankMismatch as error:
                assert str(error).startswith(
                    ("call: every rank must make the same call", "sampler: ")
                )
                told += 1
            else:
                done += 1
        return done, told

    def step() -> None:
        out = sampler(case.hidden_states, case.batch, case.positions)
        assert torch.equal(out.token_ids, expected)

    with ThreadPoolExecutor(2) as pool:
        (steps, told), (builds, others) = pool.map(serve, [step, lambda: own_sampler(case.weight)])
    return steps, builds, told + others


def test_a_thread_that_builds_and_one_that_steps_take_turns():
    """A step that meets a build on the other rank is told so, on both ranks alike."""
    first, second = run_ranks(2, _build_beside_steps, 20, group_timeout_s=10)
    print(f"2 ranks, right steps, builds, and calls that were told to differ: {first}, {second}")
    assert first == second and sum(first) == 40


ALSO = {"compare": LMHeadSampler.compare, "reset": LMHeadSampler.reset}


def _calls_while_a_thread_of_rank_1_steps() -> list[str]:
    """Return what calls are told that come, on rank 1 alone, in the middle of another thread's."""
    sampler, told = sampler_of(), []
    expected, inside, refuse = collective.step(sampler), sampler.local.best_words, threading.Event()
    real = sampler.agreement._refuse_thread

    def refusing(how: Callable[[Exception], object]) -> None:
        refuse.set()
        real(how)

    sampler.agreement._refuse_thread = refusing  # type: ignore[assignment]
    for name in (*CALLS, *ALSO):
        call = (
            partial(ALSO[name], sampler)
            if name in ALSO
            else partial(collective.call, sampler, name)
        )
        refuse.clear()
        with ThreadPoolExecutor(1) as pool:
            second: list[Any] = []

            def pause(*args: object, call=call, second=second, **named: object) -> None:
                second.append(pool.submit(outcome, call))
                refuse.wait()
                inside(*args, **named)  # type: ignore[arg-type]

            if dist.get_rank() == 1:
                sampler.local.best_words = pause  # type: ignore[method-assign]
            assert collective.step(sampler) == expected
            sampler.local.best_words = inside  # type: ignore[method-assign]
            found = second[0].result() if second else outcome(call)
            told.append(f"{name}: {found}")
        assert collective.step(sampler) == expected
    return told


def test_a_sampler_that_is_busy_on_one_rank_is_told_to_every_rank():
    way_out = "build a sampler per thread, or queue the calls"
    error = "RankMismatch", f"rank 1: {BUSY}; {way_out}"
    expected = [f"{name}: {error}" for name in (*CALLS, *ALSO)]
    found = run_ranks(2, _calls_while_a_thread_of_rank_1_steps, group_timeout_s=10)
    assert found == [expected, expected]


def _two_threads_of_one_sampler(steps: int) -> tuple[int, int]:
    """Return how many steps of two threads were right, and how many were refused on both ranks."""
    case = Case.make(40, 3)
    sampler, begin = own_sampler(case.weight), threading.Barrier(2)
    expected = case.oracle().token_ids

    def serve(_: int) -> tuple[int, int]:
        batch = SamplingBatch.from_params(case.params, vocab_size=40)
        right = refused = 0
        begin.wait()
        for _ in range(steps):
            try:
                out = sampler(case.hidden_states, batch, case.positions)
            except RankMismatch as error:
                assert BUSY in str(error)
                refused += 1
            else:
                assert torch.equal(out.token_ids, expected)
                right += 1
        return right, refused

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(serve, range(2))
    return first[0] + second[0], first[1] + second[1]


@pytest.mark.parametrize("steps", [40, *long(1000)])
def test_two_threads_of_a_sampler_step_or_are_refused_on_both_ranks(steps):
    """Each call is one exchange, whichever thread of a rank comes first, so none is waited for."""
    first, second = run_ranks(2, _two_threads_of_one_sampler, steps, group_timeout_s=10)
    print(f"2 ranks, right steps and refused ones: {first}, {second}")
    assert first == second and sum(first) == 2 * steps and first[0]
