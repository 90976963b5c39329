"""One step to measure, and the gate before every number: its ids must be the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tpsample import LMHeadSampler, SampleOutput, SamplingBatch, SamplingParams, reference
from tpsample.backends.triton_.tile_table import Tile

_ORACLE_ROWS = 64

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes of weights."""


class WrongToken(AssertionError):
    """A candidate returned a token the oracle does not: nothing measured with it may be shown."""


@dataclass(frozen=True)
class Compared:
    """Rows that were compared with the oracle, those that differ within a near tie, and how far."""

    rows_compared: int = 0
    near_ties: int = 0
    largest_gap: float = 0.0

    def __add__(self, other: Compared) -> Compared:
        return Compared(
            self.rows_compared + other.rows_compared,
            self.near_ties + other.near_ties,
            max(self.largest_gap, other.largest_gap),
        )


@dataclass(frozen=True)
class Problem:
    """B rows over one LM head.

    Attributes:
        weight: [V, D], about N(0, 1/D), so logits are about N(0, 1).
        hidden_states: [B, D], of the same dtype, about N(0, 1).
        params: one request per row, all with a seed.
        positions: int64 [B].
        fixed_rounds: whether filtered rows are drawn as in a captured graph, in every step.
    """

    weight: Tensor
    hidden_states: Tensor
    params: list[SamplingParams]
    positions: Tensor
    fixed_rounds: bool = False

    @staticmethod
    def make(weight: Tensor, rows: int, temperatures: Sequence[float] = (1.0,)) -> Problem:
        """Make random hidden states; rows take the temperatures in turn. Row r is free of B."""
        device = weight.device
        generator = torch.Generator(device).manual_seed(1)
        shape = (max(512, rows), weight.shape[1])
        hidden = torch.randn(shape, generator=generator, device=device, dtype=weight.dtype)
        params = [
            SamplingParams(temperature=temperatures[row % len(temperatures)], seed=1000 + row)
            for row in range(rows)
        ]
        positions = torch.arange(rows, dtype=torch.int64, device=device)
        return Problem(weight, hidden[:rows], params, positions)

    def filtered(self, **changes: Any) -> Problem:
        """Return the same rows with filters."""
        return replace(self, params=[replace(params, **changes) for params in self.params])

    def take(self, index: Sequence[int]) -> Problem:
        """Return some of the rows, in any order."""
        rows = torch.tensor(list(index), device=self.weight.device)
        params = [self.params[row] for row in index]
        return replace(
            self,
            hidden_states=self.hidden_states[rows],
            params=params,
            positions=self.positions[rows],
        )

    @cached_property
    def batch(self) -> SamplingBatch:
        return SamplingBatch.from_params(
            self.params,
            vocab_size=self.vocab_size,
            device=self.weight.device,
            fixed_rounds=self.fixed_rounds,
        )

    @property
    def rows(self) -> int:
        return self.hidden_states.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def sampled_by(self, sampler: LMHeadSampler) -> Candidate:
        """Return a step of `sampler` on this problem."""
        out = SampleOutput.empty(self.batch.seed, None)
        return Candidate(
            self,
            lambda: sampler(self.hidden_states, self.batch, self.positions, out=out),
            out.token_ids,
        )

    def check(self, token_ids: Tensor, logits: Tensor | None = None) -> Compared:
        """Compare ids with the oracle of the exact logits, or of materialised `logits` [B, V].

        Returns:
            How many rows there are, and which part differs within a near tie; none on a CPU.

        Raises:
            WrongToken: any other difference.
        """
        hidden_size = self.weight.shape[1] if logits is None else 0  # 0: the sum is not in doubt
        compared = Compared()
        for first in range(0, self.rows, _ORACLE_ROWS):
            block = slice(first, min(first + _ORACLE_ROWS, self.rows))
            exact = (
                reference.logits(self.hidden_states[block], self.weight)
                if logits is None
                else logits[block].float()
            )
            batch = SamplingBatch.from_params(
                self.params[block], vocab_size=self.vocab_size, device=self.weight.device
            )
            given = (token_ids[block], exact, batch, self.positions[block], hidden_size)
            compared += gate(*given, first=first)
        return compared


