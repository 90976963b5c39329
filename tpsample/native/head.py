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
def raw_logit(product, column, head):  # type: ignore[no-untyped-def]
    """Return the fp32 logit of an fp32 product, before the controls; `column` is of the shard."""
    logit = product
    if head.logit_scale != F32(1):
        logit = F32(logit * head.logit_scale)
    if head.logit_softcap != F32(0):
        ratio = F32(logit / head.logit_softcap)
        capped = F32(np.nan) if ratio != ratio else F32(tanh(F64(ratio)))
        logit = F32(capped * head.logit_softcap)
    if len(head.bias):
        logit = F32(logit + head.bias[column])
    return logit


@jit()
def occurrences(row, column, token_id, head):  # type: ignore[no-untyped-def]
    """Return the history of an id in a row: 2 · occurrences in the output + 1 if in the prompt."""
    history = head.history[head.slots[row], column + head.first_column]
    if len(head.drafts):
        for k in range(head.num_drafts[row]):
            if head.drafts[row, k] == token_id:
                history += I32(2)
    return history


@jit()
def controlled(logit, row, column, token_id, head):  # type: ignore[no-untyped-def]
    """Return a logit behind masks, bias and penalties of its row."""
    if len(head.slots) == 0:
        return logit
    place = column + head.first_column
    if len(head.mask) and (head.mask[row, place >> 5] >> I32(place & 31)) & I32(1) == 0:
        logit = F32(-np.inf)
    slot = head.slots[row]
    if len(head.token_bias):
        logit = F32(logit + head.token_bias[slot, place])
    if len(head.history):
        history = occurrences(row, column, token_id, head)
        if history != 0:
            repetition = head.penalties[slot, 0]
            logit = F32(logit / repetition) if logit > F32(0) else F32(logit * repetition)
        count = history >> 1
        logit = F32(logit - F32(head.penalties[slot, 1] * F32(count)))
        logit = F32(logit - F32(head.penalties[slot, 2] * F32(1 if count > 0 else 0)))
    return logit


@jit()
def chain(magnitude, row, first, count, head):  # type: ignore[no-untyped-def]
    """Take a bound through every step from a product to a logit, as `tpsample.screening.bound`.

    Args:
        magnitude: float64, a bound on the absolute value of the products of both ways.
        first, count: columns of the shard.

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
        most = 0.0
        for column in range(first, first + count):
            bias = head.bias[column]
            if bias != F32(-np.inf):
                size = abs(F64(bias))
                most = size if size > most or size != size else most
        magnitude += most
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
def slack_terms(worst, product_magnitude, row, first, count, head, scale, noise):  # type: ignore[no-untyped-def]
    """Return a and b with |score − approximate score| <= a · error + b, fp32, and if it is proved.

    Args:
        worst: float64, the largest error of the products.
        product_magnitude: as `chain` takes it.
        first, count: columns of the shard.
        scale: float64, what multiplies the logits; 1 for logits.
        noise: float64, a bound on what is added to them; 0 for logits.
    """
    if not product_magnitude <= LARGEST:
        return F32(0), F32(0), False
    gain, extra, magnitude, largest = chain(product_magnitude, row, first, count, head)
    factor = gain * scale
    extra = extra * scale + 16.0 * UNIT * (magnitude * scale + noise)
    widest = factor * worst + extra
    # A NaN compares as False, so what is not a number is not proved.
    proved = largest * max(scale, 1.0) <= LARGEST and widest <= LARGEST
    upward = 1.0 + 8.0 * UNIT
    return F32(factor * upward), F32(extra * upward + TINY), proved
