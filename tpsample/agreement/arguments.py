"""The arguments of `LMHeadSampler`, checked on each rank and then put together over all."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tpsample.core.checks import check_choice, check_int, describe, fits, real_number, require_plain
from tpsample.core.score import Head
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import MAX_VOCAB_SIZE, NO_TOKEN
from tpsample.errors import RankMismatch
from tpsample.noise import check_rounds

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ExchangeName = Literal["auto", "collective", "p2p", "peer", "two_level"]
BackendName = Literal["auto", "triton", "numba", "torch"]
ScreeningName = Literal["int8"]
MAX_CHUNKS = 64


_INTEGERS = {
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "max_rows": (1, 2**20),
    "chunks": (1, MAX_CHUNKS),
    "desync_every": (0, 2**31 - 1),
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
    if given["screening"] is not None and weight.shape[1] == 0:
        raise ValueError(
            f'screening: "{given["screening"]}" copies a weight, and lm_head_weight has no column; '
            "leave it out"
        )
    rounds = check_rounds(given["philox_rounds"])
    return given | integers | {"head": _checked_head(given["head"]), "philox_rounds": rounds}


def resolve_shards(
    vocab_size: int | None, shards: list[VocabShard | None], weight_rows: list[int]
) -> tuple[int, list[VocabShard]]:
    """Return the vocabulary size and every rank's shard, from what each rank gave.

    With neither `vocab_size` nor shards the ranks' weight rows follow one another; with
    `vocab_size` alone the vocabulary is cut evenly.

    Raises:
        RankMismatch: shards do not tile [0, vocab_size), or a weight has too few rows.
    """
    ranks = range(len(shards))
    if any((shard is None) != (shards[0] is None) for shard in shards):
        raise RankMismatch(f"shard: give it on every rank or on none, got {shards}")
    if shards[0] is not None:
        given = [shard for shard in shards if shard is not None]
        vocab_size = vocab_size or max(shard.stop for shard in given)
    elif vocab_size is not None:
        given = [VocabShard.even(vocab_size, rank, len(shards)) for rank in ranks]
    else:
        stops = [sum(weight_rows[: rank + 1]) for rank in ranks]
        vocab_size = stops[-1]
        given = [
            VocabShard(stop - rows, stop) for stop, rows in zip(stops, weight_rows, strict=True)
        ]

    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise RankMismatch(f"vocab_size: expected 1 to {MAX_VOCAB_SIZE}, got {vocab_size}")
    covered = 0
    for shard in sorted(shard for shard in given if len(shard)):
        if shard.start != covered:
            raise RankMismatch(
                f"shard: the ranks' shards must tile [0, {vocab_size}) without gap or overlap, "
                f"got {given}"
            )
        covered = shard.stop
    if covered != vocab_size:
        raise RankMismatch(f"shard: expected shards up to vocab_size={vocab_size}, got {given}")
    for rank in ranks:
        if weight_rows[rank] < len(given[rank]):
            raise RankMismatch(
                f"lm_head_weight: rank {rank} needs {len(given[rank])} rows for its shard "
                f"{given[rank]}, got {weight_rows[rank]}"
            )
    return vocab_size, given


def check_sliced(vocab_size: int | None, weight_rows: list[int], digests: list[int | None]) -> None:
    """Check that each of several ranks, which name no shards, was given rows of its own.

    Args:
        digests: of each rank's rows; None if unknown.

    Raises:
        RankMismatch: every rank holds the whole vocabulary, or two ranks the same rows.
    """
    way_out = (
        "pass each rank its own rows, lm_head_weight[shard.start : shard.stop] with shard = "
        "VocabShard.even(vocab_size, rank, world_size); where this is meant, name them by shard="
    )
    if len(weight_rows) > 1 and vocab_size is not None and min(weight_rows) >= vocab_size:
        raise RankMismatch(
            f"lm_head_weight: expected a shard of the {vocab_size} rows of the vocabulary, but "
            f"every rank holds at least as many; {way_out}"
        )
    first: dict[tuple[int, int], int] = {}
    for rank, (rows, digest) in enumerate(zip(weight_rows, digests, strict=True)):
        if digest is not None and first.setdefault((rows, digest), rank) != rank:
            raise RankMismatch(
                f"lm_head_weight: rank {first[rows, digest]} and rank {rank} hold the same "
                f"{rows} rows; {way_out}"
            )


def _check_weight(weight: object) -> None:
    require_plain("lm_head_weight", weight)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        way_out = ""
        for of in ("lm_head.", ""):
            module = getattr(weight, "lm_head", None) if of else weight
            if not way_out and hasattr(module, "weight"):
                has_bias = getattr(module, "bias", None) is not None
                way_out = f"; pass its .{of}weight" + f", and bias=its .{of}bias" * has_bias
        raise TypeError(
            f"lm_head_weight: expected a tensor [V_local, D], got {describe(weight)}{way_out}"
        )
    if weight.dtype not in WEIGHT_DTYPES:
        dtypes = ", ".join(map(str, WEIGHT_DTYPES))
        way_out = "convert it once with .to(torch.float32)"
        if weight.itemsize == 1:  # whose scale is not in it
            way_out = (
                "a quantised head makes its logits itself: pass them to sample_logits of a sampler "
                "over torch.empty(V_local, 0)"
            )
        raise ValueError(f"lm_head_weight: expected one of {dtypes}, got {weight.dtype}; {way_out}")
    if weight.shape[1] > 1 and weight.shape[0] > 1 and weight.stride(1) != 1:
        raise ValueError(
            f"lm_head_weight: expected [V_local, D] with a contiguous last axis, got "
            f"{tuple(weight.shape)} with strides {weight.stride()}; call .contiguous(), or pass "
            ".T of it if it is [D, V_local]"
        )


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
    right = fits(bias, WEIGHT_DTYPES, weight.shape[:1], weight.device)
    if not right or (bias.shape[0] > 1 and bias.stride(0) != 1):
        raise ValueError(
            f"bias: expected a contiguous floating-point tensor [{weight.shape[0]}] on "
            f"{weight.device}, one value per row of lm_head_weight, got {describe(bias)}"
        )


def _checked_head(head: Head) -> Head:
    """Return the head with floats of Python's, because other numbers cannot be sent as JSON."""
    scale, cap = real_number(head.logit_scale), head.logit_softcap
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(
            f"logit_scale: expected a finite number ≠ 0, got {describe(head.logit_scale)}"
        )
    if cap is not None and not (math.isfinite(real_number(cap)) and real_number(cap) > 0):
        raise ValueError(
            f"logit_softcap: expected None or a finite number > 0, got {describe(cap)}"
        )
    return Head(scale, None if cap is None else real_number(cap))
