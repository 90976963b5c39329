"""Two ways from the local logits of W ranks to tokens: engines make whole rows and sample those.

Both ways multiply with this rank's part of the weight, padded so that every rank has as many
columns. Both take any sampler of whole logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample import VocabShard

# torch 2.13 renamed it
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class WholeLogits(ABC):
    """A way of the ranks to whole rows of logits.

    Args:
        weight: the whole LM head [V, D]; the same on every rank.
        rank, world_size: in the default process group.

    Attributes:
        name: in the results.
        who: what it does, the engines that do so, and the option that asks for it.
    """

    name: ClassVar[str]
    who: ClassVar[str]

    def __init__(self, weight: Tensor, rank: int, world_size: int) -> None:
        self.vocab_size = len(weight)
        shard = VocabShard.even(self.vocab_size, rank, world_size)
        self.rank, self.world_size = rank, world_size
        self.width = len(VocabShard.even(self.vocab_size, 0, world_size))
        self.part = weight.new_zeros(self.width, weight.shape[1])
        self.part[: len(shard)] = weight[shard.start : shard.stop]

    @abstractmethod
    def own_rows(self, rows: int) -> range:
        """Return the rows that this rank samples."""

    @abstractmethod
    def bytes_sent(self, rows: int) -> int:
        """Return the bytes of logits that this rank hands to its peers in a step."""

    @abstractmethod
    def moved(self, local: Tensor) -> Tensor:
        """Return every rank's part of `own_rows`, [W, n, width], of [B, width]. Collective."""

    def told(self, ids: Tensor, rows: int) -> Tensor:
        """Return the ids [B] of all rows, of this rank's [n]. Collective."""
        return ids

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return whole logits [n, V] of `own_rows`, joined in one copy. Collective."""
        parts = self.moved(hidden_states @ self.part.T)
        whole = parts.transpose(0, 1).reshape(parts.shape[1], self.world_size * self.width)
        return whole[:, : self.vocab_size]

    def tokens(self, hidden_states: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tokens [B] of all rows. Collective.

        Args:
            sample: makes ids [n] of whole logits [n, V]; not called without rows.
        """
        logits = self.logits(hidden_states)
        ids = sample(logits) if len(logits) else logits.new_empty(0, dtype=torch.int64)
        return self.told(ids, len(hidden_states))


class AllGather(WholeLogits):
    """Every rank gets and samples all rows."""

    name = "all-gather"
    who = (
        "every rank gets the whole logits of all rows and samples them; vLLM and SGLang by default"
    )

    def own_rows(self, rows: int) -> range:
        return range(rows)

    def bytes_sent(self, rows: int) -> int:
        """As a ring sends them: the own part and what it forwards, W - 1 parts in all."""
        return (self.world_size - 1) * rows * self.width * self.part.element_size()

    def moved(self, local: Tensor) -> Tensor:
        parts = local.new_empty(self.world_size, *local.shape)
        all_gather(parts.view(-1, self.width), local)
        return parts


class AllToAll(WholeLogits):
    """Every rank gets and samples B / W rows, and tells the others their tokens.

    The ranks take ceil(B / W) rows each; the last ones may have fewer, or none.
    """

    name = "all-to-all"
    who = (
        "every rank gets the whole logits of B / W rows and samples these; tokens are gathered; "
        "vLLM --enable-batch-sharded-sampling, SGLang enable_tp_lm_head_all_to_all"
    )

    def own_rows(self, rows: int) -> range:
        share = VocabShard.even(rows, self.rank, self.world_size)
        return range(share.start, share.stop)

    def bytes_sent(self, rows: int) -> int:
        """Of all rows but its own; (W - 1) / W · B · V / W logits where nothing is uneven."""
        others = rows - len(self.own_rows(rows))
        return others * self.width * self.part.element_size()

    def moved(self, local: Tensor) -> Tensor:
        rows, own = len(local), self.own_rows(len(local))
        shares = [VocabShard.even(rows, rank, self.world_size) for rank in range(self.world_size)]
        parts = local.new_empty(self.world_size, len(own), self.width)
        received = [len(own) * self.width] * self.world_size
        sent = [len(share) * self.width for share in shares]
        dist.all_to_all_single(parts.view(-1), local.view(-1), received, sent)
        return parts

    def told(self, ids: Tensor, rows: int) -> Tensor:
        most = len(VocabShard.even(rows, 0, self.world_size))
        tokens = ids.new_zeros(most, dtype=torch.int64)
        tokens[: len(ids)] = ids
        everyone = tokens.new_empty(self.world_size * most)
        all_gather(everyone, tokens)
        return everyone[:rows]


KINDS = (AllGather, AllToAll)
