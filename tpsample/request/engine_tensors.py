"""A batch over parameters that an engine keeps on the device itself, read in place at every step.

No value is refused: on a GPU the host sees none, and on a CPU the first step warns of what is out
of its range. Whatever a tensor holds, a row means

    temperature    below 1e-5, negative or NaN: greedy; above 2^100: 2^100
    top_k          below 1 or from V on: off
    top_p          from 1 on or NaN: off; 0 or less: the most likely token alone
    min_p          0 or less or NaN: off; above 1: 1
    seed           any 64 bits

so no value raises, hangs or reads other memory. A top_p or min_p of fp32 is the number that fp32
holds: a little over 0.1 of ten equal tokens, for 0.1, keeps two. The logarithm of min_p is that of
the device.

A tensor may be written in place, or be given other memory by `tensor.data = other` or
`tensor.set_(other)`. The next step reads what is there then. Another shape or dtype is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from tpsample.core.checks import INDICES, check_choice, check_tensor, describe
from tpsample.core.tensors import columns_of
from tpsample.request.batch_checks import check_sizes
from tpsample.request.entries import FILTERED, GATE, NO_REQUEST, OPEN, Entry
from tpsample.request.filters import COLUMNS, RowFilter, Way, keeps_all
from tpsample.request.params import FilterOrder
from tpsample.request.plan import BatchPlan
from tpsample.request.selection import Selection
from tpsample.request.table import RequestTable

LEAST_TOP_P = 2.0**-60
"""A smaller share counts as this one, which leaves one token of any total."""


@dataclass(frozen=True)
class Needs:
    """The filters that may occur in the rows of a step; the others are not read and are off.

    The fewer there are the less a step does. Without any it stores no logits.
    """

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False


class EngineTensors(RequestTable):
    """A table that each step writes anew, of the caller's tensors by slot.

    Args:
        temperature, seed: fp32 and int64 [S].
        filters: those of top_k, top_p and min_p that were given, by name.
        filter_order: of all rows.

    Attributes:
        needs: which of the filters are read.
    """

    needs: Needs

    def __init__(
        self,
        vocab_size: int,
        temperature: Tensor,
        seed: Tensor,
        filters: dict[str, Tensor],
        filter_order: str,
    ) -> None:
        super().__init__(len(seed), vocab_size, seed.device)
        its = {"temperature": temperature, "seed": seed} | filters
        self._given = {name: (each, _kind(each)) for name, each in its.items()}
        self._order = filter_order
        self.numbers[GATE, : len(seed)].fill_(OPEN)

    def expect(self, needs: object) -> None:
        """Read these filters from now on. They must be there to be read."""
        if not isinstance(needs, Needs):
            raise TypeError(f"needs: expected Needs, got {describe(needs)}")
        missing = [name for name, it in vars(needs).items() if it and name not in self._given]
        if missing:
            raise ValueError(f"needs: {missing[0]} may occur, but no tensor of that name was given")
        self.needs, self.stores_logits = needs, needs != Needs()
        unfiltered = keeps_all(self.vocab_size)._replace(joint=self._order == "joint")
        columns = columns_of(unfiltered.packed(), COLUMNS, device=self.device)
        self.numbers[:COLUMNS, : self.slots].copy_(columns[:, :1])
        kind = unfiltered._replace(
            top_k=1 if needs.top_k else self.vocab_size,
            top_p=0.5 if needs.top_p else 1.0,
            way=Way.THRESHOLD if self._may_go_by_threshold else Way.REJECTION,
        )
        self._found = {kind}, -1, False
        read = {name: self._given[name][0] for name, it in vars(needs).items() if it}
        self.compared = {"needs": needs, "filter_order": self._order, **read}

    @property
    def _may_go_by_threshold(self) -> bool:
        return self.needs.top_k and self.needs.top_p and self._order != "joint"

    def outside(self, slots: Tensor) -> Iterator[tuple[str, str]]:
        for name in ("top_p", "min_p"):
            if getattr(self.needs, name):
                its = self._now(name)[slots]
                inside = (its <= 1) & (its > 0 if name == "top_p" else its >= 0)
                for row in (~inside).nonzero().flatten().tolist()[:1]:
                    yield (
                        name,
                        f"{name}: row {int(slots[row])} has {float(its[row]):.9g}, out of the "
                        f"range {'(0, 1]' if name == 'top_p' else '[0, 1]'}, and counts as written "
                        "in tpsample.request.engine_tensors; write a number inside",
                    )

    def _now(self, name: str) -> Tensor:
        """Return a tensor of the caller's, wherever its memory is now.

        Raises:
            ValueError: it has another shape, dtype or device than the one that was given.
        """
        tensor, kind = self._given[name]
        if _kind(tensor) != kind:
            raise ValueError(
                f"{name}: expected {kind[1]} {list(kind[0])} on {kind[2]}, as was given to "
                f"SamplingBatch.over, got {describe(tensor)}; make a new batch over it"
            )
        return tensor.detach()

    def follow(self) -> None:
        self.temperature[:-1].copy_(self._now("temperature"))
        self.seed[:-1].copy_(self._now("seed"))

    def follow_filters(self) -> None:
        needs, columns = self.needs, self.numbers[:COLUMNS, : self.slots]
        top_k, by_threshold = columns[0], columns[7]
        top_p, log_min_p, of_total = columns[1:4].view(torch.float64)
        if needs.top_k:
            k = self._now("top_k").to(torch.int64)
            top_k.copy_(k.where((k >= 1) & (k < self.vocab_size), self.vocab_size))
        if needs.top_p:
            p = self._now("top_p").double()
            top_p.copy_(p.clamp(min=LEAST_TOP_P).where(p < 1, 1.0))
        if needs.min_p:
            p = self._now("min_p").double()
            log_min_p.copy_(p.clamp(max=1.0).log().where(p > 0, -torch.inf))
            if self._order != "min_p_last":
                of_total.copy_(log_min_p)
        if self._may_go_by_threshold:
            by_threshold.copy_((top_k < self.vocab_size) & (top_p < 1))

    def entries_of(self, slots: Sequence[int]) -> list[Entry]:
        none = Entry.of(NO_REQUEST, self.vocab_size)
        kinds = RowFilter.of_columns(self.numbers[:COLUMNS, slots], self.vocab_size)
        flags = [FILTERED * each.takes_some(self.vocab_size) for each in kinds]
        return [none._replace(filters=f, flags=g) for f, g in zip(kinds, flags, strict=True)]


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class TensorBatch(Selection):
    """S rows over the caller's tensors; `SamplingBatch.over` makes it.

    Either all of them are the rows of a step, or `select` names some as slots. Penalties, biases
    and logprobs need requests: see `SamplingBatch.of_slots`.

    Attributes:
        needs: which filters may occur; assign another between two steps. Every rank has the same.
    """

    _table: EngineTensors

    def __init__(self, table: EngineTensors) -> None:
        super().__init__(self, table, table.slots)
        self._plan = BatchPlan(0, self.vocab_size, self.device, fixed_rounds=True)
        self.take(torch.arange(self.rows, device=self.device))

    @property
    def temperature(self) -> Tensor:
        """fp32 [S], the caller's own. It may be written in place."""
        return self._table._now("temperature")

    @property
    def seed(self) -> Tensor:
        """int64 [S], 64 bits, the caller's own. It may be written in place."""
        return self._table._now("seed")

    @property
    def needs(self) -> Needs:
        return self._table.needs

    @needs.setter
    def needs(self, needs: Needs) -> None:
        self._table.expect(needs)

    @property
    def plan(self) -> BatchPlan:
        return self._plan

    def select(self, slots: Tensor, *, out: Selection | None = None) -> Selection:
        """Return the rows of a step, by slot; see `SamplingBatch.select`."""
        return Selection.of(self, slots, out)

    def _for_rows(self, num_rows: int) -> TensorBatch:
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got tensors "
                f"of {self.rows}; name the rows of the step by select"
            )
        return self


