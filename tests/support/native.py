"""Native functions that only kernels call, beside what they need of a step."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.screening import Problem, backends
from tpsample import SamplingBatch, VocabShard
from tpsample.backends.numba_.kernels import first_logits, int8, products
from tpsample.backends.numba_.kernels.compiling import F32, jit
from tpsample.backends.numba_.kernels.head import end_logits, upper_ends
from tpsample.backends.numba_.kernels.inputs import BLOCK, block_at, blocks_of, take_rows, weight_of
from tpsample.backends.numba_.kernels.noise import (
    draws_of,
    exact_noise,
    noise_of,
    stream_of,
    upper_scores,
)
from tpsample.backends.numba_.launch import copy_of


@jit(entry=True)
def noise_of_rows(draws, index):
    """Find what the scores of some rows need."""
    return noise_of(draws, index)


@jit(entry=True)
def noise_of_ids(first_id, stream, out):
    """Find the exact noise of neighbouring ids."""
    for i in range(len(out)):
        out[i] = exact_noise(first_id + i, stream)


@jit(entry=True)
def number_near_largest(ends, count):
    """Find a number that at least `count` of some ends reach."""
    return first_logits.near_largest(ends, count, np.full(2**first_logits.KEY_BITS, 7))


@jit(entry=True)
def bounded(weight, copy, hidden, index, draws, head, product, error, upper):
    """Find what `draw` finds of blocks of 64 ids.

    Args:
        product, error: fp32 [R, V], out.
        upper: fp32 [R, V], out: upper ends of the scores of the first sample.
    """
    rows, noise = take_rows(hidden, index), noise_of(draws, index)
    quantised = int8.quantise(copy, rows, len(index))
    found = products.products_of(rows, F32)
    logits, scores = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        int8.first_products(copy, quantised, weight, block, rows, found)
        for i in range(len(index)):
            upper_ends(found.values[i], found.errors[i], logits)
            end_logits(logits, block, index[i], head, 1)
            upper_scores(logits, block, stream_of(noise, i, 0), scores)
            for j in range(block.count):
                v = block.local + j
                product[i, v], error[i, v] = found.values[i, j], found.errors[i]
                upper[i, v] = scores[j]


class Bounds:
    """The bounds that native kernels find of a step before they compute anything exactly.

    Attributes:
        definition: the backend that has the exact scores of the same step.
        product, error, upper: fp32 [B, V].
    """

    def __init__(self, case: Problem, batch: SamplingBatch, which: str) -> None:
        b, v = len(case.hidden_states), len(case.weight)
        self.definition, native = backends(case, VocabShard(0, v), which)
        self.step = native.prepare(case.hidden_states, batch._view_of(b), torch.arange(b), 1)
        self.product, self.error, self.upper = found = torch.zeros(3, b, v)
        bounded(
            weight_of(case.weight, 0, 0, v),
            None if native.copy is None else copy_of(native.copy),
            case.hidden_states.float().numpy(),
            np.arange(b),
            draws_of(self.step.noise),
            native._head_of(self.step.controls, given=False),
            *(each.numpy() for each in found),
        )
