"""The ranks of a sampler, and what they tell each other beside candidate words.

Ranks exchange integers only, so that what a rank receives cannot depend on the order in which
ranks are added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.core.checks import shorten, text_of
from tpsample.core.row_noise import SeedSource
from tpsample.errors import RankMismatch
from tpsample.ranks.roll_call import RollCall


@dataclass
class Counters:
    """The events on one rank since its sampler was built. No step waits for the device to count.

    `LMHeadSampler.counters` says what each is.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    failed_rows: int = 0
    second_rounds: int = 0
    waited_s: float = 0.0
    lost_ranks: set[int] = field(default_factory=set)
    refreshes: int = 0

    def by_name(self) -> dict[str, Any]:
        """Return each counter by name, as values of JSON."""
        return vars(self) | {"lost_ranks": sorted(self.lost_ranks)}

    @contextmanager
    def no_failed_rows(self) -> Iterator[None]:
        """Neither count failed rows of the block nor warn of them: they are no request's rows."""
        before, self.failed_rows = self.failed_rows, 1  # only the first one is warned of
        try:
            yield
        finally:
            self.failed_rows = before


MAX_PAYLOAD = 2**15
"""Integers that a message may carry beside words: 256 KB, which are top_k = 256 with top_p in 128
rows, or the candidates of top_p in 1,900."""


@dataclass
class Shared:
    """The state that the samplers of a process group share on this rank, as its connections.

    Attributes:
        begun: how many samplers were begun; all ranks number the next one by it. A gather of a job
            counts as one.
        left: why a call was left half done; no sampler takes a step until a reset.
        channel: the messages on CPUs, which later samplers use, too. A reset replaces it.
        turn: a lock, which the call that sends holds.
        inherited: whether the connections belong to the process that forked this one.
    """

    begun: int = 0
    left: str | None = None
    channel: Any = None
    turn: Any = field(default_factory=threading.RLock)
    inherited: bool = False


FORKED = (
    "group: its connections are those of the process that forked this one, and what this one sends "
    "would be taken for that one's; sample there, or start this process by spawn, with a process "
    "group of its own"
)
_FEW_BYTES = 1 << 14
"""Bytes that are sent to all peers at once. In a ring they would be half as many or fewer, in at
least twice as many one-way latencies: at 1 Gbit/s and 0.1 ms that takes as long."""


