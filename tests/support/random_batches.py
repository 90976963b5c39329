"""Random requests, heads and ranks: what the stories of `tests.support.mixtures` are made of."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tests.support import oracle
from tests.support.oracle import Context, Request
from tests.support.virtual import in_turn
from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingParams,
    VocabShard,
    reference,
)
from tpsample.local.tiles import Tile
from tpsample.ranks.virtual import VirtualWorld
from tpsample.speculative.output import VerifyOutput
from tpsample.speculative.verify import verify

SEEDS = (0, 1, -1, 2**63, 2**64 - 1, -(2**63))
POSITIONS = (0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 9)
ODD_SIZES = (1, 2, 3, 5, 7, 31, 33, 63, 64, 65, 127, 255, 257, 511, 1000)
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
SMALL_TILE = Tile(block_v=64, block_b=4, block_d=16, num_warps=1, num_stages=1)


# -- requests ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theme:
    """The values that the rows of a story share, so that they meet where they seldom would.

    Attributes:
        kinds: of the requests, see `_request`.
        controlled, told: how many have penalties or constraints, and logprobs.
        changes: how many between two steps, one of these.
        verified, drafts: how many steps are verification, and K, one of these.
        most_ids, most_rows: of the head and of the batch.
    """

    kinds: tuple[str, ...]
    controlled: float = 0.3
    told: float = 0.3
    changes: tuple[int, ...] = (0, 0, 1, 1, 2, 3)
    verified: float = 0.25
    drafts: tuple[int, ...] = (0, 1, 2, 3)
    most_ids: int = 1200
    most_rows: int = 2**20


ALL_KINDS = ("plain", "greedy", "wide", "wide", "filtered", "filtered")
THEMES = {
    "mixed": Theme(ALL_KINDS),
    "few": Theme(ALL_KINDS, most_rows=3),
    "top words": Theme(("top_k", "top_k top_p"), controlled=0.1, most_rows=3),
    "thresholds": Theme(("threshold", "threshold", "plain"), controlled=0.1, most_rows=4),
    "masks": Theme(ALL_KINDS, controlled=0.0, changes=(0, 0, 1), verified=0.6, drafts=(2,)),
    "texts": Theme(ALL_KINDS, controlled=0.9, told=0.7, verified=0.5, most_ids=12),
    "controls": Theme(ALL_KINDS, controlled=0.9, told=0.7, changes=(1, 2)),
}


def request(pick: random.Random, size: int, theme: Theme = THEMES["mixed"]) -> dict[str, Any]:
    """A request in which some allowed id is left."""
    while True:
        fields = _request(pick, size, theme)
        banned = {word[0] for word in fields.get("bad_words", ()) if len(word) == 1}
        banned |= set(fields.get("stop_token_ids", ()))
        if not banned.issuperset(fields.get("allowed_token_ids", [-1])):
            return fields


def _request(pick: random.Random, size: int, theme: Theme) -> dict[str, Any]:
    seed = pick.choice([*SEEDS, None, None]) if pick.random() < 0.2 else pick.getrandbits(64)
    found: dict[str, Any] = {"seed": seed}
    kind = pick.choice(theme.kinds)
    if kind == "greedy":
        found["temperature"] = pick.choice([0.0, 1e-6, 9e-6])
    elif kind == "wide":  # the best by noise are rarely in the kept set
        found |= {"temperature": pick.choice([1.5, 3.0, 50.0])} | pick.choice(
            [
                {"top_k": 20},
                {"top_k": pick.choice([1, 2, 300])},
                {"top_p": pick.choice([1e-9, 0.01, 0.3])},
                {"top_k": pick.choice([50, 300]), "top_p": pick.choice([0.01, 0.9])},
                {"min_p": 1.0},
            ]
        )
    elif kind == "top_k":
        found |= {"temperature": pick.choice([5.0, 50.0]), "top_k": pick.choice([2, 20])}
    elif kind == "top_k top_p":
        found |= {"top_k": pick.choice([20, 50]), "top_p": 0.9}
    elif kind == "threshold":
        wide = pick.choice([{"top_k": 300, "top_p": 0.01}, {"min_p": 1.0}, {"top_p": 0.01}])
        found |= {"temperature": pick.choice([3.0, 50.0])} | wide
    elif kind == "filtered":
        found["temperature"] = pick.choice([1e-5, 0.01, 0.5, 1.0, 1.0, 2.0])
        found["top_k"] = pick.choice([0, -1, 1, 2, 20, 256, 257, size - 1, size, size + 1])
        found["top_p"] = pick.choice([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999])
        found["min_p"] = pick.choice([0.0, 0.0, 0.01, 0.5, 1.0])
    if kind in ("wide", "filtered"):
        found["ties"] = pick.choice(["exact", "keep"])
        found["filter_order"] = pick.choice(["sequential", "joint", "min_p_last"])
    if pick.random() < theme.controlled:
        found |= _controls(pick, size)
    if pick.random() < theme.told:
        found["logprobs"] = pick.choice([0, 1, 3, 20, -1 if size < 300 else 5])
        found["logprobs_mode"] = pick.choice(MODES)
        if pick.random() < 0.5:
            found["logprob_token_ids"] = [pick.randrange(size) for _ in range(pick.randint(1, 3))]
    return found


def _controls(pick: random.Random, size: int) -> dict[str, Any]:
    def ids(most: int) -> list[int]:
        return [pick.randrange(size) for _ in range(pick.randint(1, most))]

    few = min(size, 4)
    found = {
        "repetition_penalty": pick.choice([0.5, 1.1, 1.3, 10.0]),
        "presence_penalty": pick.choice([-2.0, 0.3, 1.5]),
        "frequency_penalty": pick.choice([-0.3, 0.1, 2.0]),
        "logit_bias": {v: pick.uniform(-150, 150) for v in ids(5)},
        "bad_words": [
            [pick.randrange(few) for _ in range(pick.choice([1, 2, 2, 3, 4]))]
            for _ in range(pick.randint(1, 6))
        ],
        "allowed_token_ids": ids(40),
        "repetition_scope": pick.choice(["all", "output"]),
        "min_tokens": pick.choice([1, 5, 20]),
    }
    found = {name: found[name] for name in pick.sample(sorted(found), pick.randint(1, 4))}
    if "min_tokens" in found:
        found["stop_token_ids"] = [*ids(3), pick.randrange(few)]
    return found


def tokens_so_far(pick: random.Random, size: int, *, prompt: bool) -> list[int]:
    """Pick a few ids, also for bad words; in a prompt sometimes ids that are no tokens."""
    found = [pick.randrange(min(size, 4)) for _ in range(pick.randint(0, 6))]
    if prompt and pick.random() < 0.1:
        found += [-1, size, 2**31 + 7]
    return found


# -- the head ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelHead:
    """An LM head and how it is cut. With `exact`, every product is an integer."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    shards: list[VocabShard]
    exact: bool

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
        scale = 1.0 if exact else pick.choice([1.0, 1.0, 0.25, -2.0])
        softcap = None if exact else pick.choice([None, None, None, 30.0])
        return ModelHead(weight.to(dtype), bias, scale, softcap, shards, exact)

    @property
    def size(self) -> int:
        return len(self.weight)

    def other(self, pick: random.Random) -> ModelHead:
        """One of the same shape with other weights."""
        generator = torch.Generator().manual_seed(pick.getrandbits(32))
        weight = torch.randn(self.weight.shape, generator=generator)
        weight = weight.round() if self.exact else weight * pick.choice([1.0, 3.0])
        return replace(self, weight=weight.to(self.weight.dtype))

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
            weight, bias = (
                None if own is None else torch.cat([own, torch.full_like(own[:1], torch.nan)])
                for own in (weight, bias)
            )
        sampler = LMHeadSampler(
            weight.requires_grad_(pick.random() < 0.3 or gradients),
            vocab_size=self.size,
            shard=shard,
            bias=bias,
            logit_scale=self.scale,
            logit_softcap=self.softcap,
            **options,
        )
        _GIVEN[sampler] = weight
        return sampler

    def hidden_states(self, pick: random.Random, *shape: int) -> Tensor:
        """[*shape, D], sometimes strided, poisoned, or part of a graph."""
        generator = torch.Generator().manual_seed(pick.getrandbits(32))
        wide = torch.randn(*shape, self.weight.shape[1] + 3, generator=generator)
        wide = (wide.round() if self.exact else wide).to(self.weight.dtype)
        found = wide[..., :-3] if pick.random() < 0.3 else wide[..., :-3].contiguous()
        while found.numel() and pick.random() < 0.1:
            at = tuple(pick.randrange(n) for n in found.shape)
            found[at] = pick.choice([torch.nan, torch.inf, -torch.inf])
        return found.requires_grad_(pick.random() < 0.2)

    def logits(self, hidden_states: Tensor, shard: VocabShard) -> Tensor:
        """fp32 [B, V_local], as a head of the caller's own would return them."""
        weight, bias = (
            None if whole is None else whole[shard.start : shard.stop]
            for whole in (self.weight, self.bias)
        )
        assert weight is not None
        head = {"logit_scale": self.scale, "logit_softcap": self.softcap}
        with torch.autocast("cpu", enabled=False):
            return reference.logits(hidden_states, weight, bias=bias, **head)

    def raw(self, hidden_states: Tensor) -> list[np.ndarray]:
        """fp32 [V] of every row."""
        bias = None if self.bias is None else self.bias.numpy()
        weight = self.weight.detach().double().numpy()
        rows = hidden_states.detach().double().numpy().reshape(-1, weight.shape[1])
        how = {"bias": bias, "scale": self.scale, "softcap": self.softcap}
        return [oracle.head_logits(row, weight, **how) for row in rows]


