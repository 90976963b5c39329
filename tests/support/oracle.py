"""The definition of the correct token, written a second time: numpy, one row, by sorting.

Nothing here comes from the library, neither code nor constants nor a way of computing: noise from
`tests.support.noise_checker`, masses from `tests.support.masses_checker` as Python integers, the
kept set from the sorted row. Where a sampler and this file disagree, the definition decides which
of them is wrong.

    answer = draw(logits, Request(top_k=5), seed=1, position=17)
    answer.token, answer.status, answer.kept
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from tests.support import masses_checker, noise_checker

OK, NAN, EMPTY = "OK", "NAN", "EMPTY"
NEAR_TIE = 4e-5
"""Two devices may take either of two tokens whose scores are nearer than this."""

LARGEST = float(np.finfo(np.float32).max)


def noise_words(
    seed: int, position: int, token_ids: np.ndarray, *, sample: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the word of each id, and the exclusive or of the four words of its group."""
    stream = noise_checker.row_stream(seed, position, sample)
    return noise_checker.words(stream, token_ids)


def noise(seed: int, position: int, token_ids: np.ndarray, *, sample: int = 0) -> np.ndarray:
    """Return fp32 L of each id: the Gumbel noise in base 2 is −L."""
    words = noise_words(seed, position, token_ids, sample=sample)
    return noise_checker.noise(*words)


# -- a request and its row ---------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One request; the names and defaults of the contract."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    epsilon_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    eta_cutoff: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logprobs_mode: str = "raw_logprobs"
    ties: str = "exact"
    filter_order: str = "sequential"
    repetition_scope: str = "all"

    @property
    def greedy(self) -> bool:
        return not float(np.float32(self.temperature)) >= float(np.float32(1e-5))


@dataclass(frozen=True)
class Context:
    """The tokens that a row's masks and penalties refer to.

    Attributes:
        prompt, output: token ids so far; −1 is none, other prompt ids outside [0, V) are ignored.
        grammar: int words, bit v % 32 of word v // 32 allows v; None allows all.
        forced: the only id that may be drawn; −1 is none.
    """

    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    grammar: tuple[int, ...] | None = None
    forced: int = -1

    def after(self, tokens: Sequence[int]) -> Context:
        return replace(self, output=self.output + tuple(t for t in tokens if t >= 0))


