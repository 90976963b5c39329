"""SamplingParams: one request, plain Python values, validated once at construction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the argmax of the logits, no noise."""

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")

MAX_LOGIT_BIAS = 100.0
"""Biases beyond this are clamped to it, as in vLLM and the OpenAI API."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Names, defaults and ranges follow vLLM's `SamplingParams`.

    Args:
        temperature: divides the logits; >= 0, below 1e-5 means greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens up to this mass, in (0, 1].
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        seed: 64 bits, the row's random stream together with the position; None draws one.
        repetition_penalty: divides positive logits of tokens so far and multiplies negative
            ones; > 0; 1 is off.
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from the
            logits of output tokens; in [-2, 2]; 0 is off.
        logit_bias: token id to added logit, clamped to ±100.
        allowed_token_ids: only these may be drawn.
        bad_words: token id sequences that the output must not complete.
        min_tokens: none of stop_token_ids before this many output tokens.
        stop_token_ids: the ids `min_tokens` holds back.
        logprobs: how many of the most likely tokens to report; -1 is all.
        logprob_token_ids: ids to report as well.
        logprobs_mode: "raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits".
        ties: "exact" keeps the lowest ids of equal logits where top_k or top_p cuts between them;
            "keep" keeps all whose logit equals that of the last token kept.
        filter_order: "sequential" is min_p, then top_k, then top_p of the mass they leave; "joint"
            is top_p of the mass before top_k; "min_p_last" is top_k, then top_p of what that
            leaves, then min_p.
        repetition_scope: "all" counts prompt and output, "output" the output alone.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range, or two that contradict
            each other, naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
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

    def __post_init__(self) -> None:
        self._real("temperature", lambda x: x >= 0, "a finite number >= 0")
        self._int("top_k", lambda k: k >= -1, "an int >= -1 (0 and -1 keep every token)")
        self._real("top_p", lambda p: 0 < p <= 1, "a number in (0, 1]")
        self._real("min_p", lambda p: 0 <= p <= 1, "a number in [0, 1]")
        if self.seed is not None:
            self._int("seed", lambda s: -(2**63) <= s < 2**64, "None or an int of 64 bits")
        self._real("repetition_penalty", lambda x: x > 0, "a finite number > 0")
        self._real("presence_penalty", lambda x: -2 <= x <= 2, "a number in [-2, 2]")
        self._real("frequency_penalty", lambda x: -2 <= x <= 2, "a number in [-2, 2]")
        if self.logit_bias is not None:
            self._ids("logit_bias", list(self.logit_bias))
            for token_id, bias in self.logit_bias.items():
                if not _is_real(bias):
                    raise ValueError(f"logit_bias[{token_id}]: expected a number, got {bias!r}")
        self._ids("allowed_token_ids", self.allowed_token_ids, empty=False)
        for sequence in self.bad_words or ():
            self._ids("bad_words", sequence, empty=False)
        self._int("min_tokens", lambda n: n >= 0, "an int >= 0")
        self._ids("stop_token_ids", self.stop_token_ids)
        if self.logprobs is not None:
            self._int("logprobs", lambda n: n >= -1, "None or an int >= -1")
        self._ids("logprob_token_ids", self.logprob_token_ids)
        self._choice("logprobs_mode", LOGPROBS_MODES)
        self._choice("ties", ("exact", "keep"))
        self._choice("filter_order", ("sequential", "joint", "min_p_last"))
        self._choice("repetition_scope", ("all", "output"))
        self._consistent()

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax of the logits."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def masked(self) -> bool:
        """Whether some tokens may be forbidden."""
        return self.allowed_token_ids is not None or bool(self.bad_words) or self.min_tokens > 0

    @property
    def reads_output(self) -> bool:
        """Whether the tokens so far matter, so that each new one must be appended."""
        return self.penalised or bool(self.bad_words) or self.min_tokens > 0

    def siblings(self, n: int) -> list[SamplingParams]:
        """This request for n parallel continuations of one prompt (vLLM's `n`).

        Continuation i draws with seed + i; without a seed each is given its own.

        Raises:
            ValueError: n < 1, or n > 1 of a greedy request, whose continuations would be equal.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n: expected an int >= 1, got {n!r}")
        if n > 1 and self.greedy:
            raise ValueError(
                f"n: expected 1, as temperature={self.temperature} makes {n} equal continuations"
            )
        if self.seed is None:
            return [self] * n
        return [replace(self, seed=(self.seed + i) & 0xFFFFFFFFFFFFFFFF) for i in range(n)]

    def check_vocab(self, vocab_size: int) -> None:
        """Raise a ValueError if a token id is not below V."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", [i for sequence in self.bad_words or () for i in sequence]),
            ("stop_token_ids", self.stop_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids or ()),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(f"{name}: expected ids in [0, {vocab_size}), got {token_id}")

    def _consistent(self) -> None:
        if self.min_tokens and not self.stop_token_ids:
            warnings.warn(
                f"min_tokens={self.min_tokens} has no effect without the ids it holds back; give "
                "them in stop_token_ids, the end-of-sequence id among them",
                stacklevel=4,
            )
        if self.allowed_token_ids is not None:
            banned = {words[0] for words in self.bad_words or () if len(words) == 1}
            if self.min_tokens:
                banned |= set(self.stop_token_ids or ())
            if banned.issuperset(self.allowed_token_ids):
                raise ValueError(
                    "allowed_token_ids: bad_words and min_tokens forbid every id in it, so no "
                    "token is left; allow another id"
                )

    def _real(self, name: str, ok: Callable[[float], bool], expected: str) -> None:
        value = getattr(self, name)
        if not _is_real(value) or not ok(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")

    def _int(self, name: str, ok: Callable[[int], bool], expected: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected {expected}, got {value!r}")
        if not ok(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")

    def _ids(self, name: str, ids: Sequence[int] | None, *, empty: bool = True) -> None:
        if ids is None:
            return
        if not empty and len(ids) == 0:
            raise ValueError(f"{name}: expected at least one token id, got an empty sequence")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"{name}: expected token ids >= 0, got {token_id!r}")

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
