"""Every check of what a user hands in. Each message names the argument, what was expected, what
came and, where it is not obvious, the way out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.errors import RankMismatch
from tpsample.noise import check_rounds
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.plan import BatchView
from tpsample.score import Head
from tpsample.vocab_shard import VocabShard
from tpsample.word import MAX_VOCAB_SIZE

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXCHANGES = ("auto", "collective", "p2p", "peer", "two_level")
BACKENDS = ("auto", "triton", "torch")
MAX_CHUNKS = 64


@dataclass(frozen=True)
class SamplerArguments:
    """The arguments of `LMHeadSampler` that can be checked on one rank alone."""

    weight: Tensor
    vocab_size: int | None
    shard: VocabShard | None
    bias: Tensor | None
    head: Head
    max_rows: int
    exchange: str
    chunks: int
    philox_rounds: int
    backend: str
    desync_every: int

    def __post_init__(self) -> None:
        _check_weight(self.weight)
        if self.vocab_size is not None:
            _check_int("vocab_size", self.vocab_size, 1, MAX_VOCAB_SIZE)
        if self.shard is not None:
            _check_shard(self.shard, self.weight, self.vocab_size)
        if self.bias is not None:
            _check_bias(self.bias, self.weight)
        _check_head(self.head)
        _check_int("max_rows", self.max_rows, 1, 2**20)
        _check_int("chunks", self.chunks, 1, MAX_CHUNKS)
        _check_choice("exchange", self.exchange, EXCHANGES)
        _check_choice("backend", self.backend, BACKENDS)
        check_rounds(self.philox_rounds)
        _check_int("desync_every", self.desync_every, 0, 2**31 - 1)


def resolve_shards(
    vocab_size: int | None, shards: list[VocabShard | None], weight_rows: list[int]
) -> tuple[int, list[VocabShard]]:
    """The vocabulary size and every rank's shard, from what each rank gave.

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
    """Whether each of several ranks, which name no shards, was given rows of its own.

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


def check_current(device: torch.device) -> None:
    """Kernels are launched on the current device of the process."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"lm_head_weight: is on {device}, but the current device of this process is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device first"
        )


def check_step(
    hidden_states: Tensor,
    batch: object,
    num_samples: int,
    *,
    weight: Tensor,
    vocab_size: int,
    max_rows: int,
) -> None:
    """What a step can check without reading the device."""
    check_current(weight.device)
    _check_hidden_states(hidden_states, weight)
    check_batch(batch, vocab_size, weight.device)
    if hidden_states.shape[0] * num_samples > max_rows:
        raise ValueError(
            f"hidden_states: {hidden_states.shape[0]} rows × {num_samples} samples exceed "
            f"max_rows={max_rows}; build the sampler with a larger max_rows"
        )


def check_batch(batch: object, vocab_size: int, device: torch.device) -> None:
    """A batch that fits a sampler."""
    if not isinstance(batch, (SamplingBatch, BatchView)):
        raise TypeError(
            f"batch: expected a SamplingBatch, got {type(batch).__name__}; "
            "see SamplingBatch.from_params"
        )
    if batch.vocab_size != vocab_size:
        raise ValueError(
            f"batch: expected vocab_size {vocab_size} as the sampler has, got {batch.vocab_size}"
        )
    if batch.device != device:
        raise ValueError(f"batch: expected tensors on {device}, got {batch.device}")


def check_prompt(
    hidden_states: Tensor, token_ids: Tensor, top: int, *, weight: Tensor, vocab_size: int
) -> None:
    """What `prompt_logprobs` is given. Reads the ids, so it waits for the GPU."""
    _check_hidden_states(hidden_states, weight)
    shape = (hidden_states.shape[0],)
    if not isinstance(token_ids, Tensor) or (
        token_ids.dtype,
        token_ids.shape,
        token_ids.device,
    ) != (torch.int64, shape, weight.device):
        raise ValueError(
            f"token_ids: expected int64 {shape} on {weight.device}, the token that came at each "
            f"position, got {_describe(token_ids)}"
        )
    wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"token_ids: expected ids in [0, {vocab_size}), got {int(wrong[0])}; leave out the "
            "positions whose next token is not known"
        )
    _check_int("top", top, 0, vocab_size)


def _check_hidden_states(hidden_states: Tensor, weight: Tensor) -> None:
    require_plain("hidden_states", hidden_states)
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim != 2:
        raise ValueError(
            f"hidden_states: expected a tensor [B, {weight.shape[1]}], "
            f"got {_describe(hidden_states)}"
        )
    if hidden_states.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden_states: expected D = {weight.shape[1]} columns as lm_head_weight has, "
            f"got {_describe(hidden_states)}"
        )
    if hidden_states.dtype != weight.dtype or hidden_states.device != weight.device:
        raise ValueError(
            f"hidden_states: expected {weight.dtype} on {weight.device} like lm_head_weight, "
            f"got {_describe(hidden_states)}; convert with .to(lm_head_weight)"
        )
    if hidden_states.shape[1] > 1 and hidden_states.stride(1) != 1:
        raise ValueError(
            f"hidden_states: expected a contiguous last axis, got strides "
            f"{hidden_states.stride()}; call .contiguous()"
        )