def over(
    *,
    vocab_size: int,
    temperature: Tensor,
    seed: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    needs: Needs | None = None,
    filter_order: str = "sequential",
) -> TensorBatch:
    """Make a batch over the caller's own tensors, which every step reads in place.

    Args:
        vocab_size: V; must match across ranks.
        temperature, seed: fp32 and int64 [S].
        top_k: int32 or int64 [S].
        top_p, min_p: fp32 or float64 [S].
        needs: which of these filters may occur. Default: those that are given. The meaning of a
            value out of range is written in `tpsample.request.engine_tensors`.
        filter_order: of all rows, as in `SamplingParams`.

    Raises:
        TypeError, ValueError: a tensor of another shape, dtype or device, or one that is needed
            and missing.
    """
    check_sizes(vocab_size, None, 0)
    filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: each for name, each in filters.items() if each is not None}
    check_tensor("seed", seed, (torch.int64,), "S", getattr(seed, "device", torch.device("cpu")))
    reals, like = (torch.float32, torch.float64), (seed.shape, seed.device, ", as seed has")
    check_tensor("temperature", temperature, reals[:1], *like)
    for name, each in given.items():
        check_tensor(name, each, INDICES if name == "top_k" else reals, *like)
    check_choice("filter_order", filter_order, get_args(FilterOrder))
    table = EngineTensors(vocab_size, temperature, seed, given, filter_order)
    table.expect(Needs(**dict.fromkeys(given, True)) if needs is None else needs)
    return TensorBatch(table)
