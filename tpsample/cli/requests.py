"""The requests of `tpsample generate`, from its options; with a model, their answers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpsample.cli.model import Model
from tpsample.core.checks import check_int, describe
from tpsample.noise import signed64
from tpsample.record.format import Record
from tpsample.request.as_json import from_json
from tpsample.request.params import SamplingParams

_ENGINE = ("max_tokens", "stop", "n")
"""Fields that the sampler does not know: how long answers are, what ends them, how many."""
_NOT_SHOWN = {"logprobs", "logprob_token_ids"}
"""Fields that ask for what the command does not print."""

MAX_ANSWERS = 4096
"""Rows of one call, which are all generated at the same time."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to sample it, before a model is there.

    Attributes:
        fields: of SamplingParams, and `max_tokens` and `stop`; `bad_words` may hold texts, and
            `min_tokens` without `stop_token_ids` holds back the model's own.

    Raises:
        TypeError, ValueError: a field is wrong, as far as that shows without a model.
    """

    prompt: str
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # min_tokens may have nothing to hold back yet
            self.params(lambda text: [], ())

    def params(
        self, encode: Callable[[str], list[int]], eos_token_ids: Collection[int]
    ) -> SamplingParams:
        """Return the request, its words as ids and the model's end-of-sequence ids held back.

        A text is forbidden with and without a space before it, which are different tokens.
        """
        fields = {name: value for name, value in self.fields.items() if name not in _ENGINE}
        words: list[list[int]] = []
        for word in fields.pop("bad_words", ()):
            texts = (word, " " + word.lstrip()) if isinstance(word, str) else ()
            ways = [encode(text) for text in texts] if texts else [word]
            words += [ids for ids in ways if (ids or not texts) and ids not in words]
        if fields.get("min_tokens") and not fields.get("stop_token_ids"):
            fields["stop_token_ids"] = sorted(eos_token_ids) or None
        return SamplingParams(**fields, bad_words=words or None)

    def row(self, model: Model, max_tokens: int, *, raw: bool = False) -> Row:
        """Return the row that is to be drawn; `raw` as in `Model.prompt_token_ids`."""
        encode = partial(model.tokenizer.encode, add_special_tokens=False)
        return Row(
            model,
            model.prompt_token_ids(self.prompt, raw=raw),
            self.params(encode, model.eos_token_ids),
            max_tokens=min(max_tokens, self.fields.get("max_tokens", max_tokens)),
            stop=self.fields.get("stop", ()),
        )


@dataclass
class Row:
    """The answer to a request while it is drawn.

    Attributes:
        prompt: token ids.
        max_tokens: how many may be drawn.
        stop: texts that end the answer, and are not of it.
        drawn: token ids; the last one may be an end of sequence.
        states: the hidden states [D] that they were drawn from.
    """

    model: Model
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    drawn: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    ended: bool = False

    def take(self, token_id: int, state: Tensor) -> None:
        """Add a token, and see whether the answer has ended."""
        self.drawn.append(token_id)
        self.states.append(state)
        self.ended = token_id in self.model.eos_token_ids or len(self.drawn) == self.max_tokens
        text = self._whole() if self.stop else ""
        self.ended |= any(stop in text for stop in self.stop)

    @property
    def answer(self) -> list[int]:
        """The token ids without an end of sequence."""
        return [each for each in self.drawn if each not in self.model.eos_token_ids]

    def text(self) -> str:
        """Return the text of the answer, without its first stop text and what follows."""
        text = self._whole()
        found = [text.find(stop) for stop in self.stop if stop in text]
        return text[: min(found, default=None)]

    def _whole(self) -> str:
        text: str = self.model.tokenizer.decode(self.answer, skip_special_tokens=True)
        return text


def fields_of(settings: Sequence[str]) -> dict[str, Any]:
    """Return ``{"top_k": 5, "stop": ["end"]}`` for ``["top_k=5", "stop=end"]``.

    A value is JSON, or else a text. Fields are those of the sampler, and those of `_ENGINE`.
    """
    given: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"set: expected NAME=VALUE as in top_k=5, got {describe(setting)}")
        if name in given:
            raise ValueError(f"set: {describe(name)} is given twice")
        try:
            given[name] = json.loads(value)
        except (ValueError, RecursionError):
            given[name] = value
    rest = {name: value for name, value in given.items() if value is not None}
    if "max_completion_tokens" in rest:  # what OpenAI's API calls it now
        if "max_tokens" in rest:
            raise ValueError("set: max_tokens and max_completion_tokens are one; give one")
        rest["max_tokens"] = rest.pop("max_completion_tokens")
    mine = {name: rest.pop(name) for name in _ENGINE if name in rest}
    for name in mine.keys() - {"stop"}:
        check_int(f"set: {name}", mine[name], 1, 2**31 - 1)
    if "stop" in mine:
        stop = mine["stop"]
        mine["stop"] = [stop] if isinstance(stop, str) else stop
        if not isinstance(mine["stop"], list) or not all(
            isinstance(text, str) and text for text in mine["stop"]
        ):
            raise ValueError(f"set: stop: expected a text or a list of texts, got {describe(stop)}")
    fields = from_json("set", rest)
    for name in _NOT_SHOWN & fields.keys():
        raise ValueError(f"set: {name}: generate shows none; launch/examples/topk_trace.py does")
    if "" in fields.get("bad_words", ()):
        raise ValueError("set: bad_words: expected texts that are not empty, got ''; leave it out")
    return fields | mine


def asked(
    prompts: Sequence[str],
    temperatures: Sequence[float],
    seed: int,
    shared: Mapping[str, Any],
    *,
    num_samples: int = 1,
) -> list[Request]:
    """Return one request per row, the answers to one prompt after another.

    One prompt alone is asked at each temperature; several go through the temperatures.

    Args:
        seed: row i draws with seed + i. Answers to one prompt whose fields name a seed draw with
            that one and those after it.
        shared: fields of every row, over temperature and seed.
        num_samples: answers per prompt; the field `n` is over it.
    """
    prompts, fields = list(prompts), {"n": num_samples, **shared}
    if len(prompts) == 1 and len(temperatures) > 1:
        prompts = prompts * len(temperatures)
    answers = fields["n"] * len(prompts)
    if answers > MAX_ANSWERS:
        raise ValueError(
            f"n: expected at most {MAX_ANSWERS} answers to all prompts together, got {answers}; "
            "ask for fewer, or start the command several times"
        )
    rows: list[Request] = []
    for index, prompt in enumerate(prompts):
        temperature = temperatures[index % len(temperatures)]
        for answer in range(fields["n"]):
            its = fields["seed"] + answer if "seed" in fields else seed + len(rows)
            rows.append(Request(prompt, {"temperature": temperature, **fields, "seed": its}))
    return rows


def record_of(model: Model, rows: Sequence[Row]) -> Record:
    """Return every token that was drawn, row by row, with what it was drawn from."""
    draws = [(row, t) for row in rows for t in range(len(row.drawn))]
    states = torch.stack([row.states[t] for row, t in draws])
    numbers = [
        (len(row.prompt) + t, signed64(row.params.seed or 0), row.drawn[t]) for row, t in draws
    ]
    columns = torch.tensor(numbers, device=states.device).T.contiguous()
    tensors = dict(zip(("positions", "seeds", "token_ids"), columns, strict=True))
    tensors["status"] = torch.zeros(len(draws), dtype=torch.int32, device=states.device)
    so_far = {
        "prompt_token_ids": [row.prompt for row, _ in draws],
        "output_token_ids": [row.drawn[:t] if row.params.reads_output else [] for row, t in draws],
    }
    return Record(
        {"hidden_states": states, **tensors},
        [row.params for row, _ in draws],
        so_far,
        model.lm_head.options,
        model=model.name,
    )
