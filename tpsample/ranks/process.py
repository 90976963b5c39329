"""The ranks of a torch process group, one process each."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpsample.core.checks import describe, kind_and_text
from tpsample.core.digest import digest_text
from tpsample.core.row_noise import SeedSource
from tpsample.errors import PeerLost, RankMismatch
from tpsample.ranks.channel import PLACE_BYTES, Arrival, Awaited, Channel, Meeting
from tpsample.ranks.lost import NEW_GROUP, RESET
from tpsample.ranks.ranks import (
    FORKED,
    SAME_CALL,
    Ranks,
    Shared,
    gather_or_raise,
    require_equal,
)
from tpsample.ranks.roll_call import RollCall
from tpsample.ranks.subgroups import group_timeout, subgroup

ALONE = "alone"
"""The `group` of a rank that samples alone, even within a larger job."""

_shared: WeakKeyDictionary[dist.ProcessGroup, Shared] = WeakKeyDictionary()


def _note_inherited() -> None:
    """Note in a process that was forked that all groups so far are those of its parent."""
    if dist.is_available() and dist.is_initialized():
        for group in (*_shared, *dist.distributed_c10d._world.pg_map):
            _shared.setdefault(group, Shared()).inherited = True


if hasattr(os, "register_at_fork"):  # not where processes are never forked
    os.register_at_fork(after_in_child=_note_inherited)


def require_own_connections(group: dist.ProcessGroup) -> None:
    """Raise a RuntimeError in a process that was forked by the one that the group is of."""
    if group.size() > 1 and group in _shared and _shared[group].inherited:
        raise RuntimeError(FORKED)


class ProcessRanks(Ranks):
    """The ranks of a torch process group, or some of them, one process each.

    Every wait is bounded by the timeout of the group, and one that fails raises `PeerLost`.

    Args:
        group: of all ranks; it gives backend, store and timeout.
        roll: shared by groups of the same ranks; None makes one. Collective.
        members: which ranks of the group take part, ascending; None is all of them.
        name: tells groups of the same roll and members apart.
    """

    group: dist.ProcessGroup
    roll: RollCall

    def __init__(
        self,
        group: dist.ProcessGroup,
        roll: RollCall | None = None,
        members: Sequence[int] | None = None,
        name: str = "all",
    ) -> None:
        self.group = group
        self.shared = _shared.setdefault(group, Shared())
        of_group = dist.get_rank(group)
        everybody = range(dist.get_world_size(group))
        self._members = tuple(everybody if members is None else members)
        self.rank, self.world_size = self._members.index(of_group), len(self._members)
        self.roll = roll or RollCall(group, of_group, len(everybody))
        self._name = f"gloo/{name}/{'-'.join(map(str, self._members))}"
        self._backend = dist.get_backend(group)
        # For CPU tensors: beside the group's own connections, or beside others once these have
        # failed or where only some of it take part.
        self._channel: Channel | None = None
        self._subsets: list[ProcessRanks] = []
        if members is not None:
            self.connect()
        elif self._backend != dist.Backend.NCCL:
            self._channel = self.shared.channel = self.shared.channel or self._channel_over(
                group._get_backend(torch.device("cpu"))
            )

    def subset(self, name: str, members: Sequence[int]) -> ProcessRanks:
        """Return some of these ranks, over connections of their own. Collective over them."""
        self._subsets.append(ProcessRanks(self.group, self.roll, members, name))
        self._subsets[-1].counters = self.counters
        return self._subsets[-1]

    def connect(self) -> None:
        """Make new connections where a failure has closed the old ones. Collective.

        They are made outside torch's registry of groups, so that the old ones can be released. A
        registered group could never be destroyed: torch names groups by counting, so the next one
        would get the same name, and with it old entries of the store.

        Raises:
            PeerLost: a rank did not connect within the timeout of the group, or fell.
        """
        is_part = len(self._members) < dist.get_world_size(self.group)
        if is_part and self._backend != dist.Backend.GLOO:
            self.group = subgroup(self.group, self._members)
        if self._backend == dist.Backend.NCCL:
            return
        store = self.roll.store(self._name)
        try:
            gloo = dist.ProcessGroupGloo(
                store, self.rank, self.world_size, group_timeout(self.group)
            )
        except RuntimeError as error:  # a rank gave up, or fell
            raise self.roll.lost() from error
        held, self._channel = [self._channel], self._channel_over(gloo)
        if not is_part:
            held.append(self.shared.channel)
            self.shared.channel = self._channel
        if any(held):
            # It waits for what is pending, which may last as long as the timeout.
            threading.Thread(target=held.clear, daemon=True).start()
        # Nobody leaves before all are connected, because the connections of a rank that goes on
        # and fails would be closed under them.
        self.gather_tensor(torch.zeros(1, device="cpu"))

    @property
    def inherited(self) -> bool:
        return self.world_size > 1 and self.shared.inherited

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        self.require_own_process()
        with self.shared.turn:
            if self.shared.left is not None and self._backend != dist.Backend.NCCL:
                raise RankMismatch(
                    f"{self.shared.left}; call reset() on every rank first, or take a new group"
                )
            self.roll.way_out = NEW_GROUP
            try:
                self._begin(call)
                yield
            except (PeerLost, ValueError):  # which the peers raise as well
                raise
            except BaseException as error:
                if self.world_size > 1:
                    self.shared.left = kind_and_text(error)
                    self.roll.write_reason(self.shared.left, refused=False)
                raise
            finally:
                self.roll.way_out = RESET

    def _begin(self, call: str) -> None:
        """Send a digest of the call, because the first message of every call begins with one."""
        self.roll.number = self.shared.begun = self.shared.begun + 1
        if self._backend == dist.Backend.NCCL or self.world_size == 1:
            return
        digest = torch.tensor([digest_text(call)], device="cpu")
        if len(set(self.gather_tensor(digest).flatten().tolist())) == 1:
            return
        self.shared.begun -= 1
        require_equal(gather_or_raise(self, {"call": call}, None), {"call": SAME_CALL})

    def prepare(self, work: Callable[[], object]) -> None:
        """Do the work, and wait in the store until all ranks have done theirs. A rank that is slow
        to come is not taken for lost. With one rank, and on GPUs, nothing is done."""
        if self.world_size > 1 and self._backend != dist.Backend.NCCL:
            self.roll.meet(work, group_timeout(self.group).total_seconds())

    def gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        return gathered_texts(self, self.group, record)

    def close(self) -> None:
        if self.world_size > 1:
            self.roll.close()

    def gather_tensor(self, own: Tensor) -> Tensor:
        """Return every rank's tensor, in rank order: [W, ...]."""
        if own.device.type == "cpu":
            return self._swap(own.flatten()).view(self.world_size, *own.shape)
        own = own.contiguous()
        received = own.new_empty((self.world_size, *own.shape))
        with self.roll.called_on_error(own.device):
            # In one piece, because NCCL copies a list part by part.
            work = self.group._allgather_base(received, own)
        self.wait(work, own)
        return received

    def sum_tensor(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's tensor.

        On CPUs each rank sums one part and sends it to all, which takes two messages and as many
        bytes as a ring. A small tensor is sent whole, in one message.
        """
        if own.device.type != "cpu":
            total = own.clone(memory_format=torch.contiguous_format)
            self.all_reduce(total, dist.ReduceOp.SUM)
            return total
        if self.sums_whole(own):
            return self.gather_tensor(own).sum(dim=0, dtype=own.dtype)
        flat = F.pad(own.flatten(), (0, -own.numel() % self.world_size))
        part = self._swap(flat.view(self.world_size, -1)).sum(dim=0, dtype=own.dtype)
        return self.gather_tensor(part).flatten()[: own.numel()].view_as(own)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place."""
        self.wait(self.start_all_reduce(tensor, op), tensor)

    def start_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work | None:
        """Begin to reduce the tensor over the ranks, in place; `wait` ends it."""
        with self.roll.called_on_error(tensor.device):
            own = self._channel if tensor.device.type == "cpu" else None
            if own is None or own.gloo is self.group._get_backend(tensor.device):
                return dist.all_reduce(tensor, op, group=self.group, async_op=True)
            options = dist.AllreduceOptions()
            options.reduceOp = op  # type: ignore[assignment]
            work: dist.Work = own.gloo.allreduce([tensor], options)
            return work

    def _channel_over(self, gloo: Any) -> Channel:
        return Channel(gloo, group_timeout(self.group).total_seconds())

    def start_message(self, own: Tensor) -> Arrival | None:
        """Begin to send a message to every peer, see `Channel.send`. `wait` ends it."""
        if self.world_size == 1:
            return None
        assert self._channel is not None
        if not self._channel.connections:
            self._connect(self._channel)
        with self.roll.called_on_error(own.device):
            return self._channel.send(own)

    def _connect(self, channel: Channel) -> None:
        """Make the connections of a channel, before its first message. Collective."""
        try:
            meeting = Meeting(self.rank, self.world_size, channel.limit_s)
        except OSError as error:  # too many open files, for one
            self.roll.write_reason(kind_and_text(error), refused=False)
            raise self.roll.lost() from error
        with closing(meeting):
            places = torch.empty(self.world_size, PLACE_BYTES, dtype=torch.uint8, device="cpu")
            sent, options = meeting.place.repeat(self.world_size, 1), dist.AllToAllOptions()
            with self.roll.called_on_error(sent.device):
                work: dist.Work = channel.gloo.alltoall_base(places, sent, [], [], options)
            self.wait(work, sent)
            with self.roll.called_on_error(sent.device):
                meeting.call(places)
            self.wait(meeting, sent)
        channel.connections = [meeting.connections[peer] for peer in sorted(meeting.connections)]

    def _swap(self, sent: Tensor) -> Tensor:
        """Send each rank its row of [W, n], or [n] to all, on a CPU; return their rows, [W, n]."""
        own = sent.expand(self.world_size, -1)[self.rank : self.rank + 1]
        if sent.ndim == 2:
            sent = torch.cat([sent[: self.rank], sent[self.rank + 1 :]])
        arrival = self.start_message(sent)
        if arrival is None:
            return own
        self.wait(arrival, sent)
        theirs = arrival.messages()
        return torch.cat([theirs[: self.rank], own, theirs[self.rank :]])

    def start_sends(self, words: Tensor, tag: int) -> list[dist.Work]:
        """Begin to send this rank's row of [W, n] to every peer, and to receive the other rows.

        The exchange is over after `wait()` of each returned work.
        """
        group, of_world = self.group, dist.get_global_rank
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        pairs: list[tuple[Any, int, int]] = [(dist.irecv, peer, peer) for peer in peers]
        pairs += [(dist.isend, self.rank, peer) for peer in peers]
        swaps = [
            dist.P2POp(move, words[row], of_world(group, peer), group, tag=tag)
            for move, row, peer in pairs
        ]
        with self.roll.called_on_error(words.device):
            works: list[dist.Work] = dist.batch_isend_irecv(swaps)
            return works

    def wait(self, work: Awaited | dist.Work | None, tensor: Tensor) -> None:
        """Wait for work on a tensor. The host waits if it is on the CPU, else the GPU's stream.

        Raises:
            PeerLost: see `RollCall.wait`.
        """
        if tensor.device.type == "cpu":
            began = time.perf_counter()
            try:
                self.roll.wait(work)
            finally:
                self.counters.waited_s += time.perf_counter() - began
        elif work is not None:
            assert not isinstance(work, Awaited)  # messages lie on the CPU
            work.wait()

    def renew(self, error: Exception | None = None) -> None:
        """Wait for all ranks, then connect them and their subsets anew. Collective.

        A failed collective may have closed connections of gloo. A rank may have begun to build a
        sampler or to draw seeds alone, so the ranks go on from the largest number.

        Raises:
            PeerLost: a rank did not come within the timeout of the group, or came and left again.
            RankMismatch: some ranks brought an error; nothing changes.
        """
        timeout_s = group_timeout(self.group).total_seconds()
        meet = partial(self.roll.begin_anew, timeout_s)
        seeds = self.seeds or SeedSource()
        own = {"begun": self.shared.begun, "drawn": seeds.drawn}
        records = gather_or_raise(self, own, error, meet)
        self.shared.begun, seeds.drawn = (max(each[name] for each in records) for name in own)
        for ranks in (self, *self._subsets):
            ranks.connect()


def gathered_texts(
    ranks: Ranks, group: dist.ProcessGroup, record: dict[str, Any]
) -> list[dict[str, Any]]:
    """Gather one JSON text per rank: the lengths, then the bytes, padded to the longest."""
    text, device = json.dumps(record).encode(), device_of_texts(ranks, group)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        size = int(ranks.gather_tensor(torch.tensor([len(text)], device=device)).max())
        own = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8).to(device)
        texts = ranks.gather_tensor(own).tolist()
    return [json.loads(bytes(text)) for text in texts]


