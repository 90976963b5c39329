"""A second thread in a sampler is told so, as is a call in the middle of another of its thread. Two
samplers of one group take turns."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.support import calls as collective
from tests.support.calls import CALLS, V, batch_of, outcome, sampler_of
from tests.support.cases import Case, own_sampler
from tests.support.interrupts import Interrupt, before_each_instruction, interrupt_at
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
from tpsample.core import caller_warning, handles, one_thread
from tpsample.core.caller_warning import warn
from tpsample.core.handles import handle_of, living
from tpsample.request.step_batch import StepBatch

BUSY = "sampler: a call is running in another thread"
INSIDE = "sampler: this call began in the middle of another one of this thread"
BUSY_BATCH = "batch: a call is running in another thread; give each thread a batch of its own"


@contextmanager
def _in_the_middle(sampler: LMHeadSampler, call: Callable[[], object]) -> Iterator[None]:
    """Let every step of a sampler make a call before it computes its words."""
    inside = sampler.local.best_words

    def pause(*args: object, **named: object) -> None:
        call()
        inside(*args, **named)  # type: ignore[arg-type]

    with patch.object(sampler.local, "best_words", pause):
        yield


def _told_in_a_step(
    sampler: LMHeadSampler, case: Case, batch: StepBatch, call: Callable[[], object], threads: int
) -> tuple[str, str]:
    """Return what a call in the middle of a step is told, which stays right.

    Args:
        threads: 2 for a call of another thread, 1 for one of the same.
    """
    found = []

    def tell() -> None:
        if threads == 1:
            found.append(outcome(call))
            return
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(outcome, call).result())

    with _in_the_middle(sampler, tell):
        out = sampler(case.hidden_states, batch, case.positions)
    assert torch.equal(out.token_ids, case.oracle().token_ids)
    (told,) = found
    return told


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
        *(sampler.warm_up, lambda: sampler.draw_seeds(case.batch)),
    ]
    for call in calls:
        kind, told = _told_in_a_step(sampler, case, case.batch, call, threads)
        assert kind == "RuntimeError" and told.startswith(message), told
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
    "select": lambda batch: batch.select(torch.arange(3)),
    "a step": lambda batch: SECOND(torch.ones(3, 8), batch, 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_batch_does_not_change_in_the_middle_of_a_step_of_its_thread(name):
    """As in the handler of a signal, which would leave the step with rows of both."""
    case = Case.make(40, 3)
    sampler = LMHeadSampler(case.weight, backend="torch")
    params = [replace(each, presence_penalty=0.5) for each in case.params]
    case = replace(case, params=params, tokens=[[], [], []])
    batch = SamplingBatch.from_params(params, vocab_size=40, max_rows=4)
    kind, text = _told_in_a_step(sampler, case, batch, lambda: CHANGES[name](batch), 1)
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


def test_a_call_that_was_interrupted_while_another_sampler_sent_is_not_in_the_way():
    case = Case.make(40, 3)
    sampler = LMHeadSampler(case.weight, backend="torch")
    take = partial(sampler, case.hidden_states, case.batch, case.positions)
    sampler.agreement._turn = Mock(acquire=Mock(side_effect=Interrupt))
    with pytest.raises(Interrupt):
        take()
    sampler.agreement._turn = None
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(take).result().token_ids, case.oracle().token_ids)


@pytest.mark.parametrize("look", [partial(warn, "something"), living], ids=["warn", "living"])
@pytest.mark.filterwarnings("ignore:something")
def test_a_sampler_that_another_thread_builds_is_not_in_the_way_of_a_look_at_all(look):
    made: list[one_thread.OneCall] = []

    def make() -> None:
        if len(made) < 100:  # to make one runs instructions of these files, too
            made.append(one_thread.OneCall("call", "", lambda: None))
            handle_of(made[-1])

    for within in (weakref.__file__, caller_warning.__file__, handles.__file__):
        before_each_instruction(make, look, within)
    assert made


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
    for name, call in calls.items():
        _, told = _told_in_a_step(sampler, case, rows, call, 2)
        assert told == BUSY_BATCH, name
    for call in calls.values():  # and afterwards, none is in the way
        call()


@contextmanager
def _busy(batch: SamplingBatch) -> Iterator[None]:
    """Let another thread of this rank be in a step of the batch, by a sampler of its own."""
    sampler = LMHeadSampler(torch.zeros(V, 1), backend="torch", group="alone")
    began, end = threading.Event(), threading.Event()

    def pause() -> None:
        began.set()
        end.wait()

    with _in_the_middle(sampler, pause), ThreadPoolExecutor(1) as pool:
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


def _race(calls: list[Callable[[], object]], times: int, told: str) -> tuple[int, int]:
    """Make each call so often in a thread of its own.

    Args:
        told: a pattern of the errors that may come.

    Returns:
        How many calls were made, and how many raised such an error.
    """
    begin = threading.Barrier(len(calls))

    def serve(call: Callable[[], object]) -> tuple[int, int]:
        made = 0
        begin.wait()
        for _ in range(times):
            try:
                call()
            except (RuntimeError, RankMismatch) as error:
                assert re.match(told, str(error)), error
            else:
                made += 1
        return made, times - made

    with ThreadPoolExecutor(len(calls)) as pool:
        made, refused = map(sum, zip(*pool.map(serve, calls), strict=True))
    print(f"{made} calls were made, {refused} were refused")
    return made, refused


@pytest.mark.parametrize("steps", [60, *long(2000)])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_threads_draw_their_own_tokens_or_are_told(backend, steps):
    """Four threads with batches of their own over one sampler."""
    if backend == "numba":
        pytest.importorskip("numba", reason="needs the extra cpu")
    case = Case.make(1000, 8)
    sampler = LMHeadSampler(case.weight, backend=backend)

    def step_of(number: int) -> Callable[[], None]:
        params = [SamplingParams(top_p=0.9, seed=100 * number + row) for row in range(8)]
        batch = SamplingBatch.from_params(params, vocab_size=1000)
        expected = replace(case, params=params).oracle().token_ids

        def step() -> None:
            out = sampler(case.hidden_states, batch, case.positions)
            assert torch.equal(out.token_ids, expected)

        return step

    made, _ = _race([step_of(number) for number in range(4)], steps, BUSY)
    assert made


RACES = {
    "steps of another sampler": "sampler: every rank must call the same one",
    "builds": "sampler: |call: every rank must make the same call",
    "steps of the same sampler": f".*{BUSY}",
}
"""Calls of a second thread, and what both are told whose calls meet others on another rank."""


def _two_threads(second: str, times: int) -> tuple[int, int]:
    """Let one thread step and another one make other calls, in any order on each rank."""
    case = Case.make(40, 3)
    sampler, expected = own_sampler(case.weight), case.oracle().token_ids

    def step(sampler: LMHeadSampler = sampler) -> None:
        out: SampleOutput = sampler(case.hidden_states, case.batch, case.positions)
        assert torch.equal(out.token_ids, expected)

    other: Callable[[], object] = step
    if second == "builds":
        other = partial(own_sampler, case.weight)
    elif second == "steps of another sampler":
        other = partial(step, own_sampler(case.weight))
    return _race([step, other], times, RACES[second])


@pytest.mark.parametrize(
    ("second", "times"),
    [
        *(("steps of another sampler", 40), ("builds", 20), ("steps of the same sampler", 40)),
        *long(("steps of another sampler", 1000), ("steps of the same sampler", 1000)),
    ],
)
def test_two_threads_of_each_rank_take_turns_or_both_ranks_are_told(second, times):
    """Each call is one exchange, whichever thread of a rank comes first, so none is waited for."""
    one, other = run_ranks(2, _two_threads, second, times, group_timeout_s=10)
    assert one == other and one[0]


ALSO = {"compare": LMHeadSampler.compare, "reset": LMHeadSampler.reset}


def _calls_while_a_thread_of_rank_1_steps() -> list[str]:
    """Return what calls are told that come, on rank 1 alone, in the middle of another thread's."""
    sampler, told = sampler_of(), []
    expected, refuse = collective.step(sampler), threading.Event()
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

            def pause(call=call, second=second, pool=pool) -> None:
                second.append(pool.submit(outcome, call))
                refuse.wait()

            with _in_the_middle(sampler, pause) if dist.get_rank() == 1 else nullcontext():
                assert collective.step(sampler) == expected
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
