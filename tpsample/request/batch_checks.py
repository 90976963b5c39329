"""Checks of what a `SamplingBatch` is handed; each message names the argument and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tpsample.core.word import MAX_VOCAB_SIZE
from tpsample.errors import UnsupportedParameter
from tpsample.request.params import SamplingParams

MAX_ROWS = 2**20


@dataclass(frozen=True)
class CheckedRequest:
    """A request and its tokens so far, taken from the caller: his lists may change afterwards.

    Prompt ids outside the vocabulary, such as the placeholders of a multimodal prompt, are left
    out.
    """

    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]


def check_requests(
    first_row: int,
    requests: Sequence[Any],
    prompts: Sequence[Any],
    outputs: Sequence[Any],
    vocab_size: int,
) -> list[CheckedRequest]:
    """Requests of rows from `first_row` on, with the tokens so far of each, against V.

    Raises:
        TypeError, ValueError: naming the row; nothing has changed then.
    """
    checked = []
    for row, (params, prompt, output) in enumerate(
        zip(requests, prompts, outputs, strict=True), first_row
    ):
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params[{row}]: expected SamplingParams, got {type(params).__name__}")
        params.check_vocab(vocab_size)
        prompt = _ids(f"prompt_token_ids[{row}]", prompt)
        output = _ids(f"output_token_ids[{row}]", output)
        for token_id in output:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"output_token_ids[{row}]: expected ids in [0, {vocab_size}), got {token_id}"
                )
        inside = tuple(token_id for token_id in prompt if 0 <= token_id < vocab_size)
        checked.append(CheckedRequest(params, inside, output))
    return checked


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
        raise TypeError(f"{name}: expected a sequence of token ids, got {ids!r}")
    ids = tuple(ids)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise TypeError(f"{name}: expected token ids, got {token_id!r}")
    return tuple(map(int, ids))


def token_lists(name: str, lists: Sequence[Sequence[int]] | None, rows: int) -> Sequence[Any]:
    """One list of tokens so far per row; None is none so far."""
    if lists is None:
        return [()] * rows
    if isinstance(lists, (str, bytes, Mapping)) or not isinstance(lists, (Sequence, Tensor)):
        raise TypeError(f"{name}: expected one list of token ids per row, got {lists!r}")
    if len(lists) != rows:
        raise ValueError(f"{name}: expected one list per row ({rows}), got {len(lists)}")
    return lists


def check_sizes(vocab_size: Any, max_rows: Any, rows: int) -> int:
    """V, and the room for rows; None is the rows there are. Returns the room."""
    _check_int("vocab_size", vocab_size, 1, MAX_VOCAB_SIZE)
    if max_rows is None:
        return rows
    return _check_int("max_rows", max_rows, 0, MAX_ROWS)


def check_kept(kept_cap: Any, fixed_rounds: Any) -> None:
    """None or a number of tokens, which the host has to read."""
    if kept_cap is not None and (
        isinstance(kept_cap, bool) or not isinstance(kept_cap, int) or kept_cap < 1
    ):
        raise ValueError(f"kept_cap: expected None or an int >= 1, got {kept_cap!r}")
    if not isinstance(fixed_rounds, bool):
        raise TypeError(f"fixed_rounds: expected a bool, got {fixed_rounds!r}")
    if kept_cap is not None and fixed_rounds:
        raise UnsupportedParameter("kept_cap: not with fixed_rounds; leave one of them off")


def check_rows(method: str, rows: Any, count: int) -> set[int]:
    """Indices of rows that are there, as a set."""
    found: Any = (rows,) if isinstance(rows, Integral) else rows
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
        raise TypeError(f"{method}: expected a row or several, got {rows!r}")
    checked = set()
    for row in found:
        if isinstance(row, bool) or not isinstance(row, Integral) or row not in range(count):
            raise ValueError(f"{method}: expected rows in [0, {count}), got {row!r}")
        checked.add(int(row))
    return checked


def check_order(order: Any, count: int) -> list[int]:
    """A permutation of the rows."""
    wrong = f"order: expected a permutation of {count} rows, got {order!r}"
    if isinstance(order, Tensor):
        order = order.tolist()
    if isinstance(order, (str, bytes, Mapping)) or not isinstance(order, Iterable):
        raise TypeError(wrong)
    order = list(order)
    if any(isinstance(row, bool) or not isinstance(row, Integral) for row in order):
        raise ValueError(wrong)
    if sorted(order) != list(range(count)):
        raise ValueError(wrong)
    return [int(row) for row in order]


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
    """A tensor with at least as many rows as `seed`; a width of None is any."""
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


def _check_int(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: expected an int from {low} to {high}, got {value!r}")
    return value


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return repr(value)
