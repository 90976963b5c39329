"""Random LM heads, and the ranks that sample over them: this process, or virtual ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.fuzz.requests import surroundings
from tests.support import oracle
from tests.support.virtual import in_turn, small_tiles
from tpsample import LMHeadSampler, SampleOutput, VerifyOutput, VocabShard, reference, verify

T = TypeVar("T")
ODD_SIZES = (1, 2, 3, 5, 7, 31, 33, 63, 64, 65, 127, 255, 257, 511, 1000)


@dataclass(frozen=True)
class ModelHead:
    """An LM head and how it is cut.

    Attributes:
        exact: whether every product is an integer.
        cancels: whether the last two columns are opposite, as those of the hidden states are equal.
            Their products may be ten thousand times the logit. So an fp32 sum of all is far off, a
            bound proves little, and a score that is not exact may draw another token.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    shards: list[VocabShard]
    exact: bool
    cancels: bool = False

    @staticmethod
    def make(pick: random.Random, world_size: int, *, exact: bool, most: int = 1200) -> ModelHead:
        generator = torch.Generator().manual_seed(pick.getrandbits(32))
        size = pick.choice(ODD_SIZES) if pick.random() < 0.4 else pick.randint(1, most)
        size = min(size, most)
        weight = torch.randn(size, pick.randint(1, 24), generator=generator)
        if exact or pick.random() < 0.3:  # exact products, many ties
            weight = weight.round()
        weight = weight * pick.choice([1.0] * 5 + [2.0, 4.0, 0.0])
        dtype = torch.float32 if exact else pick.choice([torch.float32, torch.bfloat16, torch.half])
        cancels = not exact and pick.random() < 0.3
        if cancels:
            column = torch.randn(size, 1, generator=generator) * pick.choice([10, 1e3, 1e4])
            weight = torch.cat([weight, column, -column], 1)
        bias = None
        if pick.random() < 0.4:
            bias = torch.randn(size, generator=generator)
            bias = bias.round() if exact else bias
            if pick.random() < 0.3:  # masked: some tokens, all but one, or all
                left = pick.choice([size // 2, 1, 0])
                bias[torch.randperm(size, generator=generator)[left:]] = -torch.inf
            if pick.random() < 0.1:
                bias[pick.randrange(size)] = pick.choice([torch.nan, torch.inf])
        cuts = sorted(pick.randint(0, size) for _ in range(world_size - 1))
        shards = [VocabShard(a, b) for a, b in itertools.pairwise([0, *cuts, size])]
        scale = 1.0 if exact else pick.choice([1.0, 1.0, 0.25, 2.0])
        softcap = None if exact else pick.choice([None, None, None, 30.0])
        return ModelHead(weight.to(dtype), bias, scale, softcap, shards, exact, cancels)

    @property
    def size(self) -> int:
        return len(self.weight)

    @staticmethod
    def of_size(size: int, hidden_size: int, world_size: int) -> ModelHead:
        """A plain one, cut evenly."""
        weight = torch.randn(size, hidden_size, generator=torch.Generator().manual_seed(size))
        shards = [VocabShard.even(size, rank, world_size) for rank in range(world_size)]
        return ModelHead(weight, None, 1.0, None, shards, exact=False)

    def sampler(
        self, rank: int, pick: random.Random, *, gradients: bool = False, **options: Any
    ) -> LMHeadSampler:
        """This rank's; on every rank with the same draws of `pick`.

        Args:
            gradients: the weight asks for gradients, as a module's own does; else it may.
        """
        shard = self.shards[rank]
        weight, bias = (
            None if whole is None else whole[shard.start : shard.stop].clone()
            for whole in (self.weight, self.bias)
        )
        if pick.random() < 0.5:  # rows behind the shard, which must not be seen
            with torch.autocast("cpu", enabled=False):  # in which torch joins no fp16
                weight, bias = (
                    None if own is None else torch.cat([own, torch.full_like(own[:1], torch.nan)])
                    for own in (weight, bias)
                )
        bias = None if bias is None else self.placed(bias)
        return LMHeadSampler(
            self.placed(weight).requires_grad_(pick.random() < 0.3 or gradients),
            vocab_size=self.size,
            shard=shard,
            bias=bias,
            logit_scale=self.scale,
            logit_softcap=self.softcap,
            **options,
        )

    def placed(self, tensor: Tensor) -> Tensor:
        """Put a tensor where the kernels shall read it; here it stays."""
        return tensor

    def hidden_states(self, pick: random.Random, *shape: int) -> Tensor:
        """[*shape, D], sometimes strided, poisoned, or part of a graph."""
        generator = torch.Generator().manual_seed(pick.getrandbits(32))
        wide = torch.randn(*shape, self.weight.shape[1] + 3, generator=generator)
        if self.cancels:
            wide[..., -4] = wide[..., -5]
        wide = (wide.round() if self.exact else wide).to(self.weight.dtype)
        found = wide[..., :-3] if pick.random() < 0.3 else wide[..., :-3].contiguous()
        while found.numel() and pick.random() < 0.1:
            at = tuple(pick.randrange(n) for n in found.shape)
            found[at] = pick.choice([torch.nan, torch.inf, -torch.inf])
        return self.placed(found).requires_grad_(pick.random() < 0.2)

    def logits(self, hidden_states: Tensor, shard: VocabShard) -> Tensor:
        """fp32 [B, V_local], as a head of the caller's own would return them."""
        weight, bias = (
            None if whole is None else whole[shard.start : shard.stop]
            for whole in (self.weight, self.bias)
        )
        assert weight is not None
        head = {"logit_scale": self.scale, "logit_softcap": self.softcap}
        with torch.autocast("cpu", enabled=False):
            return self.placed(reference.logits(hidden_states, weight, bias=bias, **head))

    def raw(self, hidden_states: Tensor) -> list[np.ndarray]:
        """fp32 [V] of every row."""
        bias = None if self.bias is None else self.bias.numpy()
        weight = self.weight.detach().double().numpy()
        rows = hidden_states.detach().double().numpy().reshape(-1, weight.shape[1])
        how = {"bias": bias, "scale": self.scale, "softcap": self.softcap}
        return [oracle.head_logits(row, weight, **how) for row in rows]


class OneRank:
    """This process is one rank, of one or several.

    Args:
        from_logits: whether steps begin with this rank's logits.
    """

    def __init__(
        self,
        rank: int,
        head: ModelHead,
        pick: random.Random,
        *,
        from_logits: bool = False,
        **options: Any,
    ) -> None:
        with surroundings(pick):
            self.samplers = [head.sampler(rank, pick, **options)]
        self.shards, self.head, self.from_logits = [head.shards[rank]], head, from_logits

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run a call of every rank."""
        return [body() for body in bodies]

    def sample(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> list[SampleOutput]:
        if not self.from_logits:
            steps = [partial(sampler, hidden_states) for sampler in self.samplers]
        else:
            steps = [
                partial(
                    sampler.sample_logits,
                    self.head.logits(hidden_states, shard),
                    head_applied=True,
                )
                for sampler, shard in zip(self.samplers, self.shards, strict=True)
            ]
        return self.run([partial(step, *arguments, **options) for step in steps])

    def verify(self, *arguments: Any, method: str) -> list[VerifyOutput]:
        bodies = [partial(verify, each, *arguments, method=method) for each in self.samplers]
        return self.run(bodies)

    def close(self) -> None:
        for sampler in self.samplers:
            sampler.compare()
            sampler.close()


class EveryRank(OneRank):
    """All ranks in this process: the kernels and `peer`, in the interpreter."""

    def __init__(
        self,
        head: ModelHead,
        pick: random.Random,
        *,
        from_logits: bool = False,
        prepare: Callable[[LMHeadSampler], LMHeadSampler] = small_tiles,
        **options: Any,
    ) -> None:
        self.world, self.samplers, self.shards = VirtualWorld(head.shards), [], head.shards
        self.head, self.from_logits = head, from_logits
        with surroundings(pick):
            state = pick.getstate()
            for rank, group in enumerate(self.world.ranks):
                pick.setstate(state)
                sampler = head.sampler(rank, pick, group=group, exchange="peer", **options)
                self.samplers.append(in_turn(prepare(sampler), group))

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run a call of every rank; after one that is refused, all ranks come back."""
        try:
            return self.world.run(bodies)
        except ValueError:
            self.world.run([sampler.reset for sampler in self.samplers])
            raise

    def close(self) -> None:
        for sampler in self.samplers:
            sampler.check()
            sampler.close()
