"""SamplingParams: one request, plain Python values, validated once at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpsample.errors import UnsupportedParameter

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the argmax of the logits, no noise."""

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")

_NOT_YET = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
)
"""Fields whose effect is not built yet: a value that would change the token or the output raises.
The other fields only qualify these (`stop_token_ids`, …) and act once their owner does."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Names, defaults and ranges follow vLLM's `SamplingParams`.

    Args:
        temperature: divides the logits; >= 0, below 1e-5 means greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens up to this mass, in (0, 1].
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        seed: 64 bits, the row's random stream together with the position; None draws one.
        repetition_penalty: > 0; 1 is off.
        presence_penalty, frequency_penalty: in [-2, 2]; 0 is off.
        logit_bias: token id to added logit, clamped to ±100.
        allowed_token_ids: only these may be drawn.
        bad_words: token id sequences that must not be completed.
        min_tokens: no stop token before this many output tokens.
        stop_token_ids: the ids `min_tokens` holds back.
        logprobs: how many of the most likely tokens to report; -1 is all.
        logprob_token_ids: ids to report as well.
        logprobs_mode: "raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits".
        ties: "exact" keeps exactly k tokens, "keep" also those equal to the k-th.
        filter_order: "sequential" renormalises after top_k, "joint" does not.
        repetition_scope: "all" counts prompt and output, "output" the output alone.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range, naming the field.
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
        self._choice("filter_order", ("sequential", "joint"))
        self._choice("repetition_scope", ("all", "output"))

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax of the logits."""
        return self.temperature < GREEDY_BELOW

    def require_supported(self) -> None:
        """Raise if a field asks for something this version does not do yet.

        Raises:
            UnsupportedParameter: names the first such field.
        """
        for name in _NOT_YET:
            value = getattr(self, name)
            if value != _DEFAULTS[name] and not (name == "logit_bias" and not value):
                raise UnsupportedParameter(
                    f"{name}={value!r}: not supported yet; leave it at {_DEFAULTS[name]!r} "
                    "or sample this request with another sampler"
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


_DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in SamplingParams.__dataclass_fields__.items()
}


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
