"""Native functions that only kernels call, beside what they need of a step."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.screening import Problem, backends
from tpsample import SamplingBatch, VocabShard
from tpsample.backends.numba_.kernels import first_logits, inputs, int8, products
from tpsample.backends.numba_.kernels.byte_dots import HAS_VNNI, dots_of_row, dots_of_rows
from tpsample.backends.numba_.kernels.compiling import F32, I32, jit
from tpsample.backends.numba_.kernels.head import end_logits
from tpsample.backends.numba_.kernels.inputs import block_at, blocks_of, take_rows, weight_of
from tpsample.backends.numba_.kernels.noise import (
    draws_of,
    exact_noise,
    noise_of,
    stream_of,
    upper_scores,
)
from tpsample.backends.numba_.kernels.tile_dots import TILE, tile_dots
from tpsample.backends.numba_.kernels.vectors import PADDING, ROWS
from tpsample.backends.numba_.launch import copy_of
from tpsample.backends.screening.int8_copy import BLOCK, GROUP


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


@jit()
def first_product(copy, quantised, found, block, i, j):
    """Return what was multiplied of a lane of a block, before its error is added."""
    if copy is None:
        return found.values[i, j]
    scale = copy.scale[block.base - copy.base + j]
    whole = I32(quantised.sums[i, j] - quantised.surplus[i])
    return F32(whole) * (quantised.factors[i, 0] * scale)


@jit(entry=True)
def bounded(weight, copy, hidden, index, draws, head, product, error, end, upper):
    """Find what `draw` finds of blocks of 64 ids.

    Args:
        product, error, end: fp32 [R, V], out: products, how far those of fp32 are off at most, and
            upper ends.
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
            int8.first_ends(copy, quantised, block, found, i, logits)
            for j in range(block.count):
                v = block.local + j
                product[i, v] = first_product(copy, quantised, found, block, i, block.lane + j)
                error[i, v], end[i, v] = found.errors[i], logits[block.lane + j]
            end_logits(logits, block, index[i], head, 1)
            upper_scores(logits, block, stream_of(noise, i, 0), scores)
            for j in range(block.count):
                upper[i, block.local + j] = scores[block.lane + j]


class Bounds:
    """The bounds that native kernels find of a step before they compute anything exactly.

    Attributes:
        definition: the backend that has the exact scores of the same step.
        product, end, upper: fp32 [B, V].
        error: fp32 [B, V], of the pass in fp32.
    """

    def __init__(self, case: Problem, batch: SamplingBatch, which: str) -> None:
        b, v = len(case.hidden_states), len(case.weight)
        self.definition, native = backends(case, VocabShard(0, v), which)
        self.step = native.prepare(case.hidden_states, batch._view_of(b), torch.arange(b), 1)
        self.product, self.error, self.end, self.upper = found = torch.zeros(4, b, v)
        bounded(
            weight_of(case.weight, 0, 0, v),
            None if native.copy is None else copy_of(native.copy, 0),
            case.hidden_states.float().numpy(),
            np.arange(b),
            draws_of(self.step.noise),
            native._head_of(self.step.controls, given=False),
            *(each.numpy() for each in found),
        )


@jit(entry=True)
def byte_products(numbers, low, high, places, out):
    """Multiply the second block of two by five rows."""
    dots_of_rows(numbers, len(numbers) // 2, low, high, places, 1, out)
    dots_of_row(numbers, len(numbers) // 2, low, high, places, 0, out)


def multiply_bytes() -> bool:
    """Hold products of bytes against NumPy's, and return whether this processor has them."""

    pick = np.random.default_rng(0)
    block = pick.integers(0, 256, (7, BLOCK, GROUP))
    low, high = (pick.integers(-128, 128, (5, columns)) for columns in (7 * GROUP, 2 * GROUP))
    places, out = np.array([5, 2]), np.zeros((5, BLOCK), np.int32)
    whole = low.copy().reshape(5, 7, GROUP)
    whole[:, places] += 256 * high.reshape(5, 2, GROUP)
    numbers = np.concatenate([block * 0 + 7, block]).astype(np.uint8).ravel()
    byte_products(numbers, low.astype(np.int8), high.astype(np.int8), places, out)
    assert (out == np.einsum("glc,rgc->rl", block, whole)).all()
    return HAS_VNNI


@jit(entry=True)
def tile_products(bf16, numbers, stride, out):
    """Multiply the second block of two by all rows but the first ROWS, in tiles."""
    tiles = inputs.tiles_of(bf16)
    for tile in range(len(tiles)):
        begin, columns = BLOCK * stride, bf16.shape[1] // PADDING
        for first in range(columns):  # in parts, which the caller adds
            place, column = (tile * columns + first) * TILE * TILE, begin + first * PADDING
            tile_dots(tiles, place, 0, numbers, column, 0, stride, 1, 1, out[tile, first])
    return len(tiles)


def multiply_tiles() -> bool:
    """Hold products of tiles against NumPy's, and return whether this process has them."""
    pick = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randint(-128, 129, shape, generator=pick).bfloat16()
        for shape in ((24, 3 * PADDING), (2 * BLOCK, 3 * PADDING + 7))
    )
    bits = [each.view(torch.int16).numpy().view(np.uint16) for each in (rows, weight)]
    out = np.zeros((2, 3, BLOCK, TILE), np.float32)
    count = tile_products(bits[0], bits[1].ravel(), weight.shape[1], out)
    if not count:
        return False
    whole = weight[BLOCK:, : 3 * PADDING].float() @ rows[ROWS:].float().T
    found = out.sum(1).transpose(1, 0, 2).reshape(BLOCK, -1)
    assert count == 2 and (found[:, :20] == whole.numpy()).all() and not found[:, 20:].any()
    return True