# -- a row and what has been told about it -----------------------------------------------------


@dataclass
class Row:
    """The request and the tokens of a row."""

    fields: dict[str, Any]
    seed: int | None
    prompt: list[int]
    output: list[int]
    temperature: float
    grammar: tuple[int, ...] | None = None
    forced: int = -1

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.fields)

    @property
    def request(self) -> Request:
        return Request(**self.fields | {"temperature": self.temperature})

    @property
    def context(self) -> Context:
        return Context(tuple(self.prompt), tuple(self.output), self.grammar, self.forced)

    @property
    def reads_output(self) -> bool:
        asks = self.request
        penalised = (asks.repetition_penalty, asks.presence_penalty, asks.frequency_penalty)
        return penalised != (1, 0, 0) or bool(asks.bad_words) or asks.min_tokens > 0


@dataclass
class Tally:
    """Counts of what was compared, and of what was wrong."""

    rows: int = 0
    wrong: int = 0
    near_ties: int = 0
    notes: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        self.rows, self.wrong = self.rows + other.rows, self.wrong + other.wrong
        self.near_ties += other.near_ties
        self.notes += other.notes
        return self

    def differ(self, note: str) -> None:
        self.wrong += 1
        self.notes.append(note)

    def require_none_wrong(self, what: str) -> None:
        line = f"{self.rows} rows, {self.wrong} differ from the oracle, {self.near_ties} near ties"
        print(f"mixtures, {what}: {line}")
        assert not self.wrong, "\n".join([line, *self.notes[:20]])
        assert self.near_ties * 2000 <= max(self.rows, 2000), line


