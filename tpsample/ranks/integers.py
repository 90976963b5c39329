"""Small collectives of integer tensors: what ranks tell each other beside candidate words.

Integers only, so that what a rank receives cannot depend on the order in which ranks are added.
"""

from __future__ import annotations

from torch import Tensor

from tpsample.errors import UnsupportedParameter
from tpsample.ranks.ranks import Ranks


class IntegerExchange:
    """Gather and sum over ranks, counting bytes.

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
        if not self._ranks.can_exchange_tensors:
            raise UnsupportedParameter(
                f"{needed_by}: these ranks have no process group to exchange integers with; pass "
                "group=, leave it off, or let virtual ranks call through VirtualWorld.step or .run"
            )

    def gather(self, own: Tensor) -> Tensor:
        """Every rank's integers [...], in rank order: [W, ...]."""
        self.bytes_sent += (self._ranks.world_size - 1) * own.nbytes
        return self._ranks.gather_tensor(own)

    def sum(self, own: Tensor) -> Tensor:
        """The sum of every rank's integers [...]."""
        self.bytes_sent += 2 * (self._ranks.world_size - 1) * own.nbytes // self._ranks.world_size
        return self._ranks.sum_tensor(own)
