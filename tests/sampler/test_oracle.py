"""The oracle against what others published and what can be worked out by hand.

Its kept sets are worked out in `tests/filters/test_kept_set.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.support import oracle
from tests.support.modules import imported_modules
from tests.support.oracle import Context, Request


def token(logits, request=None, context=None, **how) -> int:
    how = {"seed": 1, "position": 2} | how
    return oracle.draw(np.float32(logits), request or Request(), context, **how).token


def test_the_oracle_imports_nothing_of_the_library():
    # Both checkers import NumPy alone (test_vectors).
    checkers = "tests.support.noise_checker", "tests.support.masses_checker"
    imported = imported_modules(Path(oracle.__file__))
    ours = {name for name in imported if name.split(".")[0] in ("torch", "tpsample", "tests")}
    assert ours and all(name.startswith(checkers) for name in ours)


# -- the processed logits ----------------------------------------------------------------------

X = np.float32([1.0, -2.0, 3.0, 0.5])
INF = float("inf")


@pytest.mark.parametrize(
    ("request_", "context", "expected"),
    [
        ({"repetition_penalty": 2.0}, Context((1,), (2,)), [1, -4, 1.5, 0.5]),
        (
            {"repetition_penalty": 2.0, "repetition_scope": "output"},
            Context((1,), (2,)),
            [1, -2, 1.5, 0.5],
        ),
        ({"repetition_penalty": 2.0}, Context((-1, 4, 99)), [1, -2, 3, 0.5]),
        ({"frequency_penalty": 0.5}, Context((0,), (2, 2, 1)), [1, -2.5, 2, 0.5]),
        ({"presence_penalty": 0.5}, Context((0,), (2, 2, -1)), [1, -2, 2.5, 0.5]),
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": -2.0},
            Context((), (2,)),
            [1, -2, 2.5, 0.5],
        ),
        ({"logit_bias": {0: 1000.0, 1: -1000.0}}, Context(), [101, -102, 3, 0.5]),
        (
            {"logit_bias": {0: 9.0}, "allowed_token_ids": [2, 3]},
            Context(),
            [-INF, -INF, 3, 0.5],
        ),
        ({}, Context(grammar=(0b1010,)), [-INF, -2, -INF, 0.5]),
        ({"min_tokens": 2, "stop_token_ids": [2]}, Context((), (0,)), [1, -2, -INF, 0.5]),
        ({"min_tokens": 2, "stop_token_ids": [2]}, Context((), (0, -1, 0)), [1, -2, 3, 0.5]),
        (
            {"min_tokens": 2, "stop_token_ids": [2]},
            Context(grammar=(0b0100,)),
            [-INF, -INF, 3, -INF],
        ),
        (
            {"min_tokens": 1, "stop_token_ids": [2, 3], "allowed_token_ids": [2]},
            Context(),
            [-INF, -INF, 3, -INF],
        ),
        ({"bad_words": [[3]]}, Context(), [1, -2, 3, -INF]),
        ({"bad_words": [[0, 1, 2]]}, Context((0,), (1,)), [1, -2, 3, 0.5]),
        ({"bad_words": [[0, 1, 2]]}, Context((), (3, 0, 1)), [1, -2, -INF, 0.5]),
        ({"bad_words": [[1]], "allowed_token_ids": [0]}, Context(forced=1), [-INF, -2, -INF, -INF]),
        ({}, Context(forced=4), [-INF] * 4),
    ],
    ids=str,
)
def test_processed_logits_that_can_be_worked_out(request_, context, expected):
    found = oracle.process(X, Request(**request_), context)
    assert found.dtype == np.float32
    assert found.tolist() == expected


# -- status and the edges of fp32 --------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "request_", "expected"),
    [
        ([1, math.nan, 3], {}, (-1, oracle.NAN)),
        ([1, math.nan, 3], {"temperature": 0}, (-1, oracle.NAN)),
        ([1, math.nan, 3], {"allowed_token_ids": [0]}, (0, oracle.OK)),
        ([-INF] * 3, {}, (-1, oracle.EMPTY)),
        ([-INF] * 3, {"temperature": 0}, (-1, oracle.EMPTY)),
        ([1, INF, INF], {}, (1, oracle.OK)),
        ([1, INF, INF], {"top_k": 1, "top_p": 0.1}, (1, oracle.OK)),
        ([1, 3, 3], {"temperature": 0}, (1, oracle.OK)),
        ([1, 3, 2], {"temperature": 9.9e-6}, (1, oracle.OK)),
        ([-3e38, -3e38], {}, (-1, oracle.EMPTY)),  # scaled beyond fp32, below
        ([1e38, 2e38, 3e38], {"temperature": 1e-5}, (0, oracle.OK)),  # and above
        ([1e38, 2e38, 3e38], {"temperature": 1e-5, "top_k": 1}, (2, oracle.OK)),
    ],
    ids=str,
)
def test_rows_at_the_edges(logits, request_, expected):
    answer = oracle.draw(np.float32(logits), Request(**request_), seed=1, position=2)
    assert (answer.token, answer.status) == expected


# -- logprobs and verification -----------------------------------------------------------------


def test_logprobs_that_can_be_worked_out():
    x = np.log(np.float32([0.5, 0.25, 0.125, 0.125]))
    request = Request(logprobs=2, logprob_token_ids=[3], top_k=3)
    raw = oracle.report(oracle.draw(x, request, seed=1, position=2), request, [1])
    ids, values, ranks = zip(*raw.entries, strict=True)
    assert (ids, ranks) == ((1, 0, 1, 3), (2, 1, 2, 4))
    assert np.exp(values) == pytest.approx([0.25, 0.5, 0.25, 0.125], abs=1e-7)
    assert raw.entropy == pytest.approx(1.75 * math.log(2), abs=1e-6)

    request = Request(logprobs_mode="processed_logprobs", logprobs=1, top_k=2, temperature=0.5)
    processed = oracle.report(oracle.draw(x, request, seed=1, position=2), request, [0])
    assert [rank for *_, rank in processed.entries] == [1, 1]
    assert math.exp(processed.entries[0][1]) == pytest.approx(0.8, abs=1e-6)


def test_verification_is_plain_decoding_along_the_drafts():
    generator = np.random.default_rng(2)
    logits = [generator.normal(0, 1, 30).astype(np.float32) for _ in range(4)]
    request = Request(frequency_penalty=1.0, bad_words=[[5, 6]])
    context, plain = Context(), []
    for i, x in enumerate(logits):
        plain.append(oracle.draw(x, request, context, seed=9, position=40 + i).token)
        context = context.after(plain[-1:])
    how = {"seed": 9, "position": 40}
    for good in range(4):
        drafts = [t if i < good else (t + 1) % 30 for i, t in enumerate(plain[:3])]
        found = oracle.verify_coupled(logits, drafts, request, [Context()] * 4, **how)
        assert (found.num_accepted, found.tokens) == (good, plain[: good + 1])
    found = oracle.verify_coupled(logits, [plain[0], -1, plain[2]], request, [Context()] * 4, **how)
    assert found.num_accepted == 1


def test_bits_are_the_layout_of_grammar_engines():
    assert oracle.bits([0, 31, 33], 40) == (-(2**31) + 1, 2)
