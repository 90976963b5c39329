"""Threads, forked children and scratch memory of the native kernels change no word."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys

import numpy as np
import pytest
import torch

from tests.support.commands import run_command
from tests.support.screening import (
    Problem,
    assert_same_words,
    backends,
    problem,
    requests,
    words,
)
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.backends.numba_.kernels import threads
from tpsample.backends.numba_.kernels.compiling import jit
from tpsample.backends.numba_.kernels.head import plain_rows
from tpsample.core import word

SIZES = ((300, 5, 24), (1000, 2, 40), (130, 9, 7))


def cases(which: str = "fp32"):
    """Samplers of several sizes, plain and with stored logits, and the words of the definition."""
    for v, b, d in SIZES:
        case, params = problem("normal", v, b, d), requests(b)
        for changes in ({}, {"top_k": 5}, {"logprobs": 1, "top_p": 0.9}):
            params[-1] = requests(b, **changes)[-1]
            batch = SamplingBatch.from_params(params, vocab_size=v)
            definition, native = backends(case, VocabShard(0, v), which)
            step = case.hidden_states, batch, torch.arange(b), 2
            yield native, step, words(definition, *step)[0]


def check(made) -> None:
    for _ in range(2):  # interleaved, so that scratch memory is that of a larger step
        for native, step, expected in [*made, *reversed(made)]:
            assert torch.equal(words(native, *step)[0][0], expected[0])


def test_samplers_take_turns():
    check(list(cases()))


@pytest.mark.parametrize("which", ["fp32", "int8"])
def test_two_threads(two_threads, which):
    assert threads.threads_for(100) == 2
    check(list(cases(which)))


_sleep = ctypes.CDLL(None).usleep
_sleep.argtypes, _sleep.restype = [ctypes.c_uint], ctypes.c_int


@jit(in_parts=True, allocates=True)
def meet(first, last, part, arguments):
    """Note the range of a part, and wait up to a minute until the other one has come."""
    ranges, spins = arguments[0], 0
    ranges[part, 0], ranges[part, 1] = first, last
    while ranges[1 - part, 1] == 0 and spins < 60_000:
        _sleep(1000)
        spins += 1
    ranges[part, 2] = ranges[1 - part, 1] > 0


def test_two_threads_take_parts_at_once():
    ranges = np.zeros((2, 3), np.int64)
    assert threads.has_teams
    threads.in_ranges(meet, 3, 10, 2, ranges)
    assert ranges.tolist() == [[3, 6, 1], [6, 10, 1]]


@jit(in_parts=True, allocates=True)
def note_or_fail(first, last, part, arguments):
    """Note that a part ran; one of them fails."""
    ran, failing = arguments
    ran[part] += last - first
    if part == failing:
        raise ValueError("a part")


@pytest.mark.parametrize("has_teams", [True, False], ids=["team", "no team"])
def test_an_error_of_a_part_is_raised_after_all_parts(monkeypatch, has_teams):
    monkeypatch.setattr(threads, "has_teams", has_teams)
    for failing in range(3):
        ran = np.zeros(3, np.int64)
        with pytest.raises(ValueError, match="a part"):
            threads.in_ranges(note_or_fail, 3, 13, 3, ran, failing)
        assert ran.tolist() == [3, 3, 4]


TEAM_OF_ONE = """
import torch
from tests.backends.numba_.test_launch import cases, check
from tpsample.backends.numba_.kernels import threads

