"""The timeout and the subgroups of a torch process group."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long a collective of a group waits for its peers."""
    device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout


# Samplers share them: torch would give the name of one that was destroyed, with what
# its store still holds, to the next.
_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def subgroup(group: dist.ProcessGroup, ranks: Iterable[int]) -> dist.ProcessGroup:
    """Return a group of some ranks of a group, with its backend and timeout. Collective."""
    members = tuple(dist.get_global_rank(group, rank) for rank in ranks)
    known = _subgroups.setdefault(group, {})
    if members not in known:
        # NCCL would split the communicator of a world bound to devices, for which it needs all of
        # its ranks. A group of an unbound world connects when it is first used.
        world = dist.group.WORLD
        assert world is not None
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            known[members] = dist.new_group(
                list(members),
                timeout=group_timeout(group),
                backend=dist.get_backend(group),
                use_local_synchronization=True,
            )
        finally:
            world.bound_device_id = bound
    return known[members]
