"""Threads, forked children and scratch memory of the native kernels change no word."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from tests.support.screening import backends, problem, requests, words
from tpsample import SamplingBatch, VocabShard
from tpsample.native import threads

SIZES = ((300, 5, 24), (1000, 2, 40), (130, 9, 7))


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "THREAD_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture(params=["OpenMP", "pool"])
def of(request, monkeypatch):
    if request.param == "pool":
        monkeypatch.setattr(threads, "_parallel", None)
    assert request.param == "pool" or threads._parallel is not None


def test_two_threads_take_ranges_at_once(of):
    both, seen = threading.Barrier(2, timeout=60), []

    def kernel(*call):
        both.wait()
        seen.append(call)

    threads.in_ranges(kernel, 3, 10, 2, lambda *call: call)
    assert sorted(seen) == [(3, 6, 0), (6, 10, 1)]


def test_an_error_of_a_thread_is_raised(of):
    def kernel(first, last, thread):
        if thread == 1:
            raise ValueError("second range")

    with pytest.raises(ValueError, match="second range"):
        threads.in_ranges(kernel, 3, 10, 2, lambda *call: call)


def _child(made, results) -> None:
    try:
        check(made)
        results.send("same")
    except BaseException as error:
        results.send(repr(error))


def test_a_forked_child_has_threads_of_its_own(two_threads):
    made = list(cases())  # those of OpenMP do not survive a fork
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
