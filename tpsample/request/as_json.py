"""A request as JSON, in a record and on a command line.

    {"top_p": 0.9, "logit_bias": {"17": -5}, "seed": null, "logprobs": 2}

The fields are those of `SamplingParams`. A field that is null counts as not given.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tpsample.core.checks import describe, shorten
from tpsample.core.sealed import way_out
from tpsample.core.word import MAX_VOCAB_SIZE
from tpsample.request.params import MAX_LOGIT_BIAS, SamplingParams

FIELDS = tuple(field.name for field in fields(SamplingParams))
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")
_LISTS = ("allowed_token_ids", "bad_words", "stop_token_ids", "logprob_token_ids")


def to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that are not at their defaults, as JSON values."""
    default = SamplingParams()
    changed = {n: getattr(params, n) for n in FIELDS if getattr(params, n) != getattr(default, n)}
    as_json: dict[str, Any] = json.loads(json.dumps(changed))
    return as_json


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object that a parser of JSON read. Of a name that comes twice one would be lost.

    Raises:
        ValueError: a name comes twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{describe(name)} twice in one object")
        found[name] = value
    return found


def from_json(where: str, values: Any) -> dict[str, Any]:
    """Return fields of SamplingParams from a JSON object; bad_words may hold texts beside ids.

    Biases beyond ±100 are clamped.

    Raises:
        ValueError: an unknown field, or a value that cannot be used; names `where` and the field.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected an object of fields, got {describe(values)}")
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if name not in FIELDS:
            raise ValueError(
                f"{where}: {shorten(name)}: not a field of SamplingParams; {way_out(name, FIELDS)}"
            )
    if "logit_bias" in given:
        given["logit_bias"] = _biases(where, given["logit_bias"])
    try:
        _check(given)
    except (TypeError, ValueError) as error:  # whose text begins with the field
        raise ValueError(f"{where}: {error}") from error
    return given


def _check(given: dict[str, Any]) -> None:
    """Raise unless these fields make a request."""
    for name in _LISTS:
        if not isinstance(given.get(name, []), list):
            raise TypeError(f"{name}: expected a list, got {describe(given[name])}")
    words = [word for word in given.get("bad_words", []) if not isinstance(word, str)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # min_tokens may hold back the model's stop ids
        params = SamplingParams(**given | {"bad_words": words or None})
    params.check_vocab(MAX_VOCAB_SIZE)


def _biases(where: str, value: Any) -> dict[int, float]:
    """Return biases by token id, because the keys of JSON are strings."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where}: logit_bias: expected an object of biases by id, got {describe(value)}"
        )
    biases = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(
                f"{where}: logit_bias: expected token ids as keys, got {describe(key)}"
            )
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or bias != bias:
            raise ValueError(
                f"{where}: logit_bias[{shorten(key)}]: expected a number, got {describe(bias)}"
            )
        biases[int(key)] = float(max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias)))
    return biases
