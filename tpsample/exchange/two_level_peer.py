"""Two levels with `peer` inside each host: its winners, and who is lost, are reduced between hosts.

The word of a row that lost a rank is greater than all others, so a row that is lost on one host is
lost on all. Behind the words travels one integer per host, which has a bit for each lost rank. Each
host writes its own integer and 0 for the others, so that the maximum has them all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.core import word
from tpsample.exchange.collective import ranks_of_levels
from tpsample.exchange.peer import PeerExchange, members_of
from tpsample.output import SampleOutput
from tpsample.ranks.roll_call import DeviceLoss, raise_if_lost
from tpsample.settings import Settings


class TwoLevelPeerExchange(PeerExchange):
    """`exchange="two_level"` where kernels can write to the peers of their host."""

    name = "two_level"

    def __init__(self, settings: Settings) -> None:
        self._whole, hosts, device = settings.ranks, settings.hosts, settings.device
        self.inside, self.between = ranks_of_levels(settings)
        super().__init__(replace(settings, ranks=self.inside))
        names_of_hosts = list(dict.fromkeys(hosts))
        self._inside = [[r for r, h in enumerate(hosts) if h == name] for name in names_of_hosts]
        self._host = names_of_hosts.index(hosts[self._whole.rank])
        self._lost_of_host = torch.zeros(len(self._inside), 2, dtype=torch.int64, device=device)
        size = settings.max_rows + self._lost_of_host.numel()
        self._reduced = torch.zeros(size, dtype=torch.int64, device=device)

    def finish(self, out: SampleOutput, seeds: Tensor) -> None:
        super().finish(out, seeds)
        rows = out.token_ids.numel()
        reduced = self._reduced[: rows + self._lost_of_host.numel()].zero_()
        reduced[:rows].copy_(self._winners[:rows])
        lost_of_host = reduced[rows:].view_as(self._lost_of_host)
        lost_of_host[self._host].copy_(self._lost[:2])
        self.between.all_reduce(reduced, dist.ReduceOp.MAX)

        self._lost_of_host |= lost_of_host
        words = reduced[:rows].view(-1, out.status.shape[0])
        token_ids, status = word.decode(words)
        lost = words == word.LOST
        token_ids = token_ids.masked_fill(lost, word.NO_TOKEN)
        status = torch.where(lost, int(word.Status.PEER_LOST), status)
        out.token_ids.copy_(token_ids.T.reshape(out.token_ids.shape))
        out.status.copy_(status.amax(dim=0))

    def bytes_sent(self, rows: int) -> int:
        between = self.between.world_size
        words = rows + 2 * len(self._inside)
        return super().bytes_sent(rows) + 2 * (between - 1) * 8 * words // between

    def check(self) -> None:
        unheard, told = (
            tuple(
                rank
                for members, bits in zip(self._inside, of_hosts, strict=True)
                for rank in members_of(members, bits)
            )
            for of_hosts in self._lost_of_host.T.tolist()
        )
        mine, from_mine, _, step = self._lost.tolist()
        seen = DeviceLoss(unheard, told, step if mine or from_mine else None)
        raise_if_lost(seen, self._whole.roll)

    def reset(self) -> None:
        self._whole.renew()
        self.inside.connect()
        self.between.connect()
        self._forget()
        self._lost_of_host.zero_()
