"""SamplingParams: one request, plain Python values, validated once at construction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from tpsample.core.checks import (
    as_fp32,
    check_choice,
    check_int,
    describe,
    is_integer,
    is_listing,
    lists_in_order,
    real_number,
    way_to_float,
)
from tpsample.core.row_noise import GREEDY_BELOW, forked_seeds
from tpsample.core.rules import ENDING, RULES, TOP_K, TOP_P, FilterOrder
from tpsample.core.sealed import ReadOnlyDict, refuses_unknown_fields
from tpsample.core.tensors import outside_of_graphs

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
Ties = Literal["exact", "keep"]
RepetitionScope = Literal["all", "output"]
LOGPROBS_MODES = get_args(LogprobsMode)

MAX_LOGIT_BIAS = 100.0
"""Biases beyond this are clamped to it, as in vLLM and the OpenAI API."""


@refuses_unknown_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names, defaults and ranges follow vLLM's `SamplingParams`.

    It is a value: numbers are converted and sequences are copied when it is made. So two requests
    that mean the same are equal however they were written (1 and 1.0, a list and a tuple). Fields
    are given by name, and none can be changed: make another by `dataclasses.replace`. Temperature
    and penalties are checked as the fp32 numbers they become.

    Equal logits are drawn equally often up to |logit| / temperature = 1e6; beyond 1e7 fp32 rounds
    the noise away. Where |logit| · log2 e / temperature exceeds fp32 (3.4e38), the logit counts as
    infinite: as masked below zero, as forced above.

    Args:
        temperature: divides the logits; >= 0. Below 1e-5 the most likely token is taken; above
            2^100 it counts as 2^100.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens up to this probability mass, in (0, 1].
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        epsilon_cutoff: before the other filters, keep tokens at least this likely among all that
            are not masked, and the most likely one; in [0, 1).
        top_n_sigma: before the other filters, keep tokens whose logit before temperature is at
            most n standard deviations, of all that are not masked, below the largest; 0 is off.
        eta_cutoff: before the other filters, keep tokens at least as likely as the lesser of this
            and its square root times e^-entropy; in [0, 1). Probability and entropy are of all
            tokens that are not masked.
        seed: 64 bits that choose the row's random stream together with the position; None draws
            a seed. `torch.manual_seed` has no effect on either. Requests with equal seeds draw the
            same noise at equal positions, so each is given its own.
        repetition_penalty: divides the positive logits of tokens so far, and multiplies their
            negative ones; > 0; 1 is off.
        presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once and
            once per occurrence; in [-2, 2]; 0 is off.
        logit_bias: a number to add to a token id's logit, by token id; clamped to ±100.
        allowed_token_ids: the only ids that may be drawn, each named once.
        bad_words: sequences of token ids that the output must not complete.
        min_tokens: draw none of `stop_token_ids` before this many output tokens, unless
            allowed_token_ids and the grammar leave nothing else; below 2^31.
        stop_token_ids: the ids that `min_tokens` holds back; they end nothing by themselves.
        logprobs: how many of the most likely tokens to report; -1 is all.
        logprob_token_ids: ids to report as well.
        logprobs_mode: "raw_logprobs", "raw_logits", "processed_logprobs" or "processed_logits".
        ties: where top_k or top_p cuts between equal logits, "exact" keeps the lowest ids; "keep"
            keeps all whose logit equals that of the last token kept.
        filter_order: "sequential" applies min_p, then top_k, then top_p to the mass they leave;
            "joint" applies top_p to the mass before top_k; "min_p_last" applies top_k, then top_p
            to what that leaves, then min_p.
        repetition_scope: "all" counts prompt and output, "output" counts the output alone.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range, or two that contradict
            each other; the message names the field.
    """

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
    logprobs_mode: LogprobsMode = "raw_logprobs"
    ties: Ties = "exact"
    filter_order: FilterOrder = "sequential"
    repetition_scope: RepetitionScope = "all"

    def __post_init__(self) -> None:
        self._real("temperature", lambda x: x >= 0, "a finite fp32 number >= 0")
        self._int(TOP_K.name, TOP_K.valid, TOP_K.expected)
        for rule in (TOP_P, *ENDING):
            self._real(rule.name, rule.valid, rule.expected, fp32=False)
        if self.seed is not None:
            self._int("seed", lambda s: -(2**63) <= s < 2**64, "None or an int of 64 bits")
        self._real("repetition_penalty", lambda x: x > 0, "a finite fp32 number > 0")
        self._real("presence_penalty", lambda x: -2 <= x <= 2, "a number in [-2, 2]")
        self._real("frequency_penalty", lambda x: -2 <= x <= 2, "a number in [-2, 2]")
        if self.logit_bias is not None:
            self._set("logit_bias", _bias(self.logit_bias))
        self._ids("allowed_token_ids", empty=False)
        if self.bad_words is not None:
            self._set("bad_words", _bad_words(self.bad_words))
        self._int("min_tokens", lambda n: 0 <= n < 2**31, "an int from 0 to 2^31 - 1")
        self._ids("stop_token_ids")
        if self.logprobs is not None:
            self._int("logprobs", lambda n: n >= -1, "None or an int >= -1")
        self._ids("logprob_token_ids", in_order=True)
        check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        check_choice("ties", self.ties, get_args(Ties))
        check_choice("filter_order", self.filter_order, get_args(FilterOrder))
        check_choice("repetition_scope", self.repetition_scope, get_args(RepetitionScope))
        self._consistent()

    @cached_property
    def greedy(self) -> bool:
        """Whether the token is the argmax of the logits."""
        return as_fp32(self.temperature) < as_fp32(GREEDY_BELOW)

    @cached_property
    def filtered(self) -> bool:
        """Whether a filter rule is on, at a temperature that has filters."""
        return any(rule.cuts(getattr(self, rule.name)) for rule in RULES)

    @cached_property
    def penalised(self) -> bool:
        """Whether the tokens so far change the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @cached_property
    def masked(self) -> bool:
        """Whether some tokens may be forbidden."""
        return self.allowed_token_ids is not None or bool(self.bad_words) or self.min_tokens > 0

    @cached_property
    def needs_append(self) -> bool:
        """Whether tokens of the output change the logits of later ones."""
        of_several = any(len(words) > 1 for words in self.bad_words or ())
        return self.penalised or of_several or bool(self.min_tokens and self.stop_token_ids)

    @cached_property
    def reads_output(self) -> bool:
        """Whether the tokens so far matter, so that each new one must be appended."""
        return self.penalised or bool(self.bad_words) or self.min_tokens > 0

    @cached_property
    def asks_logprobs(self) -> bool:
        """Whether logprobs are to be reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Results that others keep with the request, by keys of their own."""
        return {}

    @cached_property
    def text(self) -> str:
        """All fields but the seed, as a text that is equal for equal requests."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name}={value!r}" for name, value in named if name != "seed")

    @outside_of_graphs
    def fork(self, count: int) -> list[SamplingParams]:
        """Return requests for so many texts that go on from one, as after ``num_samples=count``.

        One seed would mean the same noise. The first text keeps it, those of the others follow from
        it (NOISE.md). Without a seed each draws one.

        Raises:
            ValueError: a count that is not from 1 to 2^20.
        """
        count = check_int("count", count, 1, 2**20)
        if self.seed is None:
            return [self] * count
        return [replace(self, seed=seed) for seed in forked_seeds(self.seed, count)]

    def check_vocab(self, vocab_size: int) -> None:
        """Raise a ValueError if a token id is not below V."""
        for name, largest in self._largest_ids.items():
            if largest >= vocab_size:
                raise ValueError(
                    f"{name}: expected ids in [0, {vocab_size}), got {describe(largest)}"
                )

    @cached_property
    def _largest_ids(self) -> dict[str, int]:
        """The largest id of each field that has ids."""
        names = ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids")
        lists = {name: getattr(self, name) for name in names}
        lists["bad_words"] = [i for sequence in self.bad_words or () for i in sequence]
        return {name: max(ids) for name, ids in lists.items() if ids}

    def _consistent(self) -> None:
        stop = set(self.stop_token_ids or ())
        if self.min_tokens and not stop:
            warnings.warn(
                f"min_tokens={self.min_tokens} has no effect without the ids it holds back; give "
                "them in stop_token_ids, the end-of-sequence id among them",
                stacklevel=5,
            )
        if stop and not self.min_tokens:
            warnings.warn(
                "stop_token_ids has no effect without min_tokens, because it names the ids that "
                "min_tokens holds back; end the text yourself when one of them is drawn",
                stacklevel=5,
            )
        if self.allowed_token_ids is not None:
            banned = {words[0] for words in self.bad_words or () if len(words) == 1}
            if self.min_tokens and not stop.issuperset(self.allowed_token_ids):
                banned |= stop
            if len(set(self.allowed_token_ids)) < len(self.allowed_token_ids):
                raise ValueError(
                    "allowed_token_ids: expected each id once, got some repeatedly; of a mask take "
                    "the ids, mask.nonzero().flatten().tolist()"
                )
            if banned.issuperset(self.allowed_token_ids):
                raise ValueError(
                    "allowed_token_ids: bad_words and min_tokens forbid every id in it, so no "
                    "token is left; allow another id"
                )

    def _set(self, name: str, value: object) -> None:
        """Write a field of this frozen value, while it is being made."""
        object.__setattr__(self, name, value)

    def _real(
        self, name: str, ok: Callable[[float], bool], expected: str, *, fp32: bool = True
    ) -> None:
        value = getattr(self, name)
        number = real_number(value)
        becomes = as_fp32(number) if fp32 else number
        if not math.isfinite(becomes) or not ok(number) or not ok(becomes):
            other = ok(number) and number != becomes == becomes
            rounded = f", which is {becomes:g} in fp32" if other else ""
            got = f"{describe(value)}{rounded}{way_to_float(value)}"
            raise ValueError(f"{name}: expected {expected}, got {got}")
        self._set(name, number)

    def _int(self, name: str, ok: Callable[[int], bool], expected: str) -> None:
        value = getattr(self, name)
        if not is_integer(value):
            raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
        if not ok(int(value)):
            raise ValueError(f"{name}: expected {expected}, got {describe(value)}")
        self._set(name, int(value))

    def _ids(self, name: str, *, empty: bool = True, in_order: bool = False) -> None:
        ids = getattr(self, name)
        if ids is not None:
            self._set(name, _token_ids(name, ids, empty=empty, in_order=in_order))


