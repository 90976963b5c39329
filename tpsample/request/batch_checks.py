"""Checks of what a `SamplingBatch` is handed; each message names the argument and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpsample.errors import UnsupportedParameter
from tpsample.request.params import SamplingParams


def token_lists(
    name: str, lists: Sequence[Sequence[int]] | None, rows: int
) -> Sequence[Sequence[int]]:
    """One list of tokens so far per row; None is none so far."""
    if lists is None:
        return [()] * rows
    if len(lists) != rows:
        raise ValueError(f"{name}: expected one list per row ({rows}), got {len(lists)}")
    return lists


def check_request(
    row: int, params: Any, prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> None:
    """A request and its tokens so far, against V."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params[{row}]: expected SamplingParams, got {type(params).__name__}")
    params.check_vocab(vocab_size)
    for name, ids in (("prompt_token_ids", prompt), ("output_token_ids", output)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{name}[{row}]: expected ids in [0, {vocab_size}), got {token_id}"
                )


def check_kept(kept_cap: Any, fixed_rounds: bool) -> None:
    """None or a number of tokens, which the host has to read."""
    if kept_cap is not None and (
        isinstance(kept_cap, bool) or not isinstance(kept_cap, int) or kept_cap < 1
    ):
        raise ValueError(f"kept_cap: expected None or an int >= 1, got {kept_cap!r}")
    if kept_cap is not None and fixed_rounds:
        raise UnsupportedParameter("kept_cap: not with fixed_rounds; leave one of them off")


def require_list(method: str, for_all_rows: SamplingParams | None) -> None:
    """Rows of a batch that is one request for all rows cannot change one by one."""
    if for_all_rows is not None:
        raise ValueError(
            f"{method}: this batch was built from one request for all rows; build it from a list "
            "of requests to change its rows"
        )


def check_rows(method: str, rows: set[int], count: int) -> None:
    """Indices of rows that are there."""
    for row in rows:
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < count:
            raise ValueError(f"{method}: expected rows in [0, {count}), got {row!r}")


def check_appended(token_ids: Any, seed: Tensor) -> int:
    """The number of rows of the tokens of a step."""
    if (
        not isinstance(token_ids, Tensor)
        or token_ids.ndim not in (1, 2)
        or token_ids.dtype != torch.int64
        or token_ids.device != seed.device
    ):
        raise ValueError(
            f"token_ids: expected an int64 tensor [B] or [B, n] on {seed.device}, "
            f"got {_describe(token_ids)}"
        )
    return token_ids.shape[0]


def check_per_row(
    name: str, value: Any, dtype: torch.dtype, seed: Tensor, *width: int | None
) -> None:
    """None, or a tensor with at least as many rows as `seed`; a width of None is any."""
    if value is None:
        return
    if (
        not isinstance(value, Tensor)
        or value.dtype != dtype
        or value.device != seed.device
        or value.ndim != 1 + len(width)
        or value.shape[0] < seed.shape[0]
        or any(w not in (None, n) for w, n in zip(width, value.shape[1:], strict=True))
        or (value.shape[-1] > 1 and value.stride(-1) != 1)
    ):
        shape = [seed.shape[0], *("n" if w is None else w for w in width)]
        raise ValueError(
            f"{name}: expected contiguous {dtype} {shape} on {seed.device}, got {_describe(value)}"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return repr(value)