def head_logits(
    hidden_state: np.ndarray,
    weight: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> np.ndarray:
    """fp32 [V]: products in float64, rounded once; then scale, soft-cap and bias in fp32.

    A product that overflows to +inf is no number.
    """
    with np.errstate(all="ignore"):
        x = (weight.astype(np.float64) @ hidden_state.astype(np.float64)).astype(np.float32)
        x[x == np.inf] = np.nan
        if scale != 1.0:
            x = x * np.float32(scale)
        if softcap is not None:
            cap = np.float32(softcap)
            x = cap * np.tanh((x / cap).astype(np.float64)).astype(np.float32)
        return x if bias is None else x + bias.astype(np.float32)


def process(logits: np.ndarray, request: Request, context: Context) -> np.ndarray:
    """fp32 [V], the processed logits: masks, bias, min_tokens, penalties, bad words."""
    x, size = logits.astype(np.float32).copy(), len(logits)
    ids = np.arange(size)
    output = [t for t in context.output if t >= 0]
    open_ = np.ones(size, dtype=bool)
    if request.allowed_token_ids is not None:
        open_ &= np.isin(ids, request.allowed_token_ids)
    if context.grammar is not None:
        words = np.array([word & 0xFFFFFFFF for word in context.grammar], dtype=np.int64)
        open_ &= (words[ids >> 5] >> (ids & 31)) & 1 == 1
    stopped = np.zeros(size, dtype=bool)
    if len(output) < request.min_tokens:
        stopped[list(request.stop_token_ids or ())] = True
        if not (open_ & ~stopped).any():
            stopped[:] = False
    banned = np.zeros(size, dtype=bool)
    for word in request.bad_words or ():
        start = list(word[:-1])
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            banned[word[-1]] = True
    masked = ~open_ | stopped | banned
    if context.forced != -1:
        masked = ids != context.forced
    masked |= x == -np.inf

    with np.errstate(all="ignore"):
        for token, bias in (request.logit_bias or {}).items():
            x[token] += np.float32(min(100.0, max(-100.0, bias)))
        counts = np.bincount(output, minlength=size) if output else np.zeros(size, dtype=np.int64)
        seen = counts > 0
        if request.repetition_scope == "all":
            seen[[t for t in context.prompt if 0 <= t < size]] = True
        repetition = np.float32(request.repetition_penalty)
        x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
        x = x - np.float32(request.frequency_penalty) * counts.astype(np.float32)
        x = x - np.float32(request.presence_penalty) * (counts > 0).astype(np.float32)
    return np.where(masked, np.float32(-np.inf), x).astype(np.float32)


def bits(allowed: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Signed 32-bit words in which the bits of `allowed` are set."""
    words = [0] * math.ceil(vocab_size / 32)
    for v in allowed:
        words[v // 32] |= 1 << (v % 32)
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)


# -- the kept set ------------------------------------------------------------------------------


def order_of(x: np.ndarray) -> np.ndarray:
    """Ids by (logit descending, id ascending)."""
    return np.argsort(-x.astype(np.float64), kind="stable")


def heat(temperature: float) -> np.float32:
    """The temperature that counts, which is at most 2^100."""
    return np.float32(min(temperature, 2.0**100))


def scaled(x: np.ndarray, temperature: float) -> np.ndarray:
    """fp32 x · log2 e / T, with what lies beyond fp32 at ±inf."""
    with np.errstate(all="ignore"):
        return (x.astype(np.float64) * np.float64(_scale(temperature))).astype(np.float32)


def masses(x: np.ndarray, temperature: float) -> list[int]:
    """The masses of MASSES.md as Python ints."""
    q, _ = masses_checker.masses_and_moments(x, x.max(), heat(temperature))
    return [int(each) for each in q]


def kept_set(x: np.ndarray, request: Request) -> np.ndarray:
    """bool [V] of processed logits without a NaN; filters do not apply to a greedy row."""
    if request.greedy:
        return x > -np.inf
    kept = np.zeros(len(x), dtype=bool)
    finite = scaled(x, request.temperature) > -np.inf
    left = [int(v) for v in order_of(x) if finite[v]]
    if not left:
        return kept
    near = _within_sigma(x[left], request)
    by_eta = set(_eta_cutoff(left, x, request))
    left = [v for v in _epsilon_cutoff(left, x, request) if float(x[v]) >= near and v in by_eta]
    likely = _likely(x, request)
    if request.filter_order == "min_p_last":
        left = _top_p(_top_k(left, x, request), x, request)
        left = [v for v in left if likely[v]]
    elif request.filter_order == "joint":
        left = [v for v in left if likely[v]]
        both = set(_top_k(left, x, request)) & set(_top_p(left, x, request))
        left = [v for v in left if v in both]
    else:
        left = _top_p(_top_k([v for v in left if likely[v]], x, request), x, request)
    kept[left] = True
    return kept


def _likely(x: np.ndarray, request: Request) -> np.ndarray:
    """Return what min_p keeps: x / T ≥ max / T + ln(min_p)."""
    if request.min_p == 0:
        return np.ones(len(x), dtype=bool)
    wide = x.astype(np.longdouble) / np.longdouble(heat(request.temperature))
    return wide >= wide.max() + np.log(np.longdouble(request.min_p))


def _within_sigma(x: np.ndarray, request: Request) -> float:
    """The largest logit less n standard deviations, of unmasked logits in units of 2^-19."""
    if request.top_n_sigma == 0:
        return -math.inf
    with np.errstate(all="ignore"):
        below = np.where(x == x[0], np.float32(0), np.minimum(x[0] - x, np.float32(4096)))
    units = [round(Fraction(float(each)) * 2**19) for each in below]
    mean = Fraction(sum(units), len(units))
    variance = Fraction(sum(each * each for each in units), len(units)) - mean**2
    sigma = np.sqrt(np.longdouble(float(variance))) / 2**19
    return float(np.longdouble(x[0]) - np.longdouble(request.top_n_sigma) * sigma)


def _epsilon_cutoff(left: list[int], x: np.ndarray, request: Request) -> list[int]:
    """Keep down to the last id whose mass is epsilon of that of all, or that of the first."""
    if request.epsilon_cutoff == 0:
        return left
    q = masses(x[left], request.temperature)
    limit = min(round(Fraction(request.epsilon_cutoff) * sum(q)), 2**40)
    return left[: max(place for place, mass in enumerate(q) if mass >= limit) + 1]


def _eta_cutoff(left: list[int], x: np.ndarray, request: Request) -> list[int]:
    """Keep down to the last id at least as likely as min(η, √η · e^-H), or as the first."""
    if request.eta_cutoff == 0:
        return left
    pair = masses_checker.masses_and_moments(x[left], x[left].max(), heat(request.temperature))
    q, m = ([int(each) for each in side] for side in pair)
    eta = np.longdouble(request.eta_cutoff)
    by_entropy = np.sqrt(eta) * np.exp2(40 - np.longdouble(sum(m)) / sum(q))
    limit = min(int(np.rint(min(eta * sum(q), by_entropy))), 2**40)
    return left[: max(place for place, mass in enumerate(q) if mass >= limit) + 1]


def _top_k(left: list[int], x: np.ndarray, request: Request) -> list[int]:
    if request.top_k <= 0 or request.top_k >= len(left):
        return left
    return _with_ties(left, request.top_k, x, request)


def _top_p(left: list[int], x: np.ndarray, request: Request) -> list[int]:
    if request.top_p == 1 or not left:
        return left
    q = masses(x[left], request.temperature)
    limit, before, count = Fraction(repr(request.top_p)) * sum(q), 0, 0  # as it was written
    for mass in q:
        if count and before >= limit:
            break
        before, count = before + mass, count + 1
    return _with_ties(left, count, x, request)


def _with_ties(left: list[int], count: int, x: np.ndarray, request: Request) -> list[int]:
    if request.ties == "keep":
        while count < len(left) and x[left[count]] == x[left[count - 1]]:
            count += 1
    return left[:count]


# -- a draw ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The right result of a step for one row.

    Attributes:
        raw, logits: fp32 [V], before and after processing.
        kept: bool [V]; scores: fp32 [V], −inf outside the kept set.
    """

    token: int
    status: str
    raw: np.ndarray = field(repr=False)
    logits: np.ndarray = field(repr=False)
    kept: np.ndarray = field(repr=False)
    scores: np.ndarray = field(repr=False)

    def near_tie(self, token: int) -> bool:
        """Whether another device may take `token` in place of this one."""
        if self.status != OK or not (0 <= token < len(self.kept)) or not self.kept[token]:
            return False
        with np.errstate(all="ignore"):
            return bool(abs(self.scores[self.token] - self.scores[token]) < NEAR_TIE)


def draw(
    logits: np.ndarray,
    request: Request,
    context: Context | None = None,
    *,
    seed: int,
    position: int,
    sample: int = 0,
) -> Answer:
    """The token of one row with raw logits fp32 [V]."""
    x = process(logits, request, context or Context())
    nothing = np.full(len(x), np.float32(-np.inf))
    none = np.zeros(len(x), dtype=bool)
    if np.isnan(x).any():
        return Answer(-1, NAN, logits, x, none, nothing)
    kept = kept_set(x, request)
    if not kept.any():
        return Answer(-1, EMPTY, logits, x, kept, nothing)
    if request.greedy:
        return Answer(int(np.argmax(x)), OK, logits, x, kept, np.where(kept, x, nothing))
    ids = np.flatnonzero(kept)
    scores = nothing.copy()
    with np.errstate(all="ignore"):
        product = x[ids].astype(np.float64) * np.float64(_scale(request.temperature))
        drawn = noise(seed, position, ids, sample=sample)
        scores[ids] = (product - drawn.astype(np.float64)).astype(np.float32)
    return Answer(int(np.argmax(scores)), OK, logits, x, kept, scores)


def _scale(temperature: float) -> np.float32:
    """log2 e / T, rounded once."""
    return np.float32(1.4426950408889634 / np.float64(heat(temperature)))


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
        temperature = 1.0 if request.greedy else float(heat(request.temperature))
        x = np.where(answer.kept, answer.logits, -np.inf) / np.longdouble(temperature)
    order = [int(v) for v in order_of(answer.raw if mode.startswith("raw") else answer.logits)]
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
        answers.append(draw(raw, request, so_far, **how))
        token = answers[-1].token
        if i == len(drafts) or token != drafts[i] or not 0 <= drafts[i] < len(raw):
            break
    tokens = [answer.token for answer in answers]
    return Verified(tokens, len(tokens) - 1, answers[-1].status, answers)