def device_of_texts(ranks: Ranks, group: dist.ProcessGroup) -> torch.device:
    """Return where texts are sent from: with NCCL the group's GPU, else the weight's, even if
    this process forgot to make it the current one, because the texts may say so."""
    if dist.get_backend(group) != dist.Backend.NCCL:
        return torch.device("cpu")
    if group.bound_device_id is not None:
        return group.bound_device_id
    return ranks.home or torch.device("cuda", torch.cuda.current_device())


def ranks_of(group: object) -> Ranks:
    """Return the ranks of the `group` argument of `LMHeadSampler`.

    Raises:
        TypeError, ValueError: as `process_group_of`.
    """
    if isinstance(group, Ranks):
        return group
    processes = process_group_of(group)
    return Ranks() if processes is None else ProcessRanks(processes)


def group_among(given: Mapping[str, object]) -> object:
    """Return the group among the arguments of a call, even under a wrong name; else None."""
    kinds = (Ranks, dist.ProcessGroup) if dist.is_available() else (Ranks,)
    for value in (given.get("group"), *given.values()):
        if isinstance(value, kinds) or (isinstance(value, str) and value == ALONE):
            return value
    return None


def process_group_of(group: object) -> dist.ProcessGroup | None:
    """Return the process group that an argument `group` stands for; None for one rank alone.

    None is the default process group if torch.distributed is initialised, else one rank; "alone" is
    one rank in either case.

    Raises:
        TypeError: not a process group.
        ValueError: this process is not a member of the group, or is one of several that a launcher
            started and has no process group; or the group was destroyed.
    """
    if isinstance(group, str) and group == ALONE:
        return None
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            _require_one_process()
            return None
        group = dist.group.WORLD
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process is not a member of the group")
        way_out = "; pass its group, .get_group()" if hasattr(group, "get_group") else ""
        raise TypeError(
            f'group: expected a torch process group, None or "{ALONE}", got '
            f"{describe(group)}{way_out}"
        )
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError(
            "group: expected a process group that torch.distributed has, got one that was "
            "destroyed, or made apart from it; make another by dist.new_group"
        )
    return group


LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
"""The variables in which launchers name rank, world size, local rank and local world size. srun
sets the STEP variables; a batch script has SLURM_PROCID without them and is alone."""


def launched() -> str | None:
    """Return the variable by which a launcher says that it started several processes, or None."""
    for _, name, *_ in LAUNCHERS.values():
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size[:9]) > 1:
            return f"{name}={size}"
    return None


def _require_one_process() -> None:
    """Raise a ValueError in one of several processes of a launcher, because it has peers."""
    if said := launched():
        raise ValueError(
            f"group: {said} says that this is one of {said.partition('=')[2]} processes, but "
            "torch.distributed has no process group; call init_process_group before, or pass "
            f'group="{ALONE}" if this process samples by itself over the whole LM head'
        )
