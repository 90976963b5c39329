"""The requests of `tpsample generate`, from its options."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpsample.cli.answers import Row
from tpsample.cli.model import Model
from tpsample.core.checks import describe, is_text
from tpsample.request.as_json import from_json, once
from tpsample.request.params import SamplingParams

_OPTIONS = {"temperature": "temperature", "seed": "seed", "n": "num-samples"} | dict.fromkeys(
    ("max_tokens", "max_completion_tokens"), "max-new-tokens"
)
"""Fields that have an option of their own."""
_NOT_SHOWN = ("logprobs", "logprob_token_ids")
"""Fields that ask for what the command does not print."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to sample it, before a model is there.

    Attributes:
        fields: of SamplingParams; `bad_words` may hold texts, and `min_tokens` without
            `stop_token_ids` holds back the model's own.
        stop: texts that end the answer, and are not of it.

    Raises:
        TypeError, ValueError: a field is wrong, as far as that shows without a model.
    """

    prompt: str
    fields: dict[str, Any]
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        texts = {"prompt": [self.prompt], "set: stop": self.stop}
        for name, given in {**texts, "set: bad_words": self.fields.get("bad_words", ())}.items():
            for text in given:
                if isinstance(text, str) and not is_text(text):
                    raise ValueError(
                        f"{name}: expected text in UTF-8, got {describe(text)}; convert it, as by "
                        "iconv -t UTF-8"
                    )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # min_tokens may have nothing to hold back yet
            self.params(lambda text: [], ())

    def params(
        self, encode: Callable[[str], list[int]], eos_token_ids: Collection[int]
    ) -> SamplingParams:
        """Return the request, its words as ids and the model's end-of-sequence ids held back.

        A text is forbidden with and without a space before it, which are different tokens.
        """
        fields = dict(self.fields)
        words: list[list[int]] = []
        for word in fields.pop("bad_words", ()):
            texts = (word, " " + word.lstrip()) if isinstance(word, str) else ()
            ways = [encode(text) for text in texts] if texts else [word]
            words += [ids for ids in ways if (ids or not texts) and ids not in words]
        if fields.get("min_tokens") and not fields.get("stop_token_ids"):
            fields["stop_token_ids"] = sorted(eos_token_ids) or None
        return SamplingParams(**fields, bad_words=words or None)

    def row(self, model: Model, *, raw: bool = False) -> Row:
        """Return the row that is to be drawn; `raw` as in `Model.prompt_token_ids`."""
        encode = partial(model.tokenizer.encode, add_special_tokens=False)
        prompt_token_ids = model.prompt_token_ids(self.prompt, raw=raw)
        if not prompt_token_ids:
            raise ValueError(f"prompt: {describe(self.prompt)} has no token to continue")
        return Row(
            model,
            prompt_token_ids,
            self.params(encode, model.eos_token_ids),
            stop=self.stop,
        )


def fields_of(settings: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return ``({"top_k": 5}, ["end"])`` for ``["top_k=5", "stop=end"]``.

    A value is JSON, a number without its first 0, or else a text. All are fields of SamplingParams
    but `stop`, which is a text or a list of texts.
    """
    given: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"set: expected NAME=VALUE as in top_k=5, got {describe(setting)}")
        if name in given:
            raise ValueError(f"set: {describe(name)} is given twice")
        if name in _OPTIONS:
            raise ValueError(f"set: {name}: has an option of its own; pass --{_OPTIONS[name]}")
        if name in _NOT_SHOWN:
            raise ValueError(
                f"set: {name}: generate shows none; launch/examples/topk_trace.py does"
            )
        try:
            given[name] = json.loads(
                f"0{value}" if value.startswith(".") else value, object_pairs_hook=once
            )
        except (ValueError, RecursionError):
            given[name] = value
    stop = given.pop("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"set: stop: expected a text or a list of texts, got {describe(stop)}")
    fields = from_json("set", given)
    if "" in fields.get("bad_words", ()):
        raise ValueError("set: bad_words: expected texts that are not empty, got ''; leave it out")
    return fields, stop


def requests_of(
    prompts: Sequence[str],
    temperatures: Sequence[float],
    seed: int,
    settings: Sequence[str] = (),
    *,
    num_samples: int = 1,
) -> list[Request]:
    """Return one request per row, the answers to one prompt after another.

    One prompt alone is asked at each temperature; several go through the temperatures.

    Args:
        seed: row i draws with seed + i.
        settings: of every row, as `fields_of` takes them.
        num_samples: answers per prompt.

    Raises:
        ValueError: a wrong setting, or several prompts and more temperatures than prompts.
    """
    prompts, (fields, stop) = list(prompts), fields_of(settings)
    if len(prompts) == 1 and len(temperatures) > 1:
        prompts = prompts * len(temperatures)
    if over := max(0, len(temperatures) - len(prompts)):
        raise ValueError(
            f"temperature: expected at most {len(prompts)}, one per prompt, got "
            f"{len(temperatures)}; leave {over} out, or pass one prompt, which is asked at each"
        )
    most = 2**64 - len(prompts) * num_samples
    if seed > most:
        raise ValueError(
            f"seed: expected at most {most}, because row i draws with seed + i, got {seed}"
        )
    rows: list[Request] = []
    for index, prompt in enumerate(prompts):
        temperature = temperatures[index % len(temperatures)]
        for _ in range(num_samples):
            own = {"temperature": temperature, "seed": seed + len(rows)}
            rows.append(Request(prompt, fields | own, stop))
    return rows