# -- how a step is taken -----------------------------------------------------------------------

T = TypeVar("T")


_GIVEN: WeakKeyDictionary[LMHeadSampler, Tensor] = WeakKeyDictionary()
"""The weight that each sampler was given."""


def take_head(ranks: Any, pick: random.Random, head: ModelHead) -> None:
    """Let ranks go on with another head of the same shape."""
    seed = pick.getrandbits(32)
    for sampler, shard in zip(ranks.samplers, ranks.shards, strict=True):
        change_weight(random.Random(seed), sampler, head.weight[shard.start : shard.stop])
    if hasattr(ranks, "head"):
        ranks.head = head


def change_weight(pick: random.Random, sampler: LMHeadSampler, rows: Tensor) -> None:
    """Give a sampler another weight in one of five ways; the rows behind its shard stay."""
    given = _GIVEN[sampler]
    new = given.detach().clone()
    new[: len(rows)] = rows
    way = pick.choice(["in place", "through data", "data", "inference mode", "another tensor"])
    if way == "in place":
        with torch.no_grad():
            given.copy_(new)
    elif way == "through data":
        given.data.copy_(new)
    elif way == "data":
        given.data = new
    elif way == "inference mode":
        with torch.inference_mode():
            given.data.copy_(new)
    if way == "another tensor":
        _GIVEN[sampler] = torch.nn.Parameter(new)
        sampler.refresh(_GIVEN[sampler])
    elif sampler.local.copy is not None or pick.random() < 0.2:
        sampler.refresh()


