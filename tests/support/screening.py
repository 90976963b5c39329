"""Heads that are hard to screen, and the words of one backend beside those of another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.requests import Theme, random_row
from tests.support.cases import TEMPERATURES
from tests.support.settings import settings_of
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.backends.backend import Backend
from tpsample.backends.numba_.kernels.draw import draw
from tpsample.backends.numba_.kernels.first_logits import store_first
from tpsample.backends.numba_.kernels.store import list_kept, store
from tpsample.backends.numba_.launch import NativeBackend
from tpsample.backends.numba_.row_kinds import kinds_of
from tpsample.backends.torch_.launch import TorchBackend
from tpsample.core import word
from tpsample.core.order import order_words
from tpsample.core.score import Head
from tpsample.request.step import Step, raw_and_processed

PASSES = ("fp32", "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD_HEADS = (*(Head(), Head(0.3), Head(1e-30), Head(1.0, 2.5), Head(2.0, 5.0), Head(7.0, 30.0)),)


@dataclass(frozen=True)
class Problem:
    """A shard of a head and some hidden states."""

    weight: Tensor
    hidden_states: Tensor
    bias: Tensor | None = None
    head: Head = field(default_factory=Head)

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(self.weight.to(dtype), self.hidden_states.to(dtype), self.bias, self.head)


def normal(v: int, b: int, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(v, d, generator=g) * 0.3, torch.randn(b, d, generator=g)


def zipf(v, b, d, g):
    """Rows whose products with one hidden direction fall like the logarithm of their rank."""
    weight, hidden = normal(v, b, d, g)
    order = torch.randperm(v, generator=g)
    weight[:, 0] -= (order + 1).float().log()
    hidden[:, 0] = hidden[:, 0].abs() + 1
    return weight, hidden


def near_ties(v, b, d, g):
    """All rows alike but for parts in a million, and a few far below."""
    weight, hidden = normal(1, b, d, g)
    weight = weight.repeat(v, 1) * (1 + 1e-6 * torch.randn(v, 1, generator=g))
    weight[::7] -= 3
    return weight, hidden


def a_near_tie(v, b, d, g):
    """Two rows within a part in a million lead each row by far, wherever they lie."""
    weight, hidden = normal(v, b, d, g)
    for row in range(b):
        toward = hidden[row] / hidden[row].norm() * 3
        first, second = torch.randint(0, v, (2,), generator=g).tolist()
        weight[first], weight[second] = toward, toward * (1 + 1e-6)
    return weight, hidden


def twins(v, b, d, g):
    """Every row is there twice, so every best score is a tie."""
    weight, hidden = normal(v, b, d, g)
    weight[1::2] = weight[: (v // 2) * 2 : 2]
    return weight, hidden


def outliers(v, b, d, g):
    """One huge number in every row."""
    weight, hidden = normal(v, b, d, g)
    weight[torch.arange(v), torch.randint(0, d, (v,), generator=g)] = 30.0
    return weight, hidden * 0.3


def a_huge_row(v, b, d, g):
    """One row ten thousand times longer than the others."""
    weight, hidden = normal(v, b, d, g)
    weight[v // 2] *= 1e4
    return weight, hidden


def zeros(v, b, d, g):
    """Zero rows, and a hidden state of zeros."""
    weight, hidden = normal(v, b, d, g)
    weight[::3], hidden[0] = 0, 0
    return weight, hidden


def subnormal(v, b, d, g):
    """Numbers at and below the least normal one, of fp32 and of fp16."""
    weight, hidden = normal(v, b, d, g)
    weight[::2] *= 1e-38
    weight[1::4] *= 1e-42
    return weight, hidden * (1e-3 if b % 2 else 1e3)


def cancelling(v, b, d, g):
    """Large products that cancel, so that a product's error is large against itself."""
    weight, hidden = normal(v, b, d, g)
    half = d // 2
    weight[:, :half] = 200 + weight[:, :half]
    weight[:, half : 2 * half] = -weight[:, :half] + torch.randn(v, half, generator=g) * 0.01
    hidden[:, half : 2 * half] = hidden[:, :half]
    return weight, hidden


HEADS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    maker.__name__: maker
    for maker in (
        normal,
        zipf,
        near_ties,
        a_near_tie,
        twins,
        outliers,
        a_huge_row,
        zeros,
        subnormal,
        cancelling,
    )
}


def problem(name: str, v: int, b: int, d: int, seed: int = 0, **kinds: Any) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    return Problem(*HEADS[name](v, b, d, generator), **kinds)


def requests(rows: int, **changes: Any) -> list[SamplingParams]:
    temperatures = (*TEMPERATURES, 0.05, 3.0)
    return [
        SamplingParams(temperature=temperatures[row % len(temperatures)], seed=row, **changes)
        for row in range(rows)
    ]


CONTROLLED = Theme(("plain", "greedy"), controlled=0.7, told=0.0)


def controlled(rows: int, v: int, pick: random.Random) -> list[SamplingParams]:
    """Requests; many have penalties, biases and masks."""
    return [random_row(pick, v, CONTROLLED).params for _ in range(rows)]


def any_requests(rows: int, v: int, pick: random.Random) -> list[SamplingParams]:
    return controlled(rows, v, pick) if pick.random() < 0.5 else requests(rows)


