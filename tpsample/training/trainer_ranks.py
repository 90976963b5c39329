"""The ranks of a process group while a trainer scores, over the connections of the group itself.

Another thread may sample meanwhile, because samplers have connections of their own. A call that a
rank leaves half done leaves messages on their way. The next call would take them for its own, so
the group is refused from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.core.checks import kind_and_text, shorten
from tpsample.errors import PeerLost, RankMismatch
from tpsample.ranks.lost import NEW_GROUP
from tpsample.ranks.process import gathered_texts
from tpsample.ranks.ranks import SAME_CALL, Ranks, Shared, require_equal
from tpsample.ranks.roll_call import RollCall

NAME = "kept_logprobs"

_shared: WeakKeyDictionary[dist.ProcessGroup, Shared] = WeakKeyDictionary()
"""The state of each group's calls; `begun` counts those on which its ranks have agreed."""


class TrainerRanks(Ranks):
    """The ranks of a process group during one call.

    Args:
        group: of all ranks.
        home: the device of this rank's weight.
    """

    group: dist.ProcessGroup
    roll: RollCall

    def __init__(self, group: dist.ProcessGroup, home: torch.device) -> None:
        self.group, self.home = group, home if home.type == "cuda" else None
        self.shared = _shared.setdefault(group, Shared())
        self.rank, self.world_size = group.rank(), group.size()
        self.roll = RollCall(group, self.rank, self.world_size, NAME)
        self.roll.way_out = NEW_GROUP
        self._call = NAME

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        if (left := self.shared.left) is not None:
            raise RankMismatch(
                f"{NAME}: a call over this process group was left half done ({left}); "
                f"{NEW_GROUP} on every rank"
            )
        self._call = call
        try:
            yield
        except ValueError:  # which the peers raise as well
            raise
        except PeerLost:
            self.shared.left = "PeerLost"
            raise
        except BaseException as error:
            self.shared.left = shorten(kind_and_text(error))
            self.roll.leave(self.shared.left)
            raise

    def gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's record, in rank order. Collective.

        Raises:
            RankMismatch: another rank makes another call; it raises the same.
        """
        records = gathered_texts(self, self.group, {"call": self._call} | record)
        require_equal([{"call": record.pop("call")} for record in records], {"call": SAME_CALL})
        return records

    def gather_tensor(self, own: Tensor) -> Tensor:
        received = [torch.empty_like(own) for _ in range(self.world_size)]
        with self.roll.called_on_error(own.device):
            work = dist.all_gather(received, own, group=self.group, async_op=True)
        self._wait(work, own.device)
        return torch.stack(received)

    def sum_tensor(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's tensor, in its place. Collective."""
        self.all_reduce(own, dist.ReduceOp.SUM)
        return own

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        with self.roll.called_on_error(tensor.device):
            work = dist.all_reduce(tensor, op, group=self.group, async_op=True)
        self._wait(work, tensor.device)

    def _wait(self, work: dist.Work, device: torch.device) -> None:
        if device.type == "cpu":
            self.roll.wait(work)
            return
        with self.roll.called_on_error(device):
            work.wait()