class Ranks:
    """One rank alone, and the base class of several.

    Attributes:
        rank, world_size: position in, size of, the group.
        group: the torch process group, or None.
        roll: tells who is still there; None without a group.
        home: the GPU that this rank's weight is on; None if that is not known.
        by_ids: the ranks in the order of their token ids; None where that is the rank order.
        seeds: of the sampler. After a reset the ranks have drawn equally many.
        inbox_memory: makes the memory of `peer` for a shape, where all ranks are in one process, as
            in tests; None lets the exchange choose.
        bytes_sent: bytes that `gather_integers` and `sum_integers` have handed to the peers so far,
            and `peer` beside the words of a step between hosts. A gather, and a sum of few
            numbers, sends the tensor to each peer. A larger sum counts as a ring, which sends
            2 (W - 1) / W of the tensor.
    """

    rank = 0
    world_size = 1
    group: dist.ProcessGroup | None = None
    roll: RollCall | None = None
    seeds: SeedSource | None = None
    home: torch.device | None = None
    by_ids: Sequence[int] | None = None
    inbox_memory: Callable[[tuple[int, ...]], Any] | None = None
    bytes_sent = 0

    @cached_property
    def counters(self) -> Counters:
        """The events that these ranks' sampler has counted on this rank."""
        return Counters()

    @cached_property
    def shared(self) -> Shared:
        """The state that samplers over the same connections share."""
        return Shared()

    def gather_integers(self, own: Tensor) -> Tensor:
        """Return every rank's integers [...], in rank order: [W, ...]. Collective.

        All ranks call with equal shapes in the same order.

        Raises:
            PeerLost: on CPUs, a rank did not call within the timeout of the process group.
        """
        if self.world_size > 1:
            self.bytes_sent += (self.world_size - 1) * own.nbytes
        return self.gather_tensor(own)

    def gather_by_ids(self, own: Tensor) -> tuple[Tensor, int]:
        """Return every rank's integers in the order of the ranks' token ids, and the index of this
        rank in that order. Collective."""
        gathered = self.gather_integers(own)
        if self.by_ids is None:
            return gathered, self.rank
        in_order = torch.stack([gathered[rank] for rank in self.by_ids])
        return in_order, self.by_ids.index(self.rank)

    def sum_integers(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's integers [...]. Collective, as `gather_integers`."""
        if self.world_size > 1:
            times = 1.0 if self.sums_whole(own) else 2 / self.world_size
            self.bytes_sent += int(times * (self.world_size - 1) * own.nbytes)
        return self.sum_tensor(own)

    def sums_whole(self, own: Tensor) -> bool:
        """Whether a sum of tensors of this size sends each rank's to all the others."""
        small = self.world_size == 2 or own.nbytes <= _FEW_BYTES
        return own.device.type == "cpu" and small

    @property
    def inherited(self) -> bool:
        """Whether the connections are those of the process that forked this one."""
        return False

    def require_own_process(self) -> None:
        """Raise a RuntimeError if the connections are `inherited`."""
        if self.inherited:
            raise RuntimeError(FORKED)

    def prepare(self, work: Callable[[], object]) -> None:
        """Do work that takes longer than ranks wait in a step. Collective; a lone rank skips it."""

    def gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's record, in rank order."""
        return [record]

    def gather_tensor(self, own: Tensor) -> Tensor:
        """Return every rank's tensor of one shape, in rank order: [W, ...]. Collective."""
        return own.unsqueeze(0)

    def sum_tensor(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's tensor. Collective."""
        return own

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place. Collective."""

    def close(self) -> None:
        """Tell the other ranks that this one takes no further step."""

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Run the body as a call that every rank makes, while other threads wait. Collective.

        Raises:
            RankMismatch: another rank makes another call; it raises the same.
        """
        yield

    def renew(self, error: Exception | None = None) -> None:
        """Begin anew after a failure. If a rank passes an error, all raise it. Collective.

        Raises:
            Exception: the error of a rank alone; of one of several, a RankMismatch.
        """
        if error is not None:
            raise error


def gather_or_raise(
    ranks: Ranks,
    record: dict[str, Any],
    error: Exception | None,
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """Return every rank's record. If a rank brings an error, every rank raises it.

    Args:
        gather: returns the records of several ranks; default their `gather`.

    Raises:
        RankMismatch: some ranks brought an error; it names them and what is wrong on each. A lone
            rank raises its own error unchanged.
    """
    if ranks.world_size == 1:
        if error is not None:
            raise error
        return [record]
    failure = {} if error is None else {"error": text_of(error)[:1000]}
    records = (gather or ranks.gather)(failure or record)
    wrong = [f"rank {r}: {rec['error']}" for r, rec in enumerate(records) if "error" in rec]
    if wrong:
        raise RankMismatch("; ".join(wrong)) from error
    return records


SAME = "must be the same on every rank"
SAME_CALL = "every rank must make the same call"


def require_equal(
    records: Sequence[Mapping[str, Any]], expected: Mapping[str, str] | None = None
) -> None:
    """Raise on every rank where the ranks' records, whose values may be records, first differ.

        temperatures: row 1: must be the same on every rank, got rank 0: 0.5, rank 1: 0.25

    Args:
        expected: by a value's name, or by the path of names to it, the text by which a message says
            what is expected. Default: that it is the same.
    """
    path: list[str] = []
    values: Sequence[Any] = records
    while all(isinstance(value, Mapping) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        differ = [n for n in names if any(value.get(n) != values[0].get(n) for value in values)]
        if not differ:
            return
        path.append(differ[0])
        values = [value.get(differ[0]) for value in values]
    of_parts = expected or {}
    requirement = of_parts.get(": ".join(path), of_parts.get(path[0], SAME))
    shown = [
        _brief(value) if isinstance(value, Mapping) else shorten(str(value)) for value in values
    ]
    raise RankMismatch(f"{': '.join(path)}: {requirement}, got {each_rank(shown)}")


def _brief(record: Mapping[str, Any]) -> str:
    """Return a record as a message shows it beside a value that is none."""
    text, names = str(record), list(record)
    return text if shorten(text) == text else f"values of {names[0]} to {names[-1]}"


def each_rank(values: Sequence[Any]) -> str:
    """Return the value of each rank as a message shows them."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
