"""What engines do with the local logits of W ranks: they make whole rows of them and sample those.

Both ways multiply with this rank's part of the weight, padded so that every rank has as many
columns, and both take any sampler of whole logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from benchmarks import baselines
from benchmarks.problem import Problem
from tpsample import VocabShard

# torch 2.13 renamed it
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class WholeLogits(ABC):
    """A way of the ranks to whole rows of logits.

    Args:
        problem: with the whole weight; the same on every rank.
        rank, world_size: in the default process group.

    Attributes:
        name: in the results.
        what, engines: what it does, who does so, and the option that asks for it.
        own_rows: the rows that this rank samples.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    engines: ClassVar[str]

    def __init__(self, problem: Problem, rank: int, world_size: int) -> None:
        hidden, vocab_size = problem.hidden_states, problem.vocab_size
        shard = VocabShard.even(vocab_size, rank, world_size)
        self.problem, self.rank, self.world_size = problem, rank, world_size
        self.width = len(VocabShard.even(vocab_size, 0, world_size))
        self.part = hidden.new_zeros(self.width, hidden.shape[1])
        self.part[: len(shard)] = problem.weight[shard.start : shard.stop]

    @property
    @abstractmethod
    def own_rows(self) -> range: ...

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes of logits that this rank hands to its peers in a step."""

    @abstractmethod
    def step(self, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tokens [B] of all rows. Collective.

        Args:
            sample: makes ids [n] of whole logits [n, V] of `own_rows`.
        """

    def steps(self) -> dict[str, Callable[[], Tensor]]:
        """Every sampler of logits behind this exchange, by the name in the results."""
        return {
            f"{self.name} + {name}": partial(self.step, sample)
            for name, sample in _samplers(self._own()).items()
        }

    def gumbel_tokens(self) -> Tensor:
        """Return the tokens of the baseline whose noise is the sampler's own. Collective."""
        return self.step(baselines.gumbel_argmax(self._own()))

    def _own(self) -> Problem:
        """The problem of `own_rows`; of any row if there are none, for then nothing is sampled."""
        return self.problem.take(self.own_rows or range(1))


class AllGather(WholeLogits):
    """Every rank gets and samples all rows."""

    name = "all-gather"
    what = "every rank gets the whole logits of all rows and samples them"
    engines = "vLLM and SGLang by default"

    def __init__(self, problem: Problem, rank: int, world_size: int) -> None:
        super().__init__(problem, rank, world_size)
        self.parts = problem.hidden_states.new_empty(world_size, problem.rows, self.width)

    @property
    def own_rows(self) -> range:
        return range(self.problem.rows)

    @property
    def bytes_sent(self) -> int:
        """As a ring sends them: the own part and what it forwards, W - 1 parts in all."""
        return (self.world_size - 1) * self.parts[0].nbytes

    def step(self, sample: Callable[[Tensor], Tensor]) -> Tensor:
        local = self.problem.hidden_states @ self.part.T
        all_gather(self.parts.view(-1, self.width), local)
        return sample(_joined(self.parts, self.problem.vocab_size))


class AllToAll(WholeLogits):
    """Every rank gets and samples B / W rows, and tells the others their tokens.

    The ranks take ceil(B / W) rows each; the last ones may have fewer, or none.
    """

    name = "all-to-all"
    what = "every rank gets the whole logits of B / W rows and samples these; tokens are gathered"
    engines = "vLLM --enable-batch-sharded-sampling, SGLang enable_tp_lm_head_all_to_all"

    def __init__(self, problem: Problem, rank: int, world_size: int) -> None:
        super().__init__(problem, rank, world_size)
        shares = [VocabShard.even(problem.rows, r, world_size) for r in range(world_size)]
        self.own = shares[rank]
        self.sent = [len(share) * self.width for share in shares]
        self.received = [len(self.own) * self.width] * world_size
        self.parts = problem.hidden_states.new_empty(world_size, len(self.own), self.width)
        self.tokens = problem.positions.new_zeros(len(shares[0]))
        self.all_tokens = problem.positions.new_empty(world_size * len(shares[0]))

    @property
    def own_rows(self) -> range:
        return range(self.own.start, self.own.stop)

    @property
    def bytes_sent(self) -> int:
        """Of all rows but its own; (W - 1) / W · B · V / W logits where nothing is uneven."""
        others = self.problem.rows - len(self.own)
        return others * self.width * self.part.element_size()

    def step(self, sample: Callable[[Tensor], Tensor]) -> Tensor:
        local = self.problem.hidden_states @ self.part.T
        dist.all_to_all_single(self.parts.view(-1), local.view(-1), self.received, self.sent)
        if len(self.own):
            logits = _joined(self.parts, self.problem.vocab_size)
            self.tokens[: len(self.own)] = sample(logits)
        all_gather(self.all_tokens, self.tokens)
        return self.all_tokens[: self.problem.rows]


def _joined(parts: Tensor, vocab_size: int) -> Tensor:
    """Return whole rows [n, V] of the ranks' parts of them, [W, n, width], one copy."""
    return parts.transpose(0, 1).reshape(parts.shape[1], -1)[:, :vocab_size]


def _samplers(problem: Problem) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """The baselines' samplers, compiled where `baselines.single_rank` does."""
    samplers = baselines.logits_samplers(problem)
    race = samplers[baselines.RACE]
    return {**samplers, baselines.RACE: baselines.compiled(race, problem.weight.device)}


KINDS = (AllGather, AllToAll)