def check_out(out: SampleOutput, rows: int, num_samples: int | None, device: torch.device) -> None:
    """Whether a step may write into `out`."""
    if not isinstance(out, SampleOutput):
        raise TypeError(f"out: expected a SampleOutput, got {type(out).__name__}")
    shape = (rows,) if num_samples is None else (rows, num_samples)
    for name, tensor, wanted, dtype in (
        ("token_ids", out.token_ids, shape, torch.int64),
        ("status", out.status, (rows,), torch.int32),
        ("seeds", out.seeds, (rows,), torch.int64),
    ):
        if (
            not isinstance(tensor, Tensor)
            or (tensor.shape, tensor.dtype, tensor.device) != (wanted, dtype, device)
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"out.{name}: expected a contiguous {dtype} tensor {wanted} on {device}, "
                f"got {_describe(tensor)}"
            )


def check_num_samples(num_samples: int | None) -> int:
    """The number of draws per row; None is one."""
    if num_samples is None:
        return 1
    return _check_int("num_samples", num_samples, 1, 2**20)


def positions_tensor(
    positions: Tensor | int, rows: int, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """int64 [rows], contiguous, from a tensor or one int for all rows, which goes into `out`."""
    if isinstance(positions, int) and not isinstance(positions, bool):
        if not 0 <= positions < 2**63:
            raise ValueError(f"positions: expected 0 <= position < 2^63, got {positions}")
        if out is None:
            out = torch.empty(rows, dtype=torch.int64, device=device)
        return out[:rows].fill_(positions)
    if (
        not isinstance(positions, Tensor)
        or positions.dtype != torch.int64
        or positions.shape != (rows,)
        or positions.device != device
    ):
        raise ValueError(
            f"positions: expected an int or an int64 tensor [{rows}] on {device}, "
            f"got {_describe(positions)}"
        )
    return positions.contiguous()


def require_plain(name: str, value: object) -> None:
    """A DTensor is a tensor by type; its part on this rank is what is wanted."""
    if type(value).__name__ == "DTensor":
        raise TypeError(f"{name}: got a DTensor; pass its part on this rank, {name}.to_local()")


def _check_weight(weight: Tensor) -> None:
    require_plain("lm_head_weight", weight)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TypeError(f"lm_head_weight: expected a tensor [V_local, D], got {_describe(weight)}")
    if weight.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"lm_head_weight: expected one of {WEIGHT_DTYPES}, got {weight.dtype}")
    if weight.shape[1] < 1:
        raise ValueError(f"lm_head_weight: expected D >= 1, got {_describe(weight)}")
    if weight.shape[1] > 1 and weight.shape[0] > 1 and weight.stride(1) != 1:
        raise ValueError(
            f"lm_head_weight: expected a contiguous last axis, got strides {weight.stride()}; "
            "pass the [V_local, D] layout, not a transposed view"
        )


def _check_shard(shard: VocabShard, weight: Tensor, vocab_size: int | None) -> None:
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard, got {shard!r}")
    if len(shard) > weight.shape[0]:
        raise ValueError(
            f"shard: {shard} needs {len(shard)} weight rows, lm_head_weight has {weight.shape[0]}"
        )
    if vocab_size is not None and shard.stop > vocab_size:
        raise ValueError(f"shard: {shard} reaches past vocab_size={vocab_size}")


def _check_bias(bias: Tensor, weight: Tensor) -> None:
    if (
        not isinstance(bias, Tensor)
        or bias.shape != weight.shape[:1]
        or bias.dtype not in WEIGHT_DTYPES
        or bias.device != weight.device
        or (bias.shape[0] > 1 and bias.stride(0) != 1)
    ):
        raise ValueError(
            f"bias: expected a contiguous floating-point tensor [{weight.shape[0]}] on "
            f"{weight.device}, one value per row of lm_head_weight, got {_describe(bias)}"
        )


def _check_head(head: Head) -> None:
    if not _is_real(head.logit_scale) or head.logit_scale == 0:
        raise ValueError(f"logit_scale: expected a finite number ≠ 0, got {head.logit_scale!r}")
    cap = head.logit_softcap
    if cap is not None and (not _is_real(cap) or cap <= 0):
        raise ValueError(f"logit_softcap: expected None or a finite number > 0, got {cap!r}")


def _check_int(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: expected an int from {low} to {high}, got {value!r}")
    return value


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return repr(value)
