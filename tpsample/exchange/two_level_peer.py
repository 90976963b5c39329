"""Two levels with `peer` inside each host: its winners, and who is lost, are reduced between hosts.

The words of rows that lost a rank are greater than all others, so a row that is lost on one host is
lost on all. Behind the words travels one integer per host, its lost ranks as bits: each host
writes its own and 0 for the others, so that the maximum is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample import word
from tpsample.errors import PeerLost
from tpsample.exchange.integers import IntegerExchange
from tpsample.exchange.peer import PeerExchange
from tpsample.exchange.ranks import ProcessRanks, Ranks, subgroup
from tpsample.exchange.roll_call import names
from tpsample.exchange.two_level import levels
from tpsample.output import SampleOutput


class TwoLevelPeerExchange(PeerExchange):
    """`exchange="two_level"` where kernels can write to the peers of their host.

    Args:
        hosts: name of the host of each rank, in rank order.
    """

    name = "two_level"

    def __init__(
        self,
        ranks: Ranks,
        max_rows: int,
        chunks: int,
        device: torch.device,
        *,
        hosts: Sequence[str],
    ) -> None:
        inside, self._column = levels(hosts, ranks.rank)
        assert isinstance(ranks, ProcessRanks)
        self._whole = ranks
        super().__init__(
            ProcessRanks(subgroup(ranks.group, inside), ranks.roll), max_rows, chunks, device
        )
        self.between = ProcessRanks(subgroup(ranks.group, self._column), ranks.roll)
        self.integers = IntegerExchange(ranks)
        names_of_hosts = list(dict.fromkeys(hosts))
        self._inside = [[r for r, h in enumerate(hosts) if h == name] for name in names_of_hosts]
        self._host = names_of_hosts.index(hosts[ranks.rank])
        self._reduced = torch.zeros(max_rows + len(self._inside), dtype=torch.int64, device=device)
        self._lost_of_host = torch.zeros(len(self._inside), dtype=torch.int64, device=device)

    def finish(self, out: SampleOutput, decode: Callable[[Tensor, SampleOutput], None]) -> None:
        super().finish(out, decode)
        rows = out.token_ids.numel()
        reduced = self._reduced[: rows + len(self._inside)].zero_()
        reduced[:rows].copy_(self._winners[:rows])
        reduced[rows + self._host].copy_(self._lost[0])
        self.between.all_reduce(reduced, dist.ReduceOp.MAX)

        self._lost_of_host |= reduced[rows:]
        words = reduced[:rows].view(-1, out.status.shape[0])
        token_ids, status = word.decode(words)
        lost = words == word.LOST
        token_ids = torch.where(lost, word.NO_TOKEN, token_ids)
        status = torch.where(lost, int(word.Status.PEER_LOST), status)
        out.token_ids.copy_(token_ids.T.reshape(out.token_ids.shape))
        out.status.copy_(status.amax(dim=0))

    def bytes_sent(self, rows: int) -> int:
        between = self.between.world_size
        words = rows + len(self._inside)
        return super().bytes_sent(rows) + 2 * (between - 1) * 8 * words // between

    def check(self) -> None:
        lost = [
            members[place]
            for members, bits in zip(self._inside, self._lost_of_host.tolist(), strict=True)
            for place in range(len(members))
            if bits >> place & 1
        ]
        if not lost:
            return
        said = self._whole.roll.said()
        reasons = "".join(f"; rank {rank}: {text}" for rank, text in said.items())
        raise PeerLost(
            f"exchange: {names(sorted(lost))} did not answer in time{reasons}; tokens are -1 from "
            "that step on, until every rank calls reset()",
            sorted(lost),
        )

    def reset(self) -> None:
        self._whole.renew()
        self.ranks.group = subgroup(self._whole.group, self._inside[self._host], anew=True)
        self.between.group = subgroup(self._whole.group, self._column, anew=True)
        self._forget()
        self._lost_of_host.zero_()
