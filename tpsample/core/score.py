"""Logits to scores: the arithmetic every path shares, in plain PyTorch.

    logit = accumulated product -> × logit_scale -> soft-cap -> + bias               fp32
    score = fma(logit, log2 e / T, -L)      random row, L from `tpsample.noise`
    score = logit                           greedy row

Each fp32 operation is computed in float64 and rounded once. The accumulated product itself is
summed in float64 before its one rounding, so on a CPU a logit does not depend on how the
vocabulary or the batch was cut.

A product logit · log2 e / T beyond fp32 is infinite: such a logit counts as masked below zero and
as forced above, whatever the other logits are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tpsample.noise import row_stream, tile_noise, token_noise
from tpsample.request.params import GREEDY_BELOW
from tpsample.request.plan import BatchView


@dataclass(frozen=True)
class Head:
    """What the LM head does to a product before sampling; must match across ranks.

    Attributes:
        logit_scale: multiplies the product (Cohere, Granite).
        logit_softcap: c in c · tanh(logit / c) (Gemma), or None.
    """

    logit_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True)
class RowNoise:
    """What of the score does not depend on the token; derived when first asked for.

    Attributes:
        temperature: fp32 [B].
        seed, positions: int64 [B].
        num_samples: draws per row.
        rounds: Philox rounds of the element words.
    """

    temperature: Tensor
    seed: Tensor
    positions: Tensor
    num_samples: int
    rounds: int

    @staticmethod
    def of(batch: BatchView, positions: Tensor, num_samples: int, rounds: int) -> RowNoise:
        return RowNoise(batch.temperature, batch.seed, positions, num_samples, rounds)

    @cached_property
    def random(self) -> Tensor:
        """bool [B, 1], False for greedy rows."""
        return safe_temperature(self.temperature.unsqueeze(1))[1]

    @cached_property
    def scale(self) -> Tensor:
        """fp32 [B, 1], log2 e / T, 1 for greedy rows."""
        safe, random = safe_temperature(self.temperature.unsqueeze(1))
        return torch.where(random, (math.log2(math.e) / safe.double()).float(), 1.0)

    @cached_property
    def streams(self) -> list[tuple[Tensor, ...]]:
        """One row stream per sample, int64 tensors [B, 1]."""
        seed, positions = self.seed.unsqueeze(1), self.positions.unsqueeze(1)
        return [row_stream(seed, positions, sample) for sample in range(self.num_samples)]

    def select(self, rows: Tensor | list[int] | slice) -> RowNoise:
        """The constants of some of the rows."""
        chosen = replace(
            self,
            temperature=self.temperature[rows],
            seed=self.seed[rows],
            positions=self.positions[rows],
        )
        if "streams" in vars(self):  # about a hundred operators: not made again
            streams = [tuple(r[rows] for r in stream) for stream in self.streams]
            vars(chosen)["streams"] = streams
        return chosen


def safe_temperature(temperature: Tensor) -> tuple[Tensor, Tensor]:
    """(temperature with 1 for greedy rows, whether the row is random)."""
    random = temperature >= GREEDY_BELOW
    return torch.where(random, temperature, 1.0), random


def logits_tile(
    hidden_states: Tensor, weight_tile: Tensor, bias_tile: Tensor | None, head: Head
) -> Tensor:
    """fp32 logits [B, n] of n vocabulary rows.

    Args:
        hidden_states: [B, D] in float64 (the caller converts once).
        weight_tile: [n, D], any floating dtype.
        bias_tile: [n] or None.
    """
    logits = (hidden_states @ weight_tile.double().T).float()
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    if head.logit_softcap is not None:
        cap = float(torch.tensor(head.logit_softcap, dtype=torch.float32))
        ratio = logits / cap
        logits = torch.tanh(ratio.double()).float() * cap
    if bias_tile is not None:
        logits = logits + bias_tile.float()
    return logits


def score_tile(logits: Tensor, first_id: int, rows: RowNoise, sample: int) -> Tensor:
    """fp32 scores [B, n] of the logits of token ids first_id … first_id + n - 1."""
    noise = tile_noise(rows.streams[sample], first_id, logits.shape[1], rows.rounds)
    return score(logits, noise, rows)


def score_tokens(logits: Tensor, token_ids: Tensor, rows: RowNoise, sample: int) -> Tensor:
    """fp32 scores [B, n] of the logits of any token ids, int64 [B, n]."""
    return score(logits, token_noise(rows.streams[sample], token_ids, rows.rounds), rows)


def score(logits: Tensor, noise: Tensor, rows: RowNoise) -> Tensor:
    """fp32 scores [B, n] of logits [B, n] with L = `noise` [B, n]."""
    product = logits.double() * rows.scale.double()
    return torch.where(rows.random, product - noise.double(), product).float()