torch.set_num_threads(2)
threads.THREAD_WORK = 1
assert threads.threads_for(100) == 2
check(list(cases()))
print("same")
"""


def test_a_team_of_one_leaves_no_part():
    """OpenMP may give fewer threads than were asked for."""
    limits = {"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "2"}
    found = run_command(sys.executable, "-c", TEAM_OF_ONE, env=limits)
    assert found.stdout == "same\n", found.stderr


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("which", ["fp32", "int8"])
def test_flushed_subnormal_numbers_change_no_word(monkeypatch, count, which):
    """The mode of `torch.set_flush_denormal` is that of one thread."""
    monkeypatch.setattr(threads, "THREAD_WORK", 1)
    g = torch.Generator().manual_seed(3)
    weight, hidden = torch.randn(300, 24, generator=g) * 1e-39, torch.randn(4, 24, generator=g)
    case = Problem(weight, hidden * 1e38)  # logits up to 1
    before = torch.get_num_threads()
    for changes in ({}, {"top_k": 5}, {"logprobs": 1, "top_p": 0.9}):
        batch = SamplingBatch.from_params(requests(4, **changes), vocab_size=300)
        definition, native = backends(case, VocabShard(0, 300), which)
        step = case.hidden_states, batch, torch.arange(4), 2
        expected = words(definition, *step)[0]
        torch.set_num_threads(count)
        try:
            assert torch.set_flush_denormal(True), "a processor that flushes nothing"
            found = words(native, *step)[0]
            assert (weight[0] * 1).eq(0).all(), "a thread has another mode than before"
        finally:
            torch.set_flush_denormal(False)
            torch.set_num_threads(before)
        assert_same_words(found, expected, str(changes))


def _child(made, results) -> None:
    try:
        check(made)
        results.send("same")
    except BaseException as error:
        results.send(repr(error))


def test_a_forked_child_takes_all_parts_itself(two_threads):
    made = list(cases())  # OpenMP's do not survive a fork, so that a team would wait for ever
    check(made)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(made, sender), daemon=True)
    child.start()
    try:
        assert receiver.poll(120) and receiver.recv() == "same"
    finally:
        child.kill()
        child.join()


@jit(entry=True)
def rows_without_controls(head, index):
    """Find the rows whose logits are their products."""
    return plain_rows(head, index)


def test_a_request_with_penalties_leaves_the_other_rows_plain():
    """Tables that one request needs made steps of all rows twice as long."""
    case, plain = problem("normal", 300, 3, 24), SamplingParams()
    for changes, expected in (
        ({"frequency_penalty": 1.0}, [True, False, True]),
        ({"logit_bias": {5: 1.0}}, [True, False, True]),
        ({"bad_words": [[5]]}, [False] * 3),  # a mask has bits of every row
    ):
        params = [plain, SamplingParams(**changes), plain]
        batch = SamplingBatch.from_params(params, vocab_size=300)
        _, native = backends(case, VocabShard(0, 300))
        step = native.prepare(case.hidden_states, batch._view_of(3), torch.arange(3), 1)
        head = native._head_of(step.controls, given=False)
        assert rows_without_controls(head, np.arange(3)).tolist() == expected


def test_blocks_that_meet_two_of_the_state_have_the_controls_of_both():
    """The state of a shard has blocks of 64 ids from its first one on, and kernels of all ids."""
    shard = VocabShard(20, 300)
    definition, native = backends(problem("normal", 300, 2, 24), shard)
    hidden = problem("normal", 300, 2, 24).hidden_states
    for token in range(20, 300, 9):
        params = [SamplingParams(seed=0, logit_bias={token: 100.0}), SamplingParams(seed=1)]
        step = hidden, SamplingBatch.from_params(params, vocab_size=300), torch.arange(2)
        (found,), (expected,) = words(native, *step)[0], words(definition, *step)[0]
        assert found.equal(expected), f"the bias of id {token}"


def test_drafted_tokens_have_penalties_in_blocks_that_have_none():
    """A row has no tokens but its drafts. Each has a greater logit than the one before; it wins."""
    case = problem("normal", 300, 1, 24)
    _, native = backends(case, VocabShard(0, 300))
    drafts = 64 + (case.hidden_states @ case.weight[64:].T).topk(3).indices.flip(1)
    batch = SamplingBatch.from_params(
        [SamplingParams(seed=0, repetition_penalty=0.01)], vocab_size=300
    )
    step = case.hidden_states.expand(4, -1), batch._with_drafts(drafts), torch.arange(4)
    (found,), _ = words(native, *step)
    assert word.token_of(found)[1:].tolist() == drafts[0].tolist()


@pytest.mark.parametrize("control", ["bad_words", "logit_bias"])
def test_kept_sets_have_the_controls_of_any_part_of_a_block(control):
    """Without controls, a row's first three tokens would wait for its others to be seen."""
    case = problem("normal", 300, 2, 24)
    samplers = [
        LMHeadSampler(case.weight, backend=backend, group="alone") for backend in ("torch", "numba")
    ]
    logits = case.hidden_states @ case.weight.T
    for tokens in logits.topk(40).indices.T.tolist():
        values = [{"bad_words": [[token]], "logit_bias": {token: 0.1}}[control] for token in tokens]
        params = [SamplingParams(seed=0, top_k=3, **{control: value}) for value in values]
        batch = SamplingBatch.from_params(params, vocab_size=300, kept_cap=4)
        expected, found = (sampler(case.hidden_states, batch, 0).kept for sampler in samplers)
        assert found.token_ids.tolist() == expected.token_ids.tolist(), f"{control} of {tokens}"
        assert found.log_masses.tolist() == expected.log_masses.tolist(), f"{control} of {tokens}"
