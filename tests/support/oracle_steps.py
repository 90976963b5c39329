"""Logprobs and verification as `tests.support.oracle` says they are, of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support import oracle
from tests.support.oracle import Answer, Context, Request

# -- logprobs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Entry i is (id, value, rank): the tokens drawn, the N most likely ones, the chosen ids."""

    entries: list[tuple[int, float, int]]
    entropy: float


def report(answer: Answer, request: Request, tokens: Sequence[int]) -> Report:
    """The logprobs of a row whose status is OK; `tokens` are those drawn."""
    mode = request.logprobs_mode
    if mode.startswith("raw"):
        x = answer.raw.astype(np.longdouble)
    else:
        temperature = 1.0 if request.greedy else float(oracle.heat(request.temperature))
        x = np.where(answer.kept, answer.logits, -np.inf) / np.longdouble(temperature)
    order = [
        int(v) for v in oracle.order_of(answer.raw if mode.startswith("raw") else answer.logits)
    ]
    with np.errstate(all="ignore"):
        top = x[order[0]]
        weights = np.where(x == top, 1, np.exp(np.where(np.isinf(x), -np.inf, x) - top))
        if np.isinf(top):
            weights = (x == top).astype(np.longdouble)
        total = weights.sum()
        logprobs = np.log(weights / total)
        direct = x - top - np.log(total)
        logprobs = np.where(np.isfinite(direct), direct, logprobs)
    likely = weights > 0
    p = weights[likely] / total
    entropy = float(-(p * np.log(p)).sum())
    values = logprobs if mode.endswith("logprobs") else x
    wanted = len(x) if request.logprobs == -1 else min(request.logprobs or 0, len(x))
    ids = [*tokens, *order[:wanted], *(request.logprob_token_ids or ())]
    return Report([(v, float(values[v]), int((x >= x[v]).sum())) for v in ids], entropy)


# -- verification ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """The accepted drafts and the token behind them; `answers` are of the positions reached."""

    tokens: list[int]
    num_accepted: int
    status: str
    answers: list[Answer] = field(repr=False)


def verify_coupled(
    logits: Sequence[np.ndarray],
    drafts: Sequence[int],
    request: Request,
    contexts: Sequence[Context],
    *,
    seed: int,
    position: int,
) -> Verified:
    """Plain decoding along the drafts: position i is drawn as ever, after the drafts before it.

    Args:
        logits: K + 1 rows of raw logits.
        drafts: K ids; the first that is not in the vocabulary ends them.
        contexts: K + 1; each has the output before the drafts.
    """
    answers: list[Answer] = []
    for i, raw in enumerate(logits):
        so_far = contexts[i].after(drafts[:i])
        how = {"seed": seed, "position": position + i}
        answers.append(oracle.draw(raw, request, so_far, **how))
        token = answers[-1].token
        if i == len(drafts) or token != drafts[i] or not 0 <= drafts[i] < len(raw):
            break
    tokens = [answer.token for answer in answers]
    return Verified(tokens, len(tokens) - 1, answers[-1].status, answers)
