"""Random plain steps with real numbers, on shards of any size and weights at any address.

A token may differ from the definition's only within a near tie, and a score by no more than that.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

from tests.fuzz.judge import Tally
from tests.support.settings import settings_of
from tpsample import SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.backends.triton_.tile_table import Tile
from tpsample.core import word
from tpsample.exchange.base import Exchange


@dataclass
class Compared(Tally):
    """Rows beside the definition.

    Attributes:
        error, of_bound: the largest error of a score, and that in parts of `near_tie`.
    """

    error: float = 0.0
    of_bound: float = 0.0

    def __iadd__(self, other: Tally) -> Compared:
        super().__iadd__(other)
        if isinstance(other, Compared):
            self.error = max(self.error, other.error)
            self.of_bound = max(self.of_bound, other.of_bound)
        return self


def plain_step(
    seed: int,
    *,
    tile: Tile | None = None,
    dtype: torch.dtype | None = None,
    screened: bool = False,
    stores: bool = False,
) -> Compared:
    """Take a step that depends on the seed alone, and compare every row.

    Args:
        tile, dtype: in place of the tile of the table, and of a random dtype.
        screened: whether the screen goes first.
        stores: whether the logits are stored, too, and compared.
    """
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = pick.choice([1, 3, 16, 17, 40, 64, 100]) if tile is None else tile.block_b - 1
    rows = min(rows, 64) if screened else rows
    v, d = pick.randint(1, 2500), pick.choice([40, 256, 256, 1000])
    if tile is not None:  # more than one tile, and more than its stages
        v, d = tile.block_v + 37, tile.block_d * (tile.num_stages + 1) + 8
    dtype = dtype or pick.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    before = pick.choice([0, 0, 0, 1, 8])
    wide = torch.randn(v, d + before, generator=generator).to(dtype)
    weight = wide[:, before:] if before else wide
    hidden = (torch.randn(rows, d, generator=generator) * pick.choice([0.1, 0.3])).to(dtype)
    temperatures = pick.choices([0.0, 0.5, 1.0, 1.0, 2.0], k=rows)
    its = {"logprobs": 1} if stores else {}
    params = [SamplingParams(temperature=t, seed=pick.getrandbits(64), **its) for t in temperatures]
    positions = torch.tensor([pick.getrandbits(40) for _ in range(rows)])
    batch = SamplingBatch.from_params(params, vocab_size=v)
    cuts = sorted(pick.randint(0, v) for _ in range(pick.choice([0, 0, 1, 2])))
    words = []
    for start, stop in itertools.pairwise([0, *cuts, v]):
        if start < stop:
            options = {"max_rows": rows, "screening": "int8" if screened else None}
            settings = settings_of(weight[start:stop], VocabShard(start, stop), **options)
            exchange, local = Exchange(settings), TritonBackend(settings)
            local.tile = tile
            step = local.prepare(hidden, batch._view_of(rows), positions, 1)
            (own,) = exchange.begin(rows)
            local.best_words(step, own)
            words.append(own.clone())
            if stores:
                right = reference.logits(hidden, weight[start:stop])
                torch.testing.assert_close(step.logits, right, rtol=1e-4, atol=1e-3)
    tokens, score = word.token_of(best := torch.stack(words).amax(0)), word.value_of(best)
    logits = reference.logits(hidden, weight)
    scores = reference.scores(logits, batch, positions)
    near = reference.near_tie(logits, batch.temperature, d)
    known = (tokens >= 0) & (tokens < v)
    high, own = scores.amax(1), scores.gather(1, tokens.clamp(0, v - 1)[:, None])[:, 0]
    differ, error = tokens != scores.argmax(1), (score - own).abs()
    wrong = int((differ & ~(known & (high - own < near)) | ~(error < near)).sum())
    notes = [f"seed {seed}, {tile}, {dtype}: {wrong} of {rows} rows"] if wrong else []
    near_ties = int((differ & known & (high - own < near)).sum())
    return Compared(rows, wrong, near_ties, notes, float(error.max()), float((error / near).max()))
