"""Checks of what a step and other calls are handed. Each message names the argument, what was
expected, what came and, where it is not obvious, the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.plan import BatchView


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
            f"position, got {describe(token_ids)}"
        )
    wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"token_ids: expected ids in [0, {vocab_size}), got {int(wrong[0])}; leave out the "
            "positions whose next token is not known"
        )
    check_int("top", top, 0, vocab_size)


def _check_hidden_states(hidden_states: Tensor, weight: Tensor) -> None:
    require_plain("hidden_states", hidden_states)
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim != 2:
        raise ValueError(
            f"hidden_states: expected a tensor [B, {weight.shape[1]}], "
            f"got {describe(hidden_states)}"
        )
    if hidden_states.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden_states: expected D = {weight.shape[1]} columns as lm_head_weight has, "
            f"got {describe(hidden_states)}"
        )
    check_fits_weight(hidden_states, weight)


def check_fits_weight(hidden_states: Tensor, weight: Tensor) -> None:
    """Hidden states [..., D] as the product with the weight takes them."""
    if hidden_states.dtype != weight.dtype or hidden_states.device != weight.device:
        raise ValueError(
            f"hidden_states: expected {weight.dtype} on {weight.device} like lm_head_weight, "
            f"got {describe(hidden_states)}; convert with .to(lm_head_weight)"
        )
    if hidden_states.shape[-1] > 1 and hidden_states.stride(-1) != 1:
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
                f"got {describe(tensor)}"
            )


def check_num_samples(num_samples: int | None) -> int:
    """The number of draws per row; None is one."""
    if num_samples is None:
        return 1
    return check_int("num_samples", num_samples, 1, 2**20)


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
            f"got {describe(positions)}"
        )
    return positions.contiguous()


def require_plain(name: str, value: object) -> None:
    """A DTensor is a tensor by type; its part on this rank is what is wanted."""
    if type(value).__name__ == "DTensor":
        raise TypeError(f"{name}: got a DTensor; pass its part on this rank, {name}.to_local()")


def check_int(name: str, value: int, low: int, high: int) -> int:
    """An int within bounds, returned."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: expected an int from {low} to {high}, got {value!r}")
    return value


def describe(value: object) -> str:
    """What came, for a message."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return repr(value)