class OneRank:
    """This process is one rank, of one or several."""

    def __init__(self, rank: int, head: ModelHead, pick: random.Random, **options: Any) -> None:
        self.samplers = [head.sampler(rank, pick, **options)]
        self.shards = [head.shards[rank]]

    def sample(self, *arguments: Any, **options: Any) -> list[SampleOutput]:
        return [sampler(*arguments, **options) for sampler in self.samplers]

    def verify(self, *arguments: Any, method: str) -> list[VerifyOutput]:
        return [verify(sampler, *arguments, method=method) for sampler in self.samplers]

    def close(self) -> None:
        for sampler in self.samplers:
            sampler.compare()
            sampler.close()


class OneRankFromLogits(OneRank):
    """The same, but its steps begin with this rank's logits."""

    def __init__(self, rank: int, head: ModelHead, pick: random.Random, **options: Any) -> None:
        super().__init__(rank, head, pick, **options)
        self.head = head

    def sample(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> list[SampleOutput]:
        return [
            sampler.sample_logits(self.head.logits(hidden_states, shard), *arguments, **options)
            for sampler, shard in zip(self.samplers, self.shards, strict=True)
        ]


class VirtualRanks:
    """All ranks in this process: the kernels and `peer`, in the interpreter."""

    def __init__(self, head: ModelHead, pick: random.Random, **options: Any) -> None:
        self.world, state = VirtualWorld(head.shards), pick.getstate()
        self.samplers, self.shards = [], head.shards
        for rank, group in enumerate(self.world.ranks):
            pick.setstate(state)
            sampler = head.sampler(rank, pick, group=group, exchange="peer", **options)
            self.samplers.append(in_turn(sampler, group))
        for sampler in self.samplers:
            local: Any = sampler.local
            local.tile = SMALL_TILE

    def sample(self, *arguments: Any, **options: Any) -> list[SampleOutput]:
        return self.run([partial(each, *arguments, **options) for each in self.samplers])

    def verify(self, *arguments: Any, method: str) -> list[VerifyOutput]:
        return self.run(
            [partial(verify, each, *arguments, method=method) for each in self.samplers]
        )

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


class VirtualRanksFromLogits(VirtualRanks):
    """The same, but its steps begin with each rank's logits."""

    def __init__(self, head: ModelHead, pick: random.Random, **options: Any) -> None:
        super().__init__(head, pick, **options)
        self.head = head

    def sample(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> list[SampleOutput]:
        return self.run(
            [
                partial(
                    sampler.sample_logits,
                    self.head.logits(hidden_states, shard),
                    *arguments,
                    **options,
                )
                for sampler, shard in zip(self.samplers, self.shards, strict=True)
            ]
        )


@contextlib.contextmanager
def surroundings(pick: random.Random) -> Iterator[str]:
    """Set one mode around a call, as its caller may have; yields the name of it."""
    name = pick.choice(["", "", "", "no_grad", "inference", "autocast", "bfloat16", "float64"])
    with contextlib.ExitStack() as stack:
        if name == "no_grad":
            stack.enter_context(torch.no_grad())
        elif name == "inference":
            stack.enter_context(torch.inference_mode())
        elif name == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif name:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(getattr(torch, name))
        yield name


# -- a story -----------------------------------------------------------------------------------
