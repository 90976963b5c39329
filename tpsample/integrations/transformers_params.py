"""The arguments of `generate` as `SamplingParams`.

transformers turns the arguments of `generate` into logits processors. Each is honoured by its exact
type, or refused by name: a subclass may do anything.

Equal logits: `top_k` keeps every logit that equals the k-th, as in transformers. Under `top_p`
transformers cuts equal logits where its sort, which is not stable, left them. Here all that equal
the last one kept are kept if there is a `top_k`, else those with lower ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from transformers.generation import logits_process as processors_of

from tpsample.errors import UnsupportedParameter
from tpsample.request.params import SamplingParams

REFUSED = {
    "AlternatingCodebooksLogitsProcessor": "audio models alone use it",
    "BarkEosPrioritizerLogitsProcessor": "audio models alone use it",
    "ClassifierFreeGuidanceLogitsProcessor": "it mixes the logits of two rows",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it mixes the logits of two rows",
    "DiaEOSChannelFilterLogitsProcessor": "audio models alone use it",
    "DiaEOSDelayPatternLogitsProcessor": "audio models alone use it",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder-decoder models are not supported",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder-decoder models are not supported",
    "ExponentialDecayLengthPenalty": "its bias changes with every token",
    "ForcedBOSTokenLogitsProcessor": "no token is forced at the first position",
    "ForcedEOSTokenLogitsProcessor": "no token is forced at the last position",
    "InfNanRemoveLogitsProcessor": "NaN ends the call, and +inf is a forced token",
    "NoRepeatNGramLogitsProcessor": "no n-grams are kept",
    "PrefixConstrainedLogitsProcessor": "its function would be called on the host, row by row",
    "SuppressTokensAtBeginLogitsProcessor": "no token is forbidden at the first position alone",
    "SynthIDTextWatermarkLogitsProcessor": "there is no watermark",
    "TopHLogitsWarper": "there is no filter by the entropy of a set",
    "TypicalLogitsWarper": "there is no filter by typicality",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it mixes the logits of two models",
    "WatermarkLogitsProcessor": "there is no watermark",
    "WhisperNoSpeechDetection": "audio models alone use it",
    "WhisperTimeStampLogitsProcessor": "audio models alone use it",
}
"""Processors that need whole logits or have no counterpart here, and why."""

Fields = dict[str, Any]


def _temperature(processor: Any, fields: Fields, prompts: Prompts) -> None:
    fields["temperature"] *= processor.temperature


def _filter(name: str, processor: Any, fields: Fields, prompts: Prompts) -> None:
    """Take a filter, but not the options that `generate` itself never sets."""
    if processor.filter_value != -float("inf") or getattr(processor, "min_tokens_to_keep", 1) != 1:
        raise _unsupported(processor, f"{name} with min_tokens_to_keep or filter_value")
    _once(fields, name, getattr(processor, name), processor)
    if name == "top_k":
        fields["ties"] = "keep"


def _cutoff(name: str, processor: Any, fields: Fields, prompts: Prompts) -> None:
    """transformers counts the tokens that other filters left, and tpsample all of them."""
    others = "top_k", "top_p", "min_p", "epsilon_cutoff"
    if before := [other for other in others if other in fields and other != name]:
        raise _unsupported(processor, f"it would come before {', '.join(before)}, not after")
    if processor.filter_value != -float("inf") or processor.min_tokens_to_keep != 1:
        raise _unsupported(processor, f"{name} with min_tokens_to_keep or filter_value")
    _once(fields, name, float(processor.epsilon), processor)


def _repetition(processor: Any, fields: Fields, prompts: Prompts) -> None:
    ignored = processor.prompt_ignore_length
    ignored = ignored.tolist() if isinstance(ignored, Tensor) else ignored
    if ignored is None:
        ignored = [0] * len(prompts.padding)
    if ignored == prompts.padding:
        pass  # what `generate` itself asks for: the prompt counts, its padding does not
    elif ignored == prompts.length:
        fields["repetition_scope"] = "output"
    else:
        raise _unsupported(processor, f"prompt_ignore_length={ignored} for part of a prompt")
    _once(fields, "repetition_penalty", processor.penalty, processor)


def _at_least(processor: Any, fields: Fields, prompts: Prompts) -> None:
    """`generate` makes two processors of one `min_new_tokens`; the longer one counts."""
    if type(processor).__name__ == "MinLengthLogitsProcessor":
        min_tokens = processor.min_length - prompts.length
    else:
        already = prompts.length - processor.prompt_length_to_skip
        min_tokens = processor.min_new_tokens - already
    stop = sorted(processor.eos_token_id.tolist())
    if fields.setdefault("stop_token_ids", stop) != stop:
        raise _unsupported(processor, "two sets of eos_token_id")
    fields["min_tokens"] = max(0, min_tokens, fields.get("min_tokens", 0))


def _bad_words(processor: Any, fields: Fields, prompts: Prompts) -> None:
    if hasattr(processor, "suppress_tokens"):
        words = [[token_id] for token_id in processor.suppress_tokens.tolist()]
    else:
        words = list(map(list, processor.sequence_bias))
    fields["bad_words"] = [*fields.get("bad_words", ()), *words]


def _sequence_bias(processor: Any, fields: Fields, prompts: Prompts) -> None:
    biases = {}
    for sequence, bias in processor.sequence_bias.items():
        if len(sequence) != 1 or abs(bias) > 100:
            raise _unsupported(processor, f"{sequence}: {bias}: one id with a bias up to ±100 each")
        biases[sequence[0]] = bias
    _once(fields, "logit_bias", biases, processor)


def _nothing(processor: Any, fields: Fields, prompts: Prompts) -> None:
    """The token does not depend on it."""


HONOURED: dict[str, tuple[int, Callable[[Any, Fields, Prompts], None]]] = {
    "MinLengthLogitsProcessor": (0, _at_least),
    "MinNewTokensLengthLogitsProcessor": (0, _at_least),
    "NoBadWordsLogitsProcessor": (0, _bad_words),
    "SuppressTokensLogitsProcessor": (0, _bad_words),
    "SequenceBiasLogitsProcessor": (1, _sequence_bias),
    "RepetitionPenaltyLogitsProcessor": (2, _repetition),
    "TemperatureLogitsWarper": (3, _temperature),
    "TopKLogitsWarper": (4, partial(_filter, "top_k")),
    "TopPLogitsWarper": (5, partial(_filter, "top_p")),
    "MinPLogitsWarper": (6, partial(_filter, "min_p")),
    "EpsilonLogitsWarper": (7, partial(_cutoff, "epsilon_cutoff")),
    "EtaLogitsWarper": (8, partial(_cutoff, "eta_cutoff")),
    "LogitNormalization": (9, _nothing),
}
"""Processors by the name of their class: which step of tpsample's order each is, or 0 for masks,
which may stand anywhere before the filters; and what it adds to the fields of a request."""

_GIVEN_AS = {
    "MinLengthLogitsProcessor": {"stop_token_ids": "eos_token_id", "min_tokens": "min_length"},
    "MinNewTokensLengthLogitsProcessor": {
        "stop_token_ids": "eos_token_id",
        "min_tokens": "min_new_tokens",
    },
    "NoBadWordsLogitsProcessor": {"bad_words": "bad_words_ids"},
    "SuppressTokensLogitsProcessor": {"bad_words": "suppress_tokens"},
    "SequenceBiasLogitsProcessor": {"logit_bias": "sequence_bias"},
}
"""By processor, fields of a request with the arguments of `generate` that they are made of."""


@contextmanager
def named_as_given(processors: Sequence[Any]) -> Iterator[None]:
    """Let errors of the body name the arguments of `generate` in place of a request's fields."""
    try:
        yield
    except (TypeError, ValueError) as error:
        field, _, text = str(error).partition(": ")
        fields = [_GIVEN_AS.get(type(processor).__name__, {}) for processor in processors]
        given = dict.fromkeys(of[field] for of in fields if field in of)
        if not given:
            raise
        raise type(error)(f"{' or '.join(given)}: {text}") from error


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of a batch, padded on the left.

    Attributes:
        rows: their ids without padding.
        padding: how many ids of padding each has.
        length: of every row, padding included.
        positions: of the first tokens to come. A cache may hold the ids before a prompt.
    """

    rows: list[list[int]]
    padding: list[int]
    length: int
    positions: list[int]

    @staticmethod
    def of(
        input_ids: Tensor, attention_mask: Tensor | None, in_sequence: int | None = None
    ) -> Prompts:
        """Cut the padding off.

        Args:
            in_sequence: the length of a mask without padding, which `generate` drops.

        Raises:
            UnsupportedParameter: no ids, or a mask with padding elsewhere.
        """
        length = input_ids.shape[1]
        if length == 0:
            raise UnsupportedParameter("input_ids: expected at least one id per row; got none")
        padding = [0] * len(input_ids)
        positions = [in_sequence or length] * len(input_ids)
        if attention_mask is not None:
            there = attention_mask[:, -length:] != 0
            padding = (length - there.sum(dim=1)).tolist()
            positions = (attention_mask != 0).sum(dim=1).tolist()
            if bool((there[:, 1:] < there[:, :-1]).any()):
                raise UnsupportedParameter(
                    "attention_mask: expected padding on the left alone; load the tokenizer with "
                    'padding_side="left"'
                )
            if length in padding:
                raise UnsupportedParameter(
                    f"attention_mask: row {padding.index(length)} has no id that is not padding; "
                    "begin its prompt with one, such as that of the beginning of a text"
                )
        rows = [ids[gap:] for ids, gap in zip(input_ids.tolist(), padding, strict=True)]
        return Prompts(rows, padding, length, positions)


def requests_of(
    processors: Sequence[Any],
    *,
    do_sample: bool,
    prompts: Prompts,
    seeds: Sequence[int | None],
) -> dict[str, Any]:
    """Return the requests of a call of `generate`, as arguments of `SamplingBatch.from_params`.

    Raises:
        UnsupportedParameter: a processor that is not honoured, by name.
    """
    fields: Fields = {"temperature": 1.0 if do_sample else 0.0}
    names = [type(processor).__name__ for processor in processors]
    for name, processor in zip(names, processors, strict=True):
        if name not in HONOURED or type(processor) is not getattr(processors_of, name, None):
            raise _unsupported(processor, REFUSED.get(name, "it is not known here"))
        HONOURED[name][1](processor, fields, prompts)
    steps = [step for name in names if (step := HONOURED[name][0])]
    if steps != sorted(steps):
        order, given = ([n for n in listing if HONOURED[n][0]] for listing in (HONOURED, names))
        raise UnsupportedParameter(
            f"logits_processor: expected the order {', '.join(order)}, got {', '.join(given)}; "
            "pass temperature, filters and penalties as arguments of generate"
        )
    if do_sample and fields["temperature"] == 0:
        raise UnsupportedParameter("temperature: expected more than 0; do_sample=False is greedy")
    if not fields.get("min_tokens"):  # the prompts are long enough
        fields.pop("stop_token_ids", None)
    fields["filter_order"] = "min_p_last"  # as transformers applies them

    # transformers makes no difference between prompt and output: a bad word may begin in a prompt.
    rows = prompts.rows
    none: list[list[int]] = [[] for _ in rows]
    begins_before = any(len(sequence) > 1 for sequence in fields.get("bad_words", ()))
    if begins_before and fields.get("repetition_scope") == "output":
        raise UnsupportedParameter("bad_words_ids: not with a repetition penalty of output alone")
    params = []
    for row, seed in zip(rows, seeds, strict=True):
        own = dict(fields)
        if begins_before and own.get("min_tokens"):
            own["min_tokens"] += len(row)
        params.append(SamplingParams(**own, seed=seed))
    before, after = (none, rows) if begins_before else (rows, none)
    return {"params": params, "prompt_token_ids": before, "output_token_ids": after}


def _once(fields: Fields, name: str, value: object, processor: Any) -> None:
    if name in fields:
        raise _unsupported(processor, f"{name} twice")
    fields[name] = value


def _unsupported(processor: Any, reason: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"logits_processor: {type(processor).__name__} is not supported with tpsample: {reason}; "
        "leave it out, or call generate without custom_generate"
    )
