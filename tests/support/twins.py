"""The same stored rows with the passes of each backend."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from tests.support.filtered import Rows, V, grid, kinds_of_logits
from tpsample import SamplingParams
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core import word
from tpsample.core.row_noise import RowNoise
from tpsample.filters.thresholds import thresholds_of
from tpsample.ranks.ranks import Ranks

# Ties and min_p last, which the ways of the kernels differ for.
MORE = [
    SamplingParams(top_k=40, top_p=0.6, min_p=0.3, filter_order="min_p_last", seed=1),
    SamplingParams(top_k=90, top_p=0.4, ties="keep", temperature=3.0, seed=2),
    SamplingParams(top_p=0.2, min_p=0.9, filter_order="min_p_last", ties="keep", seed=3),
]
# Whole; within one block, starting inside a group of four ids; one id; none.
SHARDS = [(0, V), (5, 777), (801, 802), (640, 640), (641, 641)]


class Twins:
    """The same rows for both, and what their filters are."""

    def __init__(
        self, first: int, last: int, num_samples: int = 1, params: Sequence[SamplingParams] = MORE
    ) -> None:
        kinds = kinds_of_logits()
        rows = Rows([kinds["normal"], kinds["two-valued"]], [*grid()[3::125], *params])
        batch = rows.batch
        logits = rows.logits[batch.plan.stored_index]
        logits[0, 17], logits[1, 90], logits[2] = math.nan, math.inf, -math.inf
        logits[3, 100:700], logits[4, :3], logits[4, 3:6] = -math.inf, -0.0, 0.0
        batch.temperature[5] = 0.0  # greedy by what was written, beside its filters
        noise = RowNoise(batch.temperature, batch.seed, rows.positions, num_samples)
        # In memory of their own. An empty shard owns none.
        own = logits[:, first:last].clone(memory_format=torch.contiguous_format)
        self.filters, self.logits = batch.plan.filters, own
        self.plain, self.triton, self.native = (
            replace(kind.of(self.logits, batch, noise, first_id=first), top=self.top)
            for kind in (ShardLogits, TritonShardLogits, NativeShardLogits)
        )
        self.kernels = self.triton, self.native
        self.thresholds = thresholds_of(self.plain, self.filters, Ranks())
        # Of a row with a NaN, or with nothing to draw, sums mean nothing.
        self.numbers = torch.arange(len(self.filters)) % len(self.filters) > 2
        self.numbers[1] = True

    @property
    def top(self) -> torch.Tensor:
        return self.logits.amax(dim=1) if self.logits.shape[1] else torch.zeros(len(self.logits))

    @property
    def cut(self) -> torch.Tensor:
        """An order word in the middle of each row."""
        return word.pack(self.logits.nanmean(dim=1).nan_to_num(), torch.tensor(self.plain.first_id))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are the same in dtype, shape and numbers."""
    return a.dtype == b.dtype and torch.equal(a, b)


def require_same(found: Any, expected: Any) -> None:
    """Compare tensors bit for bit, and the values of a tuple or an object; None in `expected` is
    not compared."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            require_same(one, other)
    elif isinstance(expected, int):
        assert found == expected
    elif expected is not None:
        for field in fields(expected):
            require_same(getattr(found, field.name), getattr(expected, field.name))
