"""Checks of the arguments of a `SamplingBatch`. A message names the argument and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpsample.core.caller_warning import warn
from tpsample.core.checks import (
    check_int,
    describe,
    is_integer,
    is_listing,
    lists_in_order,
    shorten,
)
from tpsample.core.word import MAX_VOCAB_SIZE
from tpsample.request.entries import Entry
from tpsample.request.params import SamplingParams

MAX_ROWS = 2**20


def check_requests(
    first_row: int, params: Any, prompts: Any, outputs: Any, vocab_size: int
) -> list[Entry]:
    """Return entries of the requests of the rows from `first_row` on.

    Args:
        prompts, outputs: the tokens so far, one list per row; None stands for none so far.

    Raises:
        TypeError, ValueError: naming the row.
    """
    requests = request_list(params, first_row)
    if prompts is None and any(map(_reads_prompt, requests)):
        warn(
            "prompt_token_ids: a repetition_penalty counts the tokens of the prompt, and none "
            'came; pass them, [] for a row without, or repetition_scope="output"',
        )
    lists = (
        token_lists("prompt_token_ids", prompts, len(requests), first_row),
        token_lists("output_token_ids", outputs, len(requests), first_row),
    )
    checked = []
    for row, (request, prompt, output) in enumerate(zip(requests, *lists, strict=True), first_row):
        request.check_vocab(vocab_size)
        outside = [token_id for token_id in output if not 0 <= token_id < vocab_size]
        if outside:
            raise ValueError(
                f"output_token_ids[{row}]: expected ids in [0, {vocab_size}), "
                f"got {describe(outside[0])}"
            )
        inside: tuple[int, ...] = ()
        if request.reads_output:
            inside = tuple([token_id for token_id in prompt if 0 <= token_id < vocab_size])
        checked.append(Entry.of(request, vocab_size, inside, output))
    _warn_of_padding(checked)
    return checked


def _warn_of_padding(entries: Sequence[Entry]) -> None:
    """Warn of prompts that look padded on their left, as tokenizers pad a batch, if some count."""
    prompts = [entry.prompt for entry in entries]
    if not any(_reads_prompt(entry.params) for entry in entries):
        return
    starts = {prompt[0] for prompt in prompts if len(prompt) > 1 and prompt[0] == prompt[1]}
    if len(set(map(len, prompts))) == 1 and len(starts) == 1:
        (pad,) = starts
        padded = [row for row, prompt in enumerate(prompts) if prompt[:2] == (pad, pad)]
        if len(padded) < len(prompts):
            warn(
                f"prompt_token_ids: all have {len(prompts[0])} ids, and row {padded[0]} begins "
                f"with several of id {pad}, as padding does, which would count as text; leave "
                "padding out",
            )


def _reads_prompt(request: SamplingParams) -> bool:
    """Return whether tokens of the prompt change the logits of a request."""
    return request.repetition_penalty != 1 and request.repetition_scope == "all"


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    if hasattr(ids, "tolist"):  # a tensor or an array of NumPy, whose items are slow to look at
        ids = ids.tolist()
    if not lists_in_order(ids):
        raise TypeError(
            f"{name}: expected a sequence of token ids, got "
            f"{describe(ids)}; a batch takes one per row, "
            "such as [[5, 6], []]"
        )
    ids = tuple(ids)
    if set(map(type, ids)) <= {int}:
        return ids
    for token_id in ids:
        if not is_integer(token_id):
            raise TypeError(f"{name}: expected token ids, got {describe(token_id)}")
    return tuple(map(int, ids))


def request_list(params: Any, first_row: int = 0) -> list[SamplingParams]:
    """Return the requests of the rows from `first_row` on as a list."""
    if isinstance(params, SamplingParams):
        raise TypeError(
            "params: expected a list of SamplingParams, one per row, got a single one; pass "
            "[params] * B, or params.fork(B) if it has a seed"
        )
    if not lists_in_order(params):
        raise TypeError(
            f"params: expected a list of SamplingParams, one per row, got {type(params).__name__}"
        )
    requests = list(params)
    for row, request in enumerate(requests, first_row):
        if not isinstance(request, SamplingParams):
            raise TypeError(f"params[{row}]: expected SamplingParams, got {type(request).__name__}")
    return requests


def token_lists(name: str, lists: Any, num_rows: int, first_row: int = 0) -> list[tuple[int, ...]]:
    """Return the tokens so far of each row; None stands for none so far.

    Raises:
        TypeError, ValueError: other values, naming the row, or lists of other rows.
    """
    if lists is None:
        return [()] * num_rows
    if not is_listing(lists) or not isinstance(lists, (Sequence, Tensor)):
        way_out = f"; pass {name}.tolist()" if getattr(lists, "ndim", 0) else ""
        raise TypeError(
            f"{name}: expected one list of token ids per row, got {describe(lists)}{way_out}"
        )
    if len(lists) != num_rows:
        got = f"{len(lists)}"
        if all(map(is_integer, lists)):
            got += " ids in their place; a batch takes a list per row, such as [[5, 6]] for one"
        raise ValueError(f"{name}: expected one list per row ({num_rows}), got {got}")
    return [_ids(f"{name}[{row}]", ids) for row, ids in enumerate(lists, first_row)]


def check_sizes(vocab_size: Any, max_rows: Any, num_rows: int) -> int:
    """Check V, and return the room for rows; None stands for the rows there are."""
    check_int("vocab_size", vocab_size, 1, MAX_VOCAB_SIZE)
    return num_rows if max_rows is None else check_int("max_rows", max_rows, 0, MAX_ROWS)


def check_device(device: Any) -> None:
    """Check that torch has a device here, before tensors are made on it."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, ImportError, RuntimeError, TypeError) as error:
        why = shorten(str(error).partition("\n")[0])
        raise ValueError(
            f"device: torch has no "
            f"{describe(str(device))} here ({why}); pass that of the hidden states"
        ) from error


