"""Small collectives of int64 tensors: what ranks tell each other beside candidate words.

Integers only, so that what a rank receives cannot depend on the order in which ranks are added.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.errors import UnsupportedParameter
from tpsample.exchange.ranks import Ranks


class IntegerExchange:
    """Gather and sum over the ranks of a process group, or over one rank.

    Collective: all ranks call with equal shapes in the same order. On CPUs `PeerLost` is raised if
    one does not, within the timeout of the process group.

    Attributes:
        bytes_sent: bytes this rank has handed to its peers so far. A gather sends the tensor to
            each of them; a sum is counted as a ring, which sends 2 (W - 1) / W of the tensor.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.bytes_sent = 0

    def require_group(self, needed_by: str = "top_k, top_p, min_p, logprobs") -> None:
        """Check that these ranks can exchange integers, as `needed_by` must.

        Raises:
            UnsupportedParameter: several ranks without a process group.
        """
        if self._ranks.world_size > 1 and self._ranks.group is None:
            raise UnsupportedParameter(
                f"{needed_by}: these ranks have no process group to exchange integers with; pass "
                "group=, or leave it off"
            )

    def gather(self, own: Tensor) -> Tensor:
        """Every rank's int64 [...], in rank order: [W, ...]."""
        self.bytes_sent += (self._ranks.world_size - 1) * own.nbytes
        return self._ranks.gather_tensor(own)

    def sum(self, own: Tensor) -> Tensor:
        """The sum of every rank's int64 [...]."""
        if self._ranks.world_size == 1:
            return own
        total = own.clone(memory_format=torch.contiguous_format)
        self._ranks.all_reduce(total, dist.ReduceOp.SUM)
        self.bytes_sent += 2 * (self._ranks.world_size - 1) * own.nbytes // self._ranks.world_size
        return total
