"""Every field of a request, with values that change something and values that are refused.

Lists of requests in the tests take fields from here, and `tests/test_fields.py` names a field that
one of them lacks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

from tpsample.core.rules import RULES

VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.5, 0.0, 3.0),
    "top_k": (3, 20, 300),
    "top_p": (0.5, 0.9, 1e-6),
    "min_p": (0.5, 0.02, 1.0),
    "epsilon_cutoff": (0.002, 0.0005, 0.1, 1e-12, 0.9),
    "top_n_sigma": (1.5, 0.5, 3.0, 1e-9, 1e30),
    "eta_cutoff": (0.002, 0.1, 0.9, 1e-12),
    "seed": (5, 2**64 - 1),
    "repetition_penalty": (1.5, 0.7),
    "presence_penalty": (1.5, -2.0),
    "frequency_penalty": (1.5, -0.3),
    "logit_bias": ({1: 1.0},),
    "allowed_token_ids": ([1],),
    "bad_words": ([[1, 2]],),
    "min_tokens": (2,),
    "stop_token_ids": ([1],),
    "logprobs": (1, -1),
    "logprob_token_ids": ([1],),
    "logprobs_mode": ("raw_logits", "processed_logprobs"),
    "ties": ("keep",),
    "filter_order": ("joint", "min_p_last"),
    "repetition_scope": ("output",),
}
"""By field, values that no request has by default, for a vocabulary of two ids or more."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, float("nan"), float("inf"), "1", True, 1e39, 10**400),
    "top_k": (-2, 1.5, True),
    "top_p": (0.0, 1.01, -1),
    "min_p": (-0.01, 1.5),
    "epsilon_cutoff": (-0.01, 1.0),
    "top_n_sigma": (-1.0, float("nan"), float("inf"), 1e39),
    "eta_cutoff": (-0.01, 1.0),
    "seed": (2**64, -(2**63) - 1, 1.0),
    "repetition_penalty": (0.0, -1.0, float("inf"), 1e-50, 1e39),
    "presence_penalty": (2.1, -2.1),
    "frequency_penalty": (2.1, -2.1),
    "logit_bias": ({-1: 1.0}, {1: float("nan")}, {"a": 1.0}, [1], {1: 10**400}),
    "allowed_token_ids": ([], [-1], [1.5], "12"),
    "bad_words": ([[]], [[-3]], [5, 6], ["the"]),
    "min_tokens": (-1, 1.0, 2**31),
    "stop_token_ids": ([-1], 5),
    "logprobs": (-2, 1.5),
    "logprob_token_ids": ([-1],),
    "logprobs_mode": ("raw",),
    "ties": ("all",),
    "filter_order": ("top_p_first",),
    "repetition_scope": ("prompt",),
}
"""By field, values out of range or of a wrong type."""

BESIDE: dict[str, dict[str, Any]] = {"min_tokens": {"stop_token_ids": [1]}}
"""Fields without which another one does nothing."""

FILTERS = tuple(rule.name for rule in RULES if rule.name in VALUES)
"""A rule without values is not among them, so that `tests/test_fields.py` runs and names it."""

OTHER_FILTERS = tuple(name for name in FILTERS if name not in ("top_k", "top_p", "min_p"))
"""The rules that lists of requests with top_k, top_p and min_p do not name."""


def requests_with(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return a request for every value of some fields."""
    return [{name: value, **BESIDE.get(name, {})} for name in names for value in VALUES[name]]


def one_with(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return a request for the first value of some fields."""
    return [{name: VALUES[name][0], **BESIDE.get(name, {})} for name in names]


def with_others(requests: Sequence[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    """Return the requests, some of them with rules of `OTHER_FILTERS`, whose values take turns.

    Each rule is drawn by itself, so that a new one leaves the others where they were.
    """
    found = [dict(request) for request in requests]
    for name in OTHER_FILTERS:
        pick, values = random.Random(f"{turn} {name}"), itertools.cycle(VALUES[name])
        for request in found:
            if pick.random() < 0.3:
                request[name] = next(values)
    return found
