"""Makes one request per prompt of the options of `tpsample generate`, or of a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tpsample.request.as_json import from_json
from tpsample.request.params import SamplingParams

_LATER = ("bad_words", "min_tokens", "stop_token_ids")
"""Fields that may need the model: its tokenizer, its end-of-sequence ids."""
_ENGINE = ("max_tokens", "stop", "n")
"""Fields that the sampler does not know: how long answers are, what ends them, how many."""
_NOT_SHOWN = {"logprobs", "logprob_token_ids"}
"""Fields that ask for what the command does not print."""

MAX_ANSWERS = 4096
"""Rows of one call, each of which is generated at the same time as the others."""

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
        max_tokens: most tokens of the answer; None leaves it to --max-new-tokens.
        stop: texts that end the answer and are not part of it.
    """

    prompt: str
    params: SamplingParams
    bad_words: tuple[Any, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @staticmethod
    def of(prompt: str, values: Mapping[str, Any]) -> Request:
        """Make a request of fields of SamplingParams, `max_tokens` and `stop` by name.

        Raises:
            TypeError, ValueError: a field is wrong; the message names it.
        """
        params = SamplingParams(**{k: v for k, v in values.items() if k not in (*_LATER, *_ENGINE)})
        bad_words, min_tokens = values.get("bad_words") or (), values.get("min_tokens", 0)
        stop_token_ids = values.get("stop_token_ids") or ()
        if "" in bad_words:
            raise ValueError("bad_words: expected texts that are not empty, got ''; leave it out")
        # Checked now as far as possible: before a model is loaded, whose ends are none of these.
        allowed = set(params.allowed_token_ids or ())
        no_end = next(token_id for token_id in itertools.count() if token_id not in allowed)
        replace(
            params,
            bad_words=[words for words in bad_words if not isinstance(words, str)],
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids or [no_end],
        )
        return Request(
            prompt,
            params,
            tuple(bad_words),
            min_tokens,
            tuple(stop_token_ids),
            values.get("max_tokens"),
            tuple(values.get("stop", ())),
        )

    def complete(self, tokenizer: Any, eos_token_ids: Collection[int]) -> SamplingParams:
        """Return the request, its words as ids and the model's end-of-sequence ids held back.

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
    """Return {17: -5.0, 3: 100.0} for ``["17=-5", "3=100"]``."""
    bias = {}
    for text in texts or ():
        token_id, _, value = text.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise ValueError(f"logit-bias: expected ID=BIAS as in 17=-5, got {text!r}") from None
    return bias or None


def read_params(path: Path, rows: int, why: str = "one per prompt") -> list[dict[str, Any]]:
    """Read fields per row from a JSON file: a list of objects, or one object for all rows.

    Args:
        why: says why there are so many rows.

    Raises:
        ValueError: not JSON, a field that cannot be used, or another number of objects.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as wrong:
        raise ValueError(f"params: cannot read {path}: {wrong}") from wrong
    found = [read] * rows if isinstance(read, dict) else read
    if not isinstance(found, list):
        raise ValueError(f"params: expected a list of objects in {path}, {why}")
    if len(found) != rows:
        raise ValueError(
            f"params: expected {rows} object{'s' * (rows != 1)}, {why}, got {len(found)} in "
            f"{path}; an object without a list around it is for all"
        )
    return [_fields(f"params[{row}]", each) for row, each in enumerate(found)]


def _fields(where: str, values: Any) -> dict[str, Any]:
    """Return the fields of a request: those of the sampler, and those of `_ENGINE`."""
    if not isinstance(values, dict):
        return from_json(where, values)
    rest = {name: value for name, value in values.items() if value is not None}
    mine: dict[str, Any] = {}
    if "max_completion_tokens" in rest:  # what OpenAI's API calls it now
        if "max_tokens" in rest:
            raise ValueError(f"{where}: max_tokens and max_completion_tokens are one; give one")
        rest["max_tokens"] = rest.pop("max_completion_tokens")
    for name in ("max_tokens", "n"):
        if name in rest:
            mine[name] = rest.pop(name)
            if type(mine[name]) is not int or mine[name] < 1:
                raise ValueError(f"{where}: {name}: expected an int >= 1, got {mine[name]!r}")
    if "stop" in rest:
        stop = rest.pop("stop")
        mine["stop"] = [stop] if isinstance(stop, str) else stop
        if not isinstance(mine["stop"], list) or not all(
            isinstance(text, str) and text for text in mine["stop"]
        ):
            raise ValueError(f"{where}: stop: expected a text or a list of texts, got {stop!r}")
    fields = from_json(where, rest)
    for name in _NOT_SHOWN & fields.keys():
        raise ValueError(
            f"{where}: {name}: generate shows none; --trace FILE.safetensors writes the logprobs "
            "of every step"
        )
    return fields | mine


def asked(
    prompts: Sequence[str],
    temperatures: Sequence[float],
    seed: int,
    shared: Mapping[str, Any],
    *,
    params_file: Path | None = None,
    num_samples: int = 1,
) -> list[Request]:
    """Return one request per row, the answers to one prompt after another.

    One prompt alone is asked at each temperature; several go through the temperatures.

    Args:
        seed: row i draws with seed + i. Answers to one prompt whose file names a seed draw with
            that one and those after it.
        num_samples: answers per prompt; a file's `n` is over it.
    """
    prompts, why = list(prompts), "one per prompt"
    if len(prompts) == 1 and len(temperatures) > 1:
        prompts = prompts * len(temperatures)
        why = "one per --temperature, since one prompt alone is asked at each of them"
    own: list[dict[str, Any]] = [{} for _ in prompts]
    if params_file is not None:
        own = read_params(params_file, len(prompts), why)
    answers = sum(fields.get("n", num_samples) for fields in own)
    if answers > MAX_ANSWERS:
        raise ValueError(
            f"n: expected at most {MAX_ANSWERS} answers to all prompts together, got {answers}; "
            "ask for fewer, or start the command several times"
        )
    rows: list[Request] = []
    for place, (prompt, fields) in enumerate(zip(prompts, own, strict=True)):
        temperature = temperatures[place % len(temperatures)]
        for answer in range(fields.get("n", num_samples)):
            drawn = {"temperature": temperature, "seed": seed + len(rows)}
            values = {**drawn, **shared, **fields}
            if "seed" in fields:
                values["seed"] = fields["seed"] + answer
            rows.append(Request.of(prompt, values))
    return rows


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, whose names must differ."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is given twice in one object")
        values[name] = value
    return values