def random_steps(
    num_rows: int,
    first_seed: int,
    sizes: Sequence[int] = (65, 257, 1531, 4000),
    batches: Sequence[int] = (2, 16, 64),
    starts: Sequence[int] = (0, 1, 2, 3, 1000),
    params: Callable[[int, int, random.Random], list[SamplingParams]] = any_requests,
) -> Iterator[tuple[random.Random, Problem, SamplingBatch, dict[str, int]]]:
    """Yield steps of any head, of so many rows together: what picks, the problem, its batch, and
    the rest.

    The rest is where the shard starts, the number of samples, and that of parts.
    """
    done, seed = 0, first_seed
    while done < num_rows:
        pick = random.Random(seed)
        v, b, start = pick.choice(sizes), pick.choice(batches), pick.choice(starts)
        case = problem(pick.choice(list(HEADS)), v, b, pick.choice([16, 65, 128]), seed)
        if pick.random() < 0.2:  # whole numbers, so that logits tie
            case = Problem(case.weight.round(), case.hidden_states.round())
        if pick.random() < 0.05:
            case.hidden_states[pick.randrange(b), 0] = pick.choice([torch.nan, torch.inf])
        bias = torch.randn(v, generator=torch.Generator().manual_seed(seed)) * pick.choice([3, 20])
        bias[::5] = pick.choice([0.0, -torch.inf])
        case = replace(
            case.to(pick.choice(DTYPES)),
            head=pick.choice(ODD_HEADS),
            bias=pick.choice([None, bias]),
        )
        tokens = [[pick.randrange(start + v) for _ in range(20)] for _ in range(b)]
        batch = SamplingBatch.from_params(
            params(b, start + v, pick),
            vocab_size=start + v,
            prompt_token_ids=tokens,
            output_token_ids=[each[:9] for each in tokens],
        )
        if pick.random() < 0.2:
            forced = [pick.choice([-1, start, start + v]) for _ in range(b)]
            batch.forced_token_ids = torch.tensor(forced)
        samples = pick.choice([1, 1, 3])
        others = {"start": start, "num_samples": samples, "parts": pick.choice([1, 4, 9])}
        yield pick, case, batch, others
        done, seed = done + b * samples, seed + 1


class CountedBackend(NativeBackend):
    """Native kernels, and how many exact logits they computed for the rows of the last step.

    Attributes:
        candidates: int64 [B], one by one, once per sample.
        whole: int64 [B], in blocks without a proof, or because all are stored.
    """

    def prepare(self, *arguments: Any, **others: Any) -> Step:
        step = super().prepare(*arguments, **others)
        self.candidates, self.whole = torch.zeros(2, step.batch.rows, dtype=torch.int64)
        return step

    def _run(self, kernel: Any, source: Any, *arguments: Any, outputs: Any = ()) -> None:
        super()._run(kernel, source, *arguments, outputs=outputs)
        if kernel is store:
            self.whole[arguments[2]] += source.stop - source.start
        elif kernel in (draw, list_kept, store_first):
            singly, in_blocks = torch.from_numpy(outputs[-1].sum(axis=0))
            self.candidates[arguments[2]] += singly
            self.whole[arguments[2]] += in_blocks


def backends(
    case: Problem, shard: VocabShard, which: str = "fp32"
) -> tuple[TorchBackend, CountedBackend]:
    """The definition, and native kernels with one of PASSES."""
    options = {"bias": case.bias, "head": case.head}
    screening = "int8" if which == "int8" else None
    settings = settings_of(case.weight, shard, screening=screening, **options)
    return TorchBackend(settings), CountedBackend(settings)


def words(
    local: Backend,
    hidden_states: Tensor,
    batch: SamplingBatch,
    positions: Tensor,
    num_samples: int = 1,
    parts: int = 1,
) -> tuple[list[Tensor], Tensor | None]:
    """The words of every part, and the logits that were stored."""
    rows = hidden_states.shape[0]
    step = local.prepare(hidden_states, batch._view_of(rows), positions, num_samples)
    if step.logits is not None:
        step.logits.fill_(torch.nan)  # what a step forgets to write would be seen
    found = []
    for part in range(parts):
        found.append(torch.zeros(num_samples * rows, dtype=torch.int64))
        local.best_words(step, found[-1], part, parts)
    return found, None if step.logits is None else stored_logits(local, step)


def stored_logits(local: Backend, step: Step) -> Tensor:
    """The logits that a step stored. Upper ends are held against the logits that replace them."""
    plan = step.batch.plan
    assert step.logits is not None
    raw, processed = raw_and_processed(step.logits, len(plan.stored_list))
    if step.found is not None and step.found.store is not None:
        error_bound = step.found.error_bound.double().unsqueeze(1)
        last = processed if len(processed) else raw
        ends = last.double()
        kinds = kinds_of(plan)
        rough_rows = map(torch.from_numpy, kinds.rough_rows)
        step.found.store(step, *rough_rows, raw, processed)
        exact = last.double()
        # -inf are masked tokens, and those that a min_p is known to leave out.
        held = (
            error_bound.isinf()
            | exact.isneginf()
            | ((ends >= exact) & (ends - error_bound <= exact))
        )
        places = [*kinds.rough]
        assert held[places].all(), "an upper end is not what it says"
        if last.shape[1]:
            first = order_words(last, local._shard.start).amax(dim=1)
            listed = step.found.first.amax(dim=(0, 2))
            same = (listed == first) | (word.key_of(first) == word.KEY_MINUS_INF)
            assert same[places].all(), "a first word is not that of the largest logit"
    return torch.cat((raw, processed))


def assert_same_words(first: list[Tensor], second: list[Tensor], what: str) -> None:
    for part, (a, b) in enumerate(zip(first, second, strict=True)):
        wrong = (a != b).nonzero().squeeze(1).tolist()
        assert not wrong, f"{what}, part {part}: words {wrong} differ"
