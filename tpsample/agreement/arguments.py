"""The arguments of `LMHeadSampler`, checked on each rank and then put together over all."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from torch import Tensor

from tpsample.backends.screening.int8_copy import MAX_COLUMNS
from tpsample.core.checks import (
    as_fp32,
    check_choice,
    check_int,
    describe,
    fits,
    real_number,
    require_memory,
    require_plain,
)
from tpsample.core.score import LOGIT_DTYPES, Head
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.weight_format import FORMATS
from tpsample.core.word import MAX_VOCAB_SIZE, NO_TOKEN

ExchangeName = Literal["auto", "collective", "p2p", "peer", "two_level"]
BackendName = Literal["auto", "triton", "numba", "torch"]
ScreeningName = Literal["int8"]
MAX_CHUNKS = 64


_INTEGERS = {
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "max_rows": (1, 2**20),
    "chunks": (1, MAX_CHUNKS),
    "on_failed": (NO_TOKEN, MAX_VOCAB_SIZE - 1),
}
"""The least and the largest value."""
_CHOICES = {
    "exchange": get_args(ExchangeName),
    "backend": get_args(BackendName),
    "screening": (None, *get_args(ScreeningName)),
}


def checked_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LMHeadSampler`, as far as one rank alone can check them.

    Numbers become those of Python, because others cannot be sent as JSON. `head` is a `Head` of
    `logit_scale` and `logit_softcap`, `weight` is lm_head_weight, and `group` is not among them.

    Raises:
        TypeError, ValueError: one is wrong; the message names it.
    """
    weight, vocab_size, shard, bias = (given[n] for n in ("weight", "vocab_size", "shard", "bias"))
    _check_weight(weight)
    integers = {
        name: check_int(name, given[name], *bounds)
        for name, bounds in _INTEGERS.items()
        if name != "vocab_size" or vocab_size is not None
    }
    if shard is not None:
        _check_shard(shard, weight, vocab_size)
    if bias is not None:
        _check_bias(bias, weight)
    for name, choices in _CHOICES.items():
        check_choice(name, given[name], choices)
    columns = weight.shape[1]
    if given["screening"] is not None and not 0 < columns <= MAX_COLUMNS:
        raise ValueError(
            f'screening: "{given["screening"]}" needs a weight of 1 to {MAX_COLUMNS} columns, '
            f"lm_head_weight has {columns}; leave it out"
        )
    return given | integers | {"head": checked_head(given["head"])}


_QUANTISED = (
    "a quantised head makes its logits itself: pass them to sample_logits of a sampler over "
    "torch.empty(V_local, 0)"
)


def _check_weight(weight: object) -> None:
    require_plain("lm_head_weight", weight)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        way_out = ""
        if isinstance(weight, Tensor) and weight.ndim == 1:
            way_out = "; inside FSDP's summon_full_params a flat weight has its shape"
        for of in ("lm_head.", "module.", ""):  # of a model, of what wraps a module, its own
            module = getattr(weight, of[:-1], None) if of else weight
            if not way_out and callable(getattr(module, "weight", None)):  # of torch.ao.nn
                way_out = f"; {_QUANTISED}"
            elif not way_out and hasattr(module, "weight"):
                has_bias = getattr(module, "bias", None) is not None
                way_out = f"; pass its .{of}weight" + f", and bias=its .{of}bias" * has_bias
        raise TypeError(
            "lm_head_weight: expected a tensor [V_local, D], or a module with one as its weight, "
            f"got {describe(weight)}{way_out}"
        )
    if weight.is_meta:
        raise ValueError(
            "lm_head_weight: is on the meta device, so it has no numbers; build the sampler after "
            "the weights are loaded"
        )
    if weight.dtype not in FORMATS:
        dtypes = ", ".join(map(str, FORMATS))
        way_out = "convert it once with .to(torch.float32)"
        if weight.itemsize == 1:  # whose scale is not in it
            way_out = _QUANTISED
        raise ValueError(f"lm_head_weight: expected one of {dtypes}, got {weight.dtype}; {way_out}")
    if weight.shape[1] > 1 and weight.shape[0] > 1 and weight.stride(1) != 1:
        raise ValueError(
            f"lm_head_weight: expected [V_local, D] with a contiguous last axis, got "
            f"{tuple(weight.shape)} with strides {weight.stride()}; call .contiguous(), or pass "
            ".T of it if it is [D, V_local]"
        )
    require_memory("lm_head_weight", weight)


def _check_shard(shard: VocabShard, weight: Tensor, vocab_size: int | None) -> None:
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard, got {describe(shard)}")
    if len(shard) > weight.shape[0]:
        raise ValueError(
            f"shard: {shard} needs {len(shard)} weight rows, lm_head_weight has {weight.shape[0]}"
        )
    if vocab_size is not None and shard.stop > vocab_size:
        raise ValueError(f"shard: {shard} reaches past vocab_size={vocab_size}")


def _check_bias(bias: Tensor, weight: Tensor) -> None:
    right = fits(bias, LOGIT_DTYPES, weight.shape[:1], weight.device)
    if not right:
        way_out = ""
        if isinstance(bias, Tensor) and bias.ndim == 1 and len(bias) < len(weight):
            way_out = "; a padded weight needs a padded bias, or pass the rows without padding"
        elif isinstance(bias, Tensor) and bias.shape == weight.shape[:1]:
            way_out = "; convert it with .to(weight.device, torch.float32)"
        raise ValueError(
            f"bias: expected fp32, bf16 or fp16 [{weight.shape[0]}] on {weight.device}, one value "
            f"per row of lm_head_weight, got {describe(bias)}{way_out}"
        )
    if bias.shape[0] > 1 and bias.stride(0) != 1:
        raise ValueError(
            f"bias: expected contiguous values, got strides {bias.stride()}; call .contiguous()"
        )
    require_memory("bias", bias)


def checked_head(head: Head) -> Head:
    """Return the head with floats of Python's, because other numbers cannot be sent as JSON."""
    cap = head.logit_softcap
    return Head(
        _positive("logit_scale", head.logit_scale, ""),
        None if cap is None else _positive("logit_softcap", cap, "None or "),
    )


def _positive(name: str, value: object, other: str) -> float:
    """Return a number as a float, if it is above 0 and finite as the fp32 number that it becomes.

    Args:
        other: what else a message says is expected.
    """
    number = real_number(value)
    if not 0 < as_fp32(number) < math.inf:
        got = describe(value) + "; give float(…) of it" * isinstance(value, Tensor)
        raise ValueError(f"{name}: expected {other}a finite fp32 number > 0, got {got}")
    return number
