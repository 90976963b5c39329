"""A batch over parameters that an engine keeps on the device itself, read in place at every step.

The host sees no value, so it cannot refuse one. Whatever a tensor holds, a row means

    temperature    below 1e-5, negative or NaN: greedy; above 2^100: 2^100
    top_k          below 1 or from V on: off
    top_p          from 1 on or NaN: off; 0 or less: the most likely token alone
    min_p          0 or less or NaN: off; above 1: 1
    seed           any 64 bits

so no value raises, hangs or reads other memory. A top_p or min_p of fp32 is the number that fp32
holds: a little over 0.1 of ten equal tokens, for 0.1, keeps two. The logarithm of min_p is that of
the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpsample.core.row_noise import SeedSource
from tpsample.core.tensors import ALIGNED
from tpsample.core.vocab_shard import VocabShard
from tpsample.request.batch_checks import check_parameter, check_sizes
from tpsample.request.filters import RowFilter, RowFilters, Way, keeps_all
from tpsample.request.plan import BatchPlan
from tpsample.request.rows import OPEN, SHUT, SlotRows, Slots
from tpsample.request.selection import Selection

HOTTEST = 2.0**100
"""A higher temperature counts as this one, because log2 e / T must not vanish."""

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


class EngineTensors(Slots):
    """The tensors by slot, temperature and seed with S entries.

    Attributes:
        filters: those of top_k, top_p and min_p that were given, by name.
        needs: which of them are read.
        filter_order: of all rows.
    """

    def __init__(
        self,
        vocab_size: int,
        temperature: Tensor,
        seed: Tensor,
        filters: dict[str, Tensor],
        needs: Needs,
        filter_order: str,
    ) -> None:
        self.vocab_size, self.slots, self.device = vocab_size, len(seed), seed.device
        self.temperature, self.seed, self.filters = temperature, seed, filters
        self.needs, self.filter_order = needs, filter_order
        self.gate = torch.full((len(seed) + 1,), OPEN, dtype=torch.int64, device=seed.device)
        self.gate[-1] = SHUT
        self.make_controls()

    @property
    def stores_logits(self) -> bool:  # type: ignore[override]
        return self.needs != Needs()

    def state(self, rows: SlotRows) -> dict[str, object]:
        read = {name: each for name, each in self.filters.items() if vars(self.needs)[name]}
        options = {"needs": self.needs, "filter_order": self.filter_order}
        return options | {name: rows.pick_drawn(name, each) for name, each in read.items()}

    def temperature_of(self, rows: SlotRows) -> Tensor:
        return rows.pick_drawn("temperature", self.temperature).clamp_(max=HOTTEST)

    def seed_of(self, rows: SlotRows) -> Tensor:
        return rows.pick_drawn("seed", self.seed)

    def read(self, rows: SlotRows) -> tuple[RowFilters | None, None]:
        vocab_size, needs, joint = self.vocab_size, self.needs, self.filter_order == "joint"
        there = ~rows.undrawn.rows
        top_k = torch.full_like(rows.index, vocab_size)
        top_p = torch.ones_like(rows.index, dtype=torch.float64)
        log_min_p = torch.full_like(top_p, -torch.inf)
        if needs.top_k:
            k = rows.pick_any("top_k", self.filters["top_k"]).to(torch.int64)
            top_k = k.where(there & (k >= 1) & (k < vocab_size), vocab_size)
        if needs.top_p:
            p = rows.pick_any("top_p", self.filters["top_p"]).double()
            top_p = p.clamp(min=LEAST_TOP_P).where(there & (p < 1), 1.0)
        if needs.min_p:
            p = rows.pick_any("min_p", self.filters["min_p"]).double()
            log_min_p = p.clamp(max=1.0).log().where(there & (p > 0), -torch.inf)
        of_total = torch.full_like(log_min_p, -torch.inf)
        if self.filter_order != "min_p_last":
            of_total = log_min_p
        no = torch.zeros_like(top_k)
        both = (top_k < vocab_size) & (top_p < 1)
        bits = [no, no + joint, no, no if joint else both.to(torch.int64)]
        numbers = (each.view(torch.int64) for each in (top_p, log_min_p, of_total))
        by_threshold = needs.top_k and needs.top_p and not joint
        kind = keeps_all(vocab_size)._replace(
            top_k=1 if needs.top_k else vocab_size,
            top_p=0.5 if needs.top_p else 1.0,
            joint=joint,
            way=Way.THRESHOLD if by_threshold else Way.REJECTION,
        )
        columns = torch.stack([top_k, *numbers, *bits])
        padded = torch.nn.functional.pad(columns, (0, -len(rows) % ALIGNED))
        kinds: list[RowFilter] = [keeps_all(vocab_size), kind]
        every = list(range(len(rows)))
        return RowFilters(rows.numbers, every, padded, kinds, known=False), None


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
    def needs(self) -> Needs:
        return self._table.needs

    @needs.setter
    def needs(self, needs: Needs) -> None:
        self._table.needs = check_needs(needs, self._table.filters)

    @property
    def plan(self) -> BatchPlan:
        return self._plan

    @property
    def unseeded(self) -> list[int]:  # type: ignore[override]
        """None, because every row has a seed."""
        return []

    def select(self, slots: Tensor, *, out: Selection | None = None) -> Selection:
        """Return the rows of a step, by slot; see `SamplingBatch.select`."""
        return Selection.of(self, slots, out)

    def for_rows(self, num_rows: int) -> TensorBatch:
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got tensors "
                f"of {self.rows}; name the rows of the step by select"
            )
        return self

    def prepare(self, shard: VocabShard) -> None:
        """Do nothing, because no parameter has state."""

    def draw_seeds(self, source: SeedSource) -> None:
        """Do nothing, because every row has a seed."""


def check_needs(needs: object, filters: dict[str, Tensor]) -> Needs:
    """Check that what may occur is there to be read."""
    if not isinstance(needs, Needs):
        raise TypeError(f"needs: expected Needs, got {needs!r}")
    missing = [name for name, needed in vars(needs).items() if needed and name not in filters]
    if missing:
        raise ValueError(f"needs: {missing[0]} may occur, but no tensor of that name was given")
    return needs


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
    check_parameter("seed", seed, None, torch.int64)
    check_parameter("temperature", temperature, seed, torch.float32)
    for name, each in given.items():
        integral = name == "top_k"
        dtypes = (torch.int32, torch.int64) if integral else (torch.float32, torch.float64)
        check_parameter(name, each, seed, *dtypes)
    if filter_order not in ("sequential", "joint", "min_p_last"):
        raise ValueError(
            f"filter_order: expected sequential, joint or min_p_last, got {filter_order!r}"
        )
    its = Needs(**dict.fromkeys(given, True)) if needs is None else check_needs(needs, given)
    return TensorBatch(EngineTensors(vocab_size, temperature, seed, given, its, filter_order))
