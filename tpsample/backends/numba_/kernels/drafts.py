"""Draws of a drafter from its logits. Twin: `tpsample.backends.torch_.drafts`."""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, I64, U64, jit
from tpsample.backends.numba_.kernels.inputs import BLOCK, aligned_block, lanes_of
from tpsample.backends.numba_.kernels.noise import exact_score, stream_at, upper_scores
from tpsample.backends.numba_.kernels.numbers import lanes_reaching, lowest_lane, pack, value_of
from tpsample.backends.numba_.kernels.primitives import larger


@jit(in_parts=True, allocates=True)
def draft_words(start, stop, part, arguments):
    """Find the best score word of some rows.

    Args:
        logits: fp32 [B, V_local].
        first_id: global id of the first column.
        rows: temperature fp32, seed and position int64, [B] each.
        sample, domain: words of the counter of the rows' streams.
        out: int64 [B], zeros.
    """
    logits, first_id, rows, sample, domain, out = arguments
    temperature, seed, position = rows
    num_ids, first = logits.shape[1], first_id & 3
    inside, upper = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    for row in range(start, stop):
        stream = stream_at(temperature[row], seed[row], position[row], sample, domain)
        best = I64(0)
        for column in range(-first, num_ids, BLOCK):
            block = aligned_block(first_id, column, num_ids)
            piece = logits[row, block.local : block.local + block.count]
            for j in range(block.count):
                inside[block.lane + j] = piece[j]
            upper_scores(inside, block, stream, upper)
            lanes = lanes_reaching(upper, value_of(best), lanes_of(block))
            while lanes:
                j = lowest_lane(lanes)
                lanes &= lanes - U64(1)
                if upper[j] < value_of(best):
                    continue
                token_id = block.base + j
                best = larger(best, pack(exact_score(inside[j], token_id, stream), token_id))
        out[row] = best
