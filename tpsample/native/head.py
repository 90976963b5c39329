"""From products to logits, and how far an approximate logit lies from the definition's.

Twins: `tpsample.core.score.head_logits`, `tpsample.request.controls.apply.StepControls` and, for
the bound, `tpsample.screening.bound`, which holds the proof.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.core.score import TANH_SMALL
from tpsample.native.compiling import jit
from tpsample.native.numbers import F32, F64, I32
from tpsample.native.power import power_of_2
from tpsample.request.params import MAX_LOGIT_BIAS
from tpsample.screening.bound import LARGEST, TINY, UNIT

LOG2_E = math.log2(math.e)


class Head(NamedTuple):
    """How a product becomes a logit, and the request controls of the rows.

    Arrays that do not apply have a first axis of length 0.

    Attributes:
        logit_scale: fp32, 1 without.
        logit_softcap: fp32, 0 without.
        bias: fp32 [V_local].
        first_column: the column of the controls' state that is the shard's first id.
        slots: int64 [B], of the controls' tables; B is the whole batch.
        mask: int32 [B, width / 32].
        token_bias: fp32 [slots, width].
        history: int32 [slots, width].
        penalties: fp32 [slots, 3].
        drafts: int32 [B, K]; num_drafts: int32 [B].
    """

    logit_scale: np.float32
    logit_softcap: np.float32
    bias: np.ndarray
    first_column: int
    slots: np.ndarray
    mask: np.ndarray
    token_bias: np.ndarray
    history: np.ndarray
    penalties: np.ndarray
    drafts: np.ndarray
    num_drafts: np.ndarray


@jit()
def tanh(x):  # type: ignore[no-untyped-def]
    """Return tanh of float64 x by the steps of `tpsample.core.score.tanh`."""
    size = abs(x)
    power = power_of_2(min(size, 64.0) * (2.0 * LOG2_E))
    large = 1.0 - 2.0 / (power + 1.0)
    square = size * size
    small = size * (1.0 - square / 3.0 + square * square * (2.0 / 15.0))
    found = small if size < TANH_SMALL else large
    return -found if x < 0.0 else found


@jit()
def is_plain(head):  # type: ignore[no-untyped-def]
    """Return whether a logit is the product itself."""
    changed = head.logit_scale != F32(1) or head.logit_softcap != F32(0)
    return not changed and len(head.bias) == 0 and len(head.slots) == 0


@jit()
def raw_logits(products, lane, count, column, head, out):  # type: ignore[no-untyped-def]
    """Make fp32 logits of fp32 products, before the controls, at `count` places from `lane` on.

    Args:
        column: of the shard, of the first place.
    """
    last = lane + count
    for j in range(lane, last):
        out[j] = products[j]
    if head.logit_scale != F32(1):
        for j in range(lane, last):
            out[j] = out[j] * head.logit_scale
    if head.logit_softcap != F32(0):
        for j in range(lane, last):
            ratio = F64(out[j] / head.logit_softcap)
            capped = F32(tanh(ratio)) * head.logit_softcap
            out[j] = F32(np.nan) if ratio != ratio else capped
    if len(head.bias):
        for i in range(count):
            out[lane + i] = out[lane + i] + head.bias[column + i]


@jit()
def control(values, lane, count, row, column, token_id, head):  # type: ignore[no-untyped-def]
    """Apply masks, bias and penalties of a row to logits, in place.

    Args:
        column, token_id: of the shard and of the vocabulary, of the first place.
    """
    if len(head.slots) == 0:
        return
    place, slot = column + head.first_column, head.slots[row]
    if len(head.mask):
        for i in range(count):
            allowed = (head.mask[row, (place + i) >> 5] >> I32((place + i) & 31)) & I32(1)
            values[lane + i] = values[lane + i] if allowed else F32(-np.inf)
    if len(head.token_bias):
        bias = head.token_bias[slot, place : place + count]
        for i in range(count):
            values[lane + i] = values[lane + i] + bias[i]
    if len(head.history):
        history = head.history[slot, place : place + count].copy()
        if len(head.drafts):
            for k in range(head.num_drafts[row]):
                i = head.drafts[row, k] - token_id
                if 0 <= i < count:
                    history[i] += I32(2)
        repetition, frequency, presence = head.penalties[slot]
        for i in range(count):
            logit = values[lane + i]
            scaled = logit / repetition if logit > F32(0) else logit * repetition
            logit = scaled if history[i] != 0 else logit
            occurred = history[i] >> 1
            logit = logit - frequency * F32(occurred)
            values[lane + i] = logit - presence * F32(1 if occurred > 0 else 0)


@jit()
def largest_bias(column, count, head):  # type: ignore[no-untyped-def]
    """Return the largest absolute bias of some columns, without those that forbid an id."""
    most = 0.0
    if len(head.bias):
        for i in range(column, column + count):
            size = abs(F64(head.bias[i])) if head.bias[i] != F32(-np.inf) else 0.0
            most = size if size > most or size != size else most
    return most


@jit()
def chain(magnitude, row, first, count, head, most_bias):  # type: ignore[no-untyped-def]
    """Take a bound through every step from a product to a logit, as `tpsample.screening.bound`.

    Args:
        magnitude: float64, a bound on the absolute value of the products of both ways.
        first, count: columns of the shard.
        most_bias: what `largest_bias` returns of them.

    Returns:
        gain and extra, so that two logits differ by at most gain · (error of the product) + extra,
        a bound on the logits' absolute values, and the largest such bound on the way.
    """
    gain, extra, largest = 1.0, 0.0, magnitude
    if head.logit_scale != F32(1):
        factor = abs(F64(head.logit_scale))
        gain, magnitude = gain * factor, magnitude * factor
        extra = extra * factor + 2.0 * (2.0 * UNIT * magnitude + TINY)
        largest = max(largest, magnitude)
    if head.logit_softcap != F32(0):
        magnitude = min(magnitude, abs(F64(head.logit_softcap)) * (1.0 + UNIT))
        extra += 6.0 * (2.0 * UNIT * magnitude + TINY)
    if len(head.bias):
        magnitude += most_bias
        extra += 2.0 * (2.0 * UNIT * magnitude + TINY)
        largest = largest if magnitude < largest else magnitude
    if len(head.token_bias):
        magnitude += MAX_LOGIT_BIAS
        extra += 2.0 * (2.0 * UNIT * magnitude + TINY)
        largest = max(largest, magnitude)
    if len(head.history):
        slot = head.slots[row]
        repetition = F64(head.penalties[slot, 0])
        factor = max(repetition, 1.0 / repetition)
        gain, magnitude = gain * factor, magnitude * factor
        extra = extra * factor + 2.0 * (2.0 * UNIT * magnitude + TINY)
        largest = max(largest, magnitude)
        occurred = 0
        for place in range(first + head.first_column, first + count + head.first_column):
            occurred = max(occurred, head.history[slot, place] >> 1)
        if len(head.drafts):
            occurred += head.drafts.shape[1]
        magnitude += abs(F64(head.penalties[slot, 1])) * occurred
        extra += 4.0 * (2.0 * UNIT * magnitude + TINY)
        magnitude += abs(F64(head.penalties[slot, 2]))
        extra += 2.0 * (2.0 * UNIT * magnitude + TINY)
        largest = max(largest, magnitude)
    return gain, extra, magnitude, largest


@jit()
def slack_terms(  # type: ignore[no-untyped-def]
    worst, product_magnitude, row, first, count, head, most_bias, scale, noise
):
    """Return a and b with |score − approximate score| <= a · error + b, fp32, and if it is proved.

    Args:
        worst: float64, the largest error of the products.
        product_magnitude: as `chain` takes it.
        first, count, most_bias: as `chain` takes them.
        scale: float64, what multiplies the logits; 1 for logits.
        noise: float64, a bound on what is added to them; 0 for logits.
    """
    if not product_magnitude <= LARGEST:
        return F32(0), F32(0), False
    gain, extra, magnitude, largest = chain(product_magnitude, row, first, count, head, most_bias)
    factor = gain * scale
    extra = extra * scale + 16.0 * UNIT * (magnitude * scale + noise)
    widest = factor * worst + extra
    # A NaN compares as False, so what is not a number is not proved.
    proved = largest * max(scale, 1.0) <= LARGEST and widest <= LARGEST
    upward = 1.0 + 8.0 * UNIT
    return F32(factor * upward), F32(extra * upward + TINY), proved
