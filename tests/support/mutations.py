"""Files that a user never meant to hand in: records and requests, changed at random by a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\u001b]0;\u0007\n\ud800", "ä" * 3000, [], {}, [[]], [[[]]]),
    *(0, 1, -1, 7, 2**31, -(2**31), 2**63, -(2**63), 2**64, 2**70, 10**400, [2**70], ["x"], [5]),
    *(0.5, 1e-50, 1e39, -1e39, 1e400, -1e400, float("nan"), [-1], [None], {"a": 1}, {"5": "x"}),
    *([[5, "x"]], {"0": 1e400}, {"9999999999": 1}, [[2**40]], [0] * 3000),
)
NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "bad_words", "min_tokens"),
    *("allowed_token_ids", "stop_token_ids", "logprobs", "logprob_token_ids", "ties"),
    *("repetition_penalty", "presence_penalty", "filter_order", "device", "max_rows", "self"),
    *("prompt_token_ids", "output_token_ids", "vocab_size", "kept_cap", "__class__", "model"),
    *("two\nlines", "\u001b[31m"),
)
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)
EXTREMES = (0, 1, -1, 299, 300, 2**31, 2**40, 2**63 - 1, -(2**63))


def mutated_json(document: Any, own: random.Random) -> Any:
    """A copy with one to three values replaced, taken out or put in."""
    document = json.loads(json.dumps(document))
    for _ in range(own.randint(1, 3)):
        places = list(_places(document))
        if not places:
            return _value(own)
        container, key = own.choice(places)
        how = own.randrange(4)
        if how == 0 and isinstance(container, dict):
            container[own.choice(NAMES)] = _value(own)
        elif how == 1:
            del container[key]
        else:
            container[key] = _value(own)
    return document


def _value(own: random.Random) -> Any:
    """A copy, which may be changed."""
    return copy.deepcopy(own.choice((*VALUES, 2**31 - 1)))


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) in a JSON document."""
    pairs: Any = ()
    if isinstance(document, dict):
        pairs = list(document.items())
    elif isinstance(document, list):
        pairs = list(enumerate(document[:20]))
    for key, value in pairs:
        yield document, key
        yield from _places(value)


def mutated_bytes(content: bytes, own: random.Random) -> bytes:
    """Cut short, flipped, or with a number in it replaced by another of as many digits."""
    how = own.randrange(4)
    if how == 0:
        return content[: own.randrange(len(content))]
    changed = bytearray(content)
    if how == 1:
        digits = [i for i, byte in enumerate(content[:4000]) if chr(byte).isdigit()]
        for place in own.sample(digits, min(3, len(digits))):
            changed[place] = ord(own.choice("0123456789"))
        return bytes(changed)
    region = len(content) if how == 2 else min(len(content), 1500)
    for _ in range(own.randint(1, 8)):
        changed[own.randrange(region)] ^= 1 << own.randrange(8)
    return bytes(changed)


def mutated_tensors(tensors: dict[str, torch.Tensor], own: random.Random) -> None:
    """One tensor retyped, reshaped, taken out, or with an extreme value in it."""
    name = own.choice(sorted(tensors))
    tensor = tensors[name]
    how = own.randrange(6)
    if how == 0:
        del tensors[name]
    elif how == 1:
        tensors[name] = tensor.to(own.choice(DTYPES))
    elif how == 2:
        shapes = [(0, 2**40), (2**40, 0), (0,), (), (1, tensor.numel()), (tensor.numel(), 1)]
        shape = own.choice(shapes)
        empty = tensor.new_empty(shape) if 0 in shape or not shape else tensor.reshape(shape)
        tensors[name] = empty.clone()
    elif how == 3:
        tensors[name] = tensor.T.contiguous() if tensor.ndim == 2 else tensor[:-1].clone()
    elif how == 4:
        tensors[own.choice(["x", "bias", "lm_head_weight", "logits"])] = tensor.clone()
    else:
        values = (torch.nan, torch.inf, -torch.inf, 1e38)
        extremes = values if tensor.is_floating_point() else EXTREMES
        flat = tensors[name] = tensor.clone()
        extreme = own.choice(extremes)
        if flat.dtype == torch.int32:
            extreme = max(-(2**31), min(2**31 - 1, extreme))
        flat.view(-1)[own.randrange(flat.numel())] = extreme


def mutated_record(right: Path, wrong: Path, own: random.Random) -> None:
    """Write a record in which something is not as it should be."""
    how = own.randrange(3)
    if how == 0:
        wrong.write_bytes(mutated_bytes(right.read_bytes(), own))
        return
    tensors = load_file(right)
    with safe_open(right, framework="pt") as file:
        metadata = json.loads(file.metadata()["tpsample"])
    if how == 1:
        mutated_tensors(tensors, own)
    else:
        metadata = mutated_json(metadata, own)
    save_file(tensors, wrong, metadata={"tpsample": json.dumps(metadata)})
