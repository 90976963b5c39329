"""Requests of SGLang: every field is honoured, left to SGLang, or refused by name at its door."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tpsample.errors import UnsupportedParameter

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "sampling_seed")
"""Fields that the sampler of a step reads."""

LEFT_TO_SGLANG = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "stop_strs", "stop_regex_strs"),
    *("stop_str_max_len", "stop_regex_max_len", "is_normalized", "n", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"),
)
"""Fields that SGLang honours outside its sampler."""

REFUSED: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "ebnf_full_assistant": False,
    "structural_tag": None,
    "custom_params": None,
    "watermark": None,
    "beam_width": None,
}
"""Fields that SGLang applies to logits of all tokens, with the value that asks for nothing."""

REFUSED_OF_REQUEST = ("return_logprob", "custom_logit_processor", "lora_path")
"""The same of a whole request."""


def check_request(request: Any) -> None:
    """Raise for what a request asks for and is not honoured, before it is let in.

    Args:
        request: `GenerateReqInput`, whose `sampling_params` is a mapping.

    Raises:
        UnsupportedParameter: (a ValueError) naming the field.
    """
    for name in REFUSED_OF_REQUEST:
        if getattr(request, name, None):
            raise UnsupportedParameter(f"{name}: not supported with tpsample")
    params: Mapping[str, Any] = request.sampling_params or {}
    for name, value in params.items():
        if name in REFUSED and value not in (None, REFUSED[name]):
            raise UnsupportedParameter(f"{name}: not supported with tpsample")
        if name not in (*SAMPLED, *LEFT_TO_SGLANG, *REFUSED):
            raise UnsupportedParameter(f"{name}: not known to tpsample")


def seed_of(request: Any) -> int:
    """Return the seed of a request in its batch; one that names none has that of its own name.

    SGLang's names are random, and the same on every rank.
    """
    seed = request.sampling_params.sampling_seed
    if seed is not None:
        return int(seed)
    digest = hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
