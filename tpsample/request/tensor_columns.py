"""The rows of a batch from tensors [B], as an engine has them that holds its parameters in tensors.

Whatever a tensor holds, a row means

    temperature    below 1e-5, negative or NaN: greedy; above 2^100: 2^100
    top_k          below 1 or from V on: off
    top_p          from 1 on or NaN: off; below 2^-60: the most likely token alone
    min_p          0 or less or NaN: off; above 1: 1
    seed           any 64 bits

so no value raises, hangs or reads other memory. Where the host reads the numbers, it warns of a
top_p or min_p out of range. A top_p or min_p of fp32 is the number that fp32 holds: a little over
0.1 of ten equal tokens, for 0.1, keeps two.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from itertools import repeat
from typing import Any, get_args

import torch
from torch import Tensor

from tpsample.core.checks import INDICES, check_choice, check_tensor, describe
from tpsample.core.tensors import columns_of, ordinary_tensors, readable
from tpsample.request.entries import FILTERED, UNKNOWN, Entry
from tpsample.request.filters import COLUMNS, Way, keeps_all
from tpsample.request.params import FilterOrder, SamplingParams
from tpsample.request.table import RequestTable

LEAST_TOP_P = 2.0**-60
"""A smaller share counts as this one, which leaves one token of any total."""

_REALS = (torch.float32, torch.float64)


@ordinary_tensors
def table_of(
    vocab_size: int,
    temperature: Tensor,
    seed: Tensor,
    filters: dict[str, Tensor | None],
    host: Mapping[str, Any] | None,
    filter_order: FilterOrder,
) -> RequestTable:
    """Return a table of these rows; the arguments are those of `SamplingBatch.from_tensors`."""
    given = {name: each for name, each in filters.items() if each is not None}
    _check(temperature, seed, given, filter_order)
    if host is not None:
        known = _host_columns(host, given)
    else:
        known = given if readable(seed.device) else {}
    rows = len(seed)
    table = RequestTable(rows, vocab_size, seed.device)
    if known or not given:
        entries = _known(known, rows, vocab_size, filter_order)
    else:
        entries = [_unknown(frozenset(given), vocab_size, filter_order)] * rows
    table.begin(entries)
    if given and not known:
        _write(table, given, filter_order)
    table.temperature[:rows].copy_(temperature.detach())
    table.seed[:rows].copy_(seed)
    return table


def _check(
    temperature: Tensor, seed: Tensor, given: dict[str, Tensor], filter_order: object
) -> None:
    check_tensor("seed", seed, (torch.int64,), "B", getattr(seed, "device", torch.device("cpu")))
    like = seed.shape, seed.device, ", as seed has"
    check_tensor("temperature", temperature, _REALS[:1], *like)
    for name, each in given.items():
        check_tensor(name, each, INDICES if name == "top_k" else _REALS, *like)
    check_choice("filter_order", filter_order, get_args(FilterOrder))


def _host_columns(host: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers that the host has, as tensors of the same dtypes.

    Raises:
        TypeError, ValueError: other names, another number of rows, or other numbers on a CPU.
    """
    if not isinstance(host, Mapping) or set(host) != set(given):
        raise ValueError(
            f"host: expected the numbers of {sorted(given)} by name, got {describe(host)}"
        )
    found = {}
    for name, tensor in given.items():
        try:
            its = torch.as_tensor(host[name], dtype=tensor.dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"host: expected numbers of {name}, got {describe(host[name])}"
            ) from error
        same = its.device.type == "cpu" and its.shape == tensor.shape
        if not same or (readable(tensor.device) and not its.equal(tensor.detach())):
            raise ValueError(
                f"host: expected the {len(tensor)} numbers that {name} has, on the host, got "
                f"{describe(host[name])}"
            )
        found[name] = its
    return found


def _in_range(name: str, column: Tensor, vocab_size: int) -> Tensor:
    """Return what the numbers of a column mean, int64 or float64."""
    if name == "top_k":
        k = column.to(torch.int64)
        return k.where((k >= 1) & (k < vocab_size), vocab_size)
    p = column.detach().double()
    if name == "top_p":
        return p.clamp(min=LEAST_TOP_P).where(p < 1, 1.0)
    return p.clamp(max=1.0).where(p > 0, 0.0)


def _known(
    columns: dict[str, Tensor], rows: int, vocab_size: int, filter_order: FilterOrder
) -> list[Entry]:
    """Return the entries of rows whose filters the host knows."""
    lists: dict[str, Any] = {"top_k": repeat(0), "top_p": repeat(1.0), "min_p": repeat(0.0)}
    for name, column in columns.items():
        its = _in_range(name, column, vocab_size)
        lists[name] = its.tolist()
        if name != "top_k":
            _warn(name, column, its)
    return list(map(_entry_of, *lists.values(), repeat(filter_order), repeat(vocab_size, rows)))


def _warn(name: str, column: Tensor, its: Tensor) -> None:
    wrong = (column != its).nonzero()
    if len(wrong):
        row = int(wrong[0])
        warnings.warn(
            f"{name}: row {row} has {float(column[row]):.9g}, out of the range "
            f"{'(0, 1]' if name == 'top_p' else '[0, 1]'}, and counts as {float(its[row]):.9g}; "
            "write a number inside",
            stacklevel=6,
        )


@lru_cache(maxsize=2**14)
def _entry_of(
    top_k: int, top_p: float, min_p: float, filter_order: FilterOrder, vocab_size: int
) -> Entry:
    """Return the entry of a row. Rows of later steps mostly have numbers that were there before."""
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return Entry.of(SamplingParams(seed=0, filter_order=filter_order, **filters), vocab_size)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _unknown(given: frozenset[str], vocab_size: int, filter_order: FilterOrder) -> Entry:
    """Return the entry of a row that may have these filters."""
    plain = Entry.of(SamplingParams(seed=0, filter_order=filter_order), vocab_size)
    kind = keeps_all(vocab_size)._replace(
        top_k=1 if "top_k" in given else vocab_size,
        top_p=0.5 if "top_p" in given else 1.0,
        joint=filter_order == "joint",
        way=Way.THRESHOLD if _may_go_by_threshold(given, filter_order) else Way.REJECTION,
    )
    return plain._replace(filters=kind, flags=FILTERED | UNKNOWN)


def _may_go_by_threshold(given: Any, filter_order: str) -> bool:
    return "top_k" in given and "top_p" in given and filter_order != "joint"


def _write(table: RequestTable, given: dict[str, Tensor], filter_order: str) -> None:
    """Write the filters of rows that the host does not know, where they are."""
    unfiltered = keeps_all(table.vocab_size)._replace(joint=filter_order == "joint")
    columns = table.numbers[:COLUMNS, : table.slots]
    columns.copy_(columns_of(unfiltered.packed(), COLUMNS, device=table.device)[:, :1])
    top_k, by_threshold = columns[0], columns[7]
    top_p, log_min_p, of_total = columns[1:4].view(torch.float64)
    for name, column in {"top_k": top_k, "top_p": top_p, "min_p": log_min_p}.items():
        if name in given:
            column.copy_(_in_range(name, given[name], table.vocab_size))
    if "min_p" in given:
        log_min_p.log_()
        if filter_order != "min_p_last":
            of_total.copy_(log_min_p)
    if _may_go_by_threshold(given, filter_order):
        by_threshold.copy_((top_k < table.vocab_size) & (top_p < 1))
