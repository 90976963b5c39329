"""Native functions that only kernels call, beside what they need of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.screening import Problem, backends
from tpsample import SamplingBatch, VocabShard
from tpsample.native import products
from tpsample.native.compiling import jit
from tpsample.native.head import largest_bias, slack_terms
from tpsample.native.lm_head import Weight, approximate_logits
from tpsample.native.noise import BLOCK, exact_noise, upper_scores
from tpsample.native.numbers import F32, F64, U32
from tpsample.screening.bound import NOISE_MAGNITUDE


@jit(entry=True)
def noise_of(first_id, stream, rounds, out):  # type: ignore[no-untyped-def]
    """Find the exact noise of neighbouring ids."""
    for i in range(len(out)):
        out[i] = exact_noise(first_id + i, stream, rounds)


@jit(entry=True)
def bounded(weight, copy, rows, head, product, error, bounds, terms, upper):  # type: ignore[no-untyped-def]
    """Find what `draw` finds of blocks of 64 ids.

    Args:
        product, error: fp32 [R, V], out; bounds: float64 [blocks, R, 2], out.
        terms: float64 [blocks, R, 3], out: gain and extra of the scores, and if they are proved.
        upper: fp32 [R, V], out: bounds of the scores of the first sample.
    """
    num_rows = len(rows.index)
    products_ = np.empty((len(rows.hidden), BLOCK), F32)
    errors = np.empty((num_rows, BLOCK), F32)
    tile, squares = np.empty((BLOCK + 1, products.COLUMNS), F32), np.empty(BLOCK, F32)
    logits, scores = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    words = np.empty((4, BLOCK // 4), U32)
    for block in range(len(bounds)):
        local = block * BLOCK
        count = min(BLOCK, product.shape[1] - local)
        arguments = rows, products_, errors, bounds[block]
        most_bias = largest_bias(local, count, head)
        if len(copy.hidden):
            products.int8_products(copy, local, count, 0, *arguments)
        else:
            products.fp32_products(weight, local, count, 0, rows, tile, squares, *arguments[1:])
        for i in range(num_rows):
            noise = NOISE_MAGNITUDE * F64(rows.random[i])
            gain, extra, proved = slack_terms(
                bounds[block, i, 0], bounds[block, i, 1], i, local, count, head, most_bias,
                F64(rows.scale[i]), noise,
            )  # fmt: skip
            terms[block, i, 0], terms[block, i, 1], terms[block, i, 2] = gain, extra, proved
            approximate_logits(products_[i], 0, count, local, i, local, head, logits)
            upper_scores(
                logits, errors[i], gain, extra, rows.scale[i], rows.random[i], rows.streams[0, i],
                local // 4, rows.rounds, words, scores,
            )  # fmt: skip
            for j in range(count):
                product[i, local + j], error[i, local + j] = products_[i, j], errors[i, j]
                upper[i, local + j] = scores[j]


class Bounds:
    """The bounds that native kernels find of a step before they compute anything exactly.

    Attributes:
        definition: the backend that has the exact scores of the same step.
        product, error, upper: fp32 [B, V]; worst, magnitude: float64 [blocks, B].
        terms: float64 [blocks, B, 3].
    """

    def __init__(self, case: Problem, batch: SamplingBatch, which: str) -> None:
        b, v = len(case.hidden_states), len(case.weight)
        self.definition, native = backends(case, VocabShard(0, v), which)
        self.step = native.prepare(case.hidden_states, batch.view(b), torch.arange(b), 1)
        rows = native._rows(self.step, np.arange(b), 1, hidden_states=case.hidden_states)
        self.product, self.error, self.upper = torch.zeros(3, b, v)
        blocks = -(-v // BLOCK)
        bounds = torch.zeros(blocks, b, 2, dtype=torch.float64)
        self.worst, self.magnitude = bounds.unbind(dim=2)
        self.terms = torch.zeros(blocks, b, 3, dtype=torch.float64)
        found: Any = (self.product, self.error, bounds, self.terms, self.upper)
        bounded(
            Weight(*native._weights(), 0, 0, v),
            native._copy_of(rows),
            rows,
            native._head_of(self.step.controls, given=False),
            *(each.numpy() for each in found),
        )