def gate(
    token_ids: Tensor,
    logits: Tensor,
    batch: SamplingBatch,
    positions: Tensor,
    hidden_size: int,
    *,
    sample: int = 0,
    first: int = 0,
) -> Compared:
    """Compare tokens [B] with the oracle's for logits [B, V].

    Args:
        hidden_size: terms that a logit is summed of, in any order; 0 where its value is given.
        first: number of the first row, for the error.

    Returns:
        How many rows there are, and which part differs within a near tie; none on a CPU.

    Raises:
        WrongToken: others differ.
    """
    scores = reference.scores(logits, batch, positions, sample=sample)
    if batch.plan.filters is not None:
        scores = scores.where(reference.kept_mask(logits, batch), -torch.inf)
    best, expected = scores.max(dim=1)
    got, vocab_size = token_ids.long(), logits.shape[1]
    in_range = (got >= 0) & (got < vocab_size)
    score = scores.gather(1, torch.where(in_range, got, 0)[:, None]).squeeze(1)
    gap = torch.where(in_range, best - score, torch.inf)
    differs = got != expected
    on_gpu = logits.device.type == "cuda"
    near = reference.near_tie(logits, batch.temperature, hidden_size)
    wrong = differs & ~(on_gpu & (gap < near))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise WrongToken(
            f"row {first + row}, sample {sample}, V = {vocab_size}: got token {int(got[row])}, the "
            f"oracle says {int(expected[row])}, which scores {float(gap[row]):.3g} more; "
            f"{int(wrong.sum())} rows of this block are wrong"
        )
    largest_gap = float(gap[differs].max()) if differs.any() else 0.0
    return Compared(len(got), int(differs.sum()), largest_gap)


@dataclass(frozen=True)
class Candidate:
    """A step of tpsample, and where it leaves its ids.

    Attributes:
        token_ids: [B], or [ranks, B] if several ranks are in this process.
        graph: whether it is timed as the replay of a CUDA graph.
        judge: takes the step and raises `WrongToken` if it is wrong, where the oracle has more than
            ids to say, or other noise; None compares the ids. Collective.
    """

    problem: Problem
    step: Callable[[], object]
    token_ids: Tensor
    graph: bool = True
    judge: Callable[[], Compared] | None = None

    def check(self) -> Compared:
        """Take the step and compare with the oracle; see `Problem.check`."""
        if self.judge is not None:
            return self.judge()
        self.token_ids.fill_(-2)  # no token, and not that of a failed row
        self.step()
        ranks = self.token_ids.view(-1, self.problem.rows)
        each = (self.problem.check(token_ids) for token_ids in ranks)
        return sum(each, Compared())


def make_weight(
    vocab_size: int, hidden_size: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return a random LM head [V, D], the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (vocab_size, hidden_size)
    weight = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return weight.mul_(hidden_size**-0.5)


def make_sampler(weight: Tensor, rows: int, **options: Any) -> LMHeadSampler:
    """Return the sampler as a user builds it, with room for `rows`."""
    return LMHeadSampler(weight, max_rows=512 if rows > 256 else 256, **options)


def override_tile(sampler: LMHeadSampler, tile: Tile | None) -> None:
    """Let the sampler take `tile` whatever the table says; None is what the table says."""
    from tpsample.backends.triton_.launch import TritonBackend

    assert isinstance(sampler.local, TritonBackend)
    sampler.local.tile = tile


def tile_text(tile: Tile) -> str:
    """128×64×64/8w/3s: vocabulary × batch × hidden, warps, stages."""
    blocks = f"{tile.block_v}×{tile.block_b}×{tile.block_d}"
    return f"{blocks}/{tile.num_warps}w/{tile.num_stages}s"
