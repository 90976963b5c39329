"""From the options of `tpsample generate`, or a file of them, to one request per prompt."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tpsample.request.params import SamplingParams

FIELDS = tuple(field.name for field in fields(SamplingParams))
_LATER = ("bad_words", "min_tokens", "stop_token_ids")
"""Fields that may need the model: its tokenizer, its end-of-sequence ids."""

RepetitionPenalty = Annotated[
    float, typer.Option(help="Divides logits > 0 of tokens so far, multiplies the others.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Off the logits of tokens in the output.", min=-2, max=2)
]
FrequencyPenalty = Annotated[float, typer.Option(help="The same per occurrence.", min=-2, max=2)]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a logit; repeat.")
]
AllowToken = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="Draw only these ids; repeat.")
]
BadWord = Annotated[
    list[str] | None, typer.Option(help="A text that must not appear in the answer; repeat.")
]
MinTokens = Annotated[int, typer.Option(min=0, help="No end before this many tokens.")]
ParamsFile = Annotated[
    Path | None,
    typer.Option(
        "--params",
        metavar="FILE.json",
        help="One object of SamplingParams fields per prompt, over the other options.",
    ),
]


@dataclass(frozen=True)
class Request:
    """A prompt and how to sample it, before a model is there.

    Attributes:
        params: all fields but those that may need the model.
        bad_words: id sequences or texts.
        min_tokens, stop_token_ids: as in SamplingParams; no stop ids means the model's own.
    """

    prompt: str
    params: SamplingParams
    bad_words: tuple[Any, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @staticmethod
    def of(prompt: str, values: Mapping[str, Any]) -> Request:
        """From fields of SamplingParams by name.

        Raises:
            TypeError, ValueError: naming the field.
        """
        for name in values:
            if name not in FIELDS:
                raise ValueError(f"{name}: not a field of SamplingParams ({', '.join(FIELDS)})")
        params = SamplingParams(**{k: v for k, v in values.items() if k not in _LATER})
        bad_words, min_tokens = values.get("bad_words") or (), values.get("min_tokens", 0)
        stop_token_ids = values.get("stop_token_ids") or ()
        # Checked now as far as possible: before a model is loaded.
        replace(
            params,
            bad_words=[words for words in bad_words if not isinstance(words, str)],
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids or [0],
        )
        return Request(prompt, params, tuple(bad_words), min_tokens, tuple(stop_token_ids))

    def complete(self, tokenizer: Any, eos_token_ids: Collection[int]) -> SamplingParams:
        """The request with its words as ids and the model's end-of-sequence ids held back.

        A text is forbidden with and without a space before it, which are different tokens.
        """
        words: list[list[int]] = []
        for word in self.bad_words:
            if not isinstance(word, str):
                words.append(list(word))
                continue
            for text in (word, " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in words:
                    words.append(ids)
        stop_token_ids = self.stop_token_ids or tuple(sorted(eos_token_ids))
        if not self.min_tokens:
            stop_token_ids = self.stop_token_ids
        return replace(
            self.params,
            bad_words=words or None,
            min_tokens=self.min_tokens,
            stop_token_ids=stop_token_ids or None,
        )


def bias_of(texts: Sequence[str] | None) -> dict[int, float] | None:
    """``["17=-5", "3=100"]`` to {17: -5.0, 3: 100.0}."""
    bias = {}
    for text in texts or ():
        token_id, _, value = text.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise ValueError(f"logit-bias: expected ID=BIAS as in 17=-5, got {text!r}") from None
    return bias or None


def read_params(path: Path, prompts: int) -> list[dict[str, Any]]:
    """Fields per prompt from a JSON file: a list of objects, or one object for all prompts.

    Raises:
        ValueError: not JSON, or not so many objects.
    """
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as wrong:
        raise ValueError(f"params: cannot read {path}: {wrong}") from wrong
    found = [read] * prompts if isinstance(read, dict) else read
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"params: expected a list of objects in {path}, one per prompt")
    if len(found) != prompts:
        raise ValueError(
            f"params: expected {prompts} objects, one per prompt, got {len(found)} in {path}"
        )
    return [_with_int_keys(each) for each in found]


def _with_int_keys(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no integer keys: those of logit_bias are made so."""
    bias = values.get("logit_bias")
    if not isinstance(bias, dict):
        return values
    return values | {"logit_bias": bias_of([f"{k}={v}" for k, v in bias.items()])}
