"""The rows of a batch from tensors [B], as an engine has them that holds its parameters in tensors.

Whatever a tensor holds, a row means

    temperature    below 1e-5, negative or NaN: greedy; above 2^100: 2^100
    top_k          below 1 or from V on: off
    top_p          from 1 on or NaN: off; below 2^-60: the most likely token alone
    other rules    no number that cuts, or NaN: off; above the range: its end
    seed           any 64 bits

so no value raises, hangs or reads other memory (`Rule.meant`). Where the host reads the numbers, it
warns of numbers out of range, but for top_k. A number of fp32 is the one that fp32 holds: a little
over 0.1 of ten equal tokens, for a top_p of 0.1, keeps two.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any, get_args

import torch
from torch import Tensor

from tpsample.core.caller_warning import warn
from tpsample.core.checks import INDICES, check_choice, check_tensor, describe
from tpsample.core.rules import RULES, TOP_K, TOP_P, FilterOrder, Rule, behind_top_p
from tpsample.core.tensors import columns_of, ordinary_tensors, readable
from tpsample.request.entries import FILTERED, UNKNOWN, Entry
from tpsample.request.params import SamplingParams
from tpsample.request.row_filter import COLUMNS, SEARCHED, Demand, column_of, keeps_all
from tpsample.request.table import RequestTable

_RULES = {rule.name: rule for rule in RULES}
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
    if unknown := set(filters).difference(_RULES):
        raise TypeError(
            f"{min(unknown)}: expected a tensor of one of {', '.join(_RULES)}, or another argument"
        )
    columns = ((name, filters.get(name)) for name in _RULES)
    given = {name: column for name, column in columns if column is not None}
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
    for name, column in given.items():
        check_tensor(name, column, INDICES if name == "top_k" else _REALS, *like)
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
    columns = {}
    for name, tensor in given.items():
        try:
            column = torch.as_tensor(host[name], dtype=tensor.dtype)
            if not tensor.dtype.is_floating_point:
                whole = torch.as_tensor(host[name]) if len(column) else column
                if whole.is_floating_point() or whole.dtype is torch.bool:
                    raise TypeError("no integers")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"host: expected numbers of {name}, got {describe(host[name])}"
            ) from error
        same = column.device.type == "cpu" and column.shape == tensor.shape
        if not same or (readable(tensor.device) and not _equal(column, tensor.detach())):
            raise ValueError(
                f"host: expected the {len(tensor)} numbers that {name} has, on the host, got "
                f"{describe(host[name])}"
            )
        columns[name] = column
    return columns


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether numbers are the same, where a NaN is one that is off."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _known(
    columns: dict[str, Tensor], rows: int, vocab_size: int, filter_order: FilterOrder
) -> list[Entry]:
    """Return the entries of rows whose filters the host knows."""
    lists = []
    for name, column in columns.items():
        meant = _RULES[name].meant(column, vocab_size)
        lists.append(meant.tolist())
        if name != TOP_K.name:
            _warn(_RULES[name], column, meant)
    names = tuple(columns)
    numbers = zip(*lists, strict=True) if lists else [()] * rows
    return [_entry_of(names, row, filter_order, vocab_size) for row in numbers]


def _warn(rule: Rule, column: Tensor, meant: Tensor) -> None:
    wrong = (column != meant).nonzero()
    if len(wrong):
        row = int(wrong[0])
        warn(
            f"{rule.name}: expected {rule.expected}, got {float(column[row]):.9g} in row {row}, "
            f"which counts as {float(meant[row]):.17g}; write a number in range",
        )


@lru_cache(maxsize=2**14)
def _entry_of(
    names: tuple[str, ...], numbers: tuple[float, ...], filter_order: FilterOrder, vocab_size: int
) -> Entry:
    """Return the entry of a row. Rows of later steps mostly have numbers that were there before."""
    filters: dict[str, Any] = dict(zip(names, numbers, strict=True))
    return Entry.of(SamplingParams(seed=0, filter_order=filter_order, **filters), vocab_size)


@lru_cache(maxsize=16)
def _unknown(given: frozenset[str], vocab_size: int, filter_order: FilterOrder) -> Entry:
    """Return the entry of a row that may have these filters."""
    plain = Entry.of(SamplingParams(seed=0, filter_order=filter_order), vocab_size)
    demand = Demand(
        searched=_may_be_searched(given, filter_order),
        counts=TOP_K.name in given,
        masses=TOP_P.name in given,
        ends=given.difference((TOP_K.name, TOP_P.name)),
    )
    kind = keeps_all(vocab_size)._replace(demand=demand)
    return plain._replace(filters=kind, flags=FILTERED | UNKNOWN)


def _may_be_searched(given: Container[str], filter_order: FilterOrder) -> bool:
    return TOP_K.name in given and TOP_P.name in given and not behind_top_p(filter_order)[0]


def _write(table: RequestTable, given: dict[str, Tensor], filter_order: FilterOrder) -> None:
    """Write the filters of rows that the host does not know, where they are."""
    unfiltered = keeps_all(table.vocab_size)._replace(behind=behind_top_p(filter_order))
    columns = table.numbers[:COLUMNS, : table.slots]
    columns.copy_(columns_of(unfiltered.packed(), COLUMNS, device=table.device)[:, :1])
    meant = {name: _RULES[name].meant(column, table.vocab_size) for name, column in given.items()}
    for name, numbers in meant.items():
        column = column_of(columns, name)
        column.copy_(numbers.log() if _RULES[name].by_logarithm else numbers)
    if _may_be_searched(given, filter_order):
        cuts = (meant[TOP_K.name] < table.vocab_size) & (meant[TOP_P.name] < 1)
        column_of(columns, SEARCHED).copy_(cuts)