def check_options(kept_cap: Any, fixed_rounds: Any) -> None:
    """Check what a step of the batch reports, and whether it may wait."""
    if kept_cap is not None:
        check_int("kept_cap", kept_cap, 1, 2**63 - 1)
    if not isinstance(fixed_rounds, bool):
        raise TypeError(f"fixed_rounds: expected a bool, got {describe(fixed_rounds)}")


def check_rows(name: str, rows: Any, count: int) -> list[int]:
    """Return one index of a row, or several, as a list."""
    listed = rows.tolist() if hasattr(rows, "tolist") else rows
    listed = list(listed) if is_listing(listed) else [listed]
    plain = set(map(type, listed)) <= {int}
    whole = plain or all(map(is_integer, listed))
    if not whole or (listed and not 0 <= min(listed) <= max(listed) < count):
        what = "slots" if name == "slots" else "rows"
        raise ValueError(f"{name}: expected {what} in [0, {count}), got {describe(rows)}")
    return listed if plain else list(map(int, listed))


def check_rows_in_order(name: str, rows: Any, count: int) -> list[int]:
    """Return rows as `check_rows` does, where their order has a meaning."""
    if is_listing(rows) and not lists_in_order(rows):
        raise TypeError(f"{name}: expected a list, got a set, which has no order")
    return check_rows(name, rows, count)


def check_order(order: Any, count: int) -> list[int]:
    """Return a permutation of the rows as a list."""
    checked = check_rows_in_order("order", order, count)
    if sorted(checked) != list(range(count)):
        raise ValueError(f"order: expected a permutation of {count} rows, got {describe(order)}")
    return checked


def check_arranged(order: Any, count: int, joining: int) -> list[int]:
    """Return the rows that `arrange` leaves: those below `count` stay, the others join."""
    checked = check_rows_in_order("order", order, count + joining)
    named = set(checked)
    if len(named) < len(checked) or not named.issuperset(range(count, count + joining)):
        raise ValueError(
            f"order: expected each row at most once, and each joining one, from {count} on, got "
            f"{describe(order)}"
        )
    return checked
