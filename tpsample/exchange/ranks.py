"""Who takes part: the ranks of a sampler, and how they compare notes when it is built."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.errors import RankMismatch

_RECORD_BYTES = 4096


class Ranks:
    """One rank alone; base of the other kinds.

    Attributes:
        rank, world_size: position in, size of, the group.
        group: the torch process group, or None.
    """

    rank = 0
    world_size = 1
    group: dist.ProcessGroup | None = None

    def gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's record, in rank order."""
        return [record]

    @property
    def can_exchange_tensors(self) -> bool:
        """Whether the two below may be called."""
        return self.world_size == 1

    def gather_tensor(self, own: Tensor) -> Tensor:
        """[W, ...], every rank's tensor of one shape, in rank order. Collective."""
        return own.unsqueeze(0)

    def sum_tensor(self, own: Tensor) -> Tensor:
        """The sum of every rank's tensor. Collective."""
        return own


class ProcessRanks(Ranks):
    """The ranks of a torch process group, one process each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @property
    def can_exchange_tensors(self) -> bool:
        return True

    def gather_tensor(self, own: Tensor) -> Tensor:
        received = own.new_empty((self.world_size, *own.shape))
        dist.all_gather(list(received.unbind()), own.contiguous(), group=self.group)
        return received

    def sum_tensor(self, own: Tensor) -> Tensor:
        total = own.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, dist.ReduceOp.SUM, group=self.group)
        return total

    def gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """All-gather one JSON text per rank, as bytes in a tensor of fixed size."""
        text = json.dumps(record).encode()
        if len(text) > _RECORD_BYTES:
            text = json.dumps({"error": record.get("error", "record too long")[:1000]}).encode()
        device = torch.device("cpu")
        if dist.get_backend(self.group) == dist.Backend.NCCL:
            device = torch.device("cuda", torch.cuda.current_device())
        mine = torch.tensor(list(text.ljust(_RECORD_BYTES)), dtype=torch.uint8, device=device)
        received = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(received, mine, group=self.group)
        return [json.loads(bytes(tensor.tolist())) for tensor in received]


def ranks_of(group: object) -> Ranks:
    """The ranks behind the `group` argument of `LMHeadSampler`.

    None is the default process group if torch.distributed is initialised, else one rank.

    Raises:
        TypeError: not a process group.
        ValueError: this process is not a member of the group.
    """
    if isinstance(group, Ranks):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        group = dist.group.WORLD
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process is not a member of the group")
        raise TypeError(f"group: expected a torch process group or None, got {group!r}")
    return ProcessRanks(group)


def gather_or_raise(
    ranks: Ranks, record: dict[str, Any], error: Exception | None
) -> list[dict[str, Any]]:
    """Every rank's record; if a rank brings an error, every rank raises it.

    Raises:
        RankMismatch: naming the ranks that are wrong and what is wrong on each. A lone rank
            raises its own error unchanged.
    """
    if ranks.world_size == 1:
        if error is not None:
            raise error
        return [record]
    records = ranks.gather({"error": str(error)[:1000]} if error is not None else record)
    wrong = [f"rank {r}: {rec['error']}" for r, rec in enumerate(records) if "error" in rec]
    if wrong:
        raise RankMismatch("; ".join(wrong)) from error
    return records


def require_equal(records: list[dict[str, Any]], names: list[str]) -> None:
    """Raise on every rank if the ranks' records differ in one of `names`."""
    for name in names:
        values = [record[name] for record in records]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise RankMismatch(f"{name}: must be the same on every rank, got {each}")