def _token_ids(
    name: str, ids: Any, *, empty: bool = True, in_order: bool = False
) -> tuple[int, ...]:
    """Return a sequence of ids as a tuple, checked but for their upper bound.

    A set of ids is taken where their order has no meaning.
    """
    if not (lists_in_order if in_order else is_listing)(ids):
        way_out = f"; of one id pass [{describe(int(ids))}]" if is_integer(ids) else ""
        raise TypeError(f"{name}: expected a sequence of token ids, got {describe(ids)}{way_out}")
    ids = tuple(ids)
    if not empty and not ids:
        raise ValueError(f"{name}: expected at least one token id, got an empty sequence")
    return tuple(_token_id(name, token_id) for token_id in ids)


def _token_id(name: str, token_id: Any) -> int:
    if not is_integer(token_id) or int(token_id) < 0:
        way_out = f"; give int({describe(token_id)})" if str(token_id).isdecimal() else ""
        raise ValueError(f"{name}: expected token ids >= 0, got {describe(token_id)}{way_out}")
    return int(token_id)


def _bad_words(sequences: Any) -> tuple[tuple[int, ...], ...]:
    if not is_listing(sequences):
        raise TypeError(f"bad_words: expected sequences of token ids, got {describe(sequences)}")
    sequences = tuple(sequences)
    for sequence in sequences:
        if not lists_in_order(sequence):
            raise TypeError(
                "bad_words: expected sequences of token ids, such as [[5, 6]], got "
                f"{describe(sequence)} among them; words of text are the tokenizer's to encode"
            )
    return tuple(_token_ids("bad_words", sequence, empty=False) for sequence in sequences)


def _bias(biases: Any) -> dict[int, float]:
    """Return biases in the order of their ids, so that equal biases are equal texts."""
    if not isinstance(biases, Mapping):
        raise TypeError(
            f"logit_bias: expected a mapping of token id to bias, got {describe(biases)}"
        )
    checked = {}
    for token_id, bias in biases.items():
        number = real_number(bias)
        if not math.isfinite(number):
            way_out = way_to_float(bias)
            if number == -math.inf:
                way_out = f"; to forbid the id give bad_words=[[{describe(token_id)}]]"
            raise ValueError(
                f"logit_bias[{describe(token_id)}]: expected a finite number, got "
                f"{describe(bias)}{way_out}"
            )
        known = _token_id("logit_bias", token_id)
        if known in checked:
            raise ValueError(f"logit_bias: expected one bias of each id, got more of {known}")
        checked[known] = number
    return ReadOnlyDict(sorted(checked.items()))
