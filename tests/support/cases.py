"""Inputs shared by the tests: a head, hidden states and a batch of mixed requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab.virtual_ranks import even_shards
from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
)

TEMPERATURES = (0.0, 0.5, 1.0, 2.0, 1.0, 0.0, 0.7, 1.3)


@dataclass(frozen=True)
class Case:
    """One batch over one head, every row with its own temperature, seed and position.

    `tokens` are each row's tokens so far: its prompt, and its output too.
    """

    hidden_states: torch.Tensor
    weight: torch.Tensor
    params: list[SamplingParams]
    positions: torch.Tensor
    tokens: list[list[int]] | None = None

    @staticmethod
    def make(vocab_size: int, rows: int, hidden_size: int = 16, dtype=torch.bfloat16) -> Case:
        generator = torch.Generator().manual_seed(vocab_size * 1000 + rows)
        hidden_states = torch.randn(rows, hidden_size, generator=generator)
        weight = torch.randn(vocab_size, hidden_size, generator=generator)
        params = [
            SamplingParams(temperature=TEMPERATURES[row % len(TEMPERATURES)], seed=1000 + row)
            for row in range(rows)
        ]
        return Case(hidden_states.to(dtype), weight.to(dtype), params, 50 + torch.arange(rows))

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def batch(self) -> SamplingBatch:
        return SamplingBatch.from_params(
            self.params,
            vocab_size=self.vocab_size,
            prompt_token_ids=self.tokens,
            output_token_ids=self.tokens,
        )

    def rows(self, index: list[int]) -> Case:
        """The same rows in another order, or fewer of them."""
        params = [self.params[row] for row in index]
        return Case(self.hidden_states[index], self.weight, params, self.positions[index])

    def beside(self, other: Case) -> Case:
        """These rows and, behind them, those of another batch, over the other's head."""
        return Case(
            torch.cat([self.hidden_states, other.hidden_states]),
            other.weight,
            self.params + other.params,
            torch.cat([self.positions, other.positions]),
        )

    def oracle(self, num_samples: int | None = None, **head: Any) -> SampleOutput:
        """The tokens every sampler must return."""
        logits = reference.logits(self.hidden_states, self.weight, **head)
        return reference.sample(logits, self.batch, self.positions, num_samples=num_samples)


def own_shard(vocab_size: int, even: bool) -> VocabShard:
    """The shard of this rank of the default process group, or all ids where there is none."""
    if not dist.is_initialized():
        return VocabShard(0, vocab_size)
    shards = (even_shards if even else uneven_shards)(vocab_size, dist.get_world_size())
    return shards[dist.get_rank()]


def own_sampler(weight: torch.Tensor, *, even: bool = True, **options: Any) -> LMHeadSampler:
    """This rank's sampler over its rows of a whole weight; in torch, but for "peer"."""
    shard = own_shard(len(weight), even)
    backend = "triton" if options.get("exchange") == "peer" else "torch"
    options = {"backend": backend, "vocab_size": len(weight), "shard": shard, **options}
    return LMHeadSampler(weight[shard.start : shard.stop], **options)


def uneven_shards(vocab_size: int, world_size: int) -> list[VocabShard]:
    """Shards of very different sizes, most bounds not divisible by 4, some empty."""
    cuts = [0]
    for rank in range(1, world_size):
        cuts.append(max(cuts[-1], vocab_size * rank * rank // world_size**2 // 2 * 2 - 1))
    return [VocabShard(a, b) for a, b in zip(cuts, [*cuts[1:], vocab_size], strict=True)]
