"""From products to logits. Twins: `tpsample.core.score.head_logits` and `StepControls`.

Every step from a product to a logit is monotone, and so is rounding to fp32. Therefore what is not
below a product becomes, by the same steps, what is not below its logit.

    product_v <= end_v    =>    logit_v <= steps(end_v)

The one exception is tanh, whose float64 steps are monotone but for 2^-44 of the result. So its end
is raised by more than that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, jit
from tpsample.backends.numba_.kernels.inputs import BLOCK, Block
from tpsample.backends.numba_.kernels.numbers import exact_product, power_of_2
from tpsample.backends.numba_.kernels.primitives import bits_as, larger, smaller
from tpsample.core.score import TANH_SMALL
from tpsample.core.touched import HAS_BIAS, HAS_HISTORY, TOUCHED_BLOCK

LOG2_E = math.log2(math.e)
ALL_ALLOWED = I32(-1)
"""A word of a mask that forbids none of its 32 ids."""


class NativeHead(NamedTuple):
    """How a product becomes a logit, and the request controls of the rows.

    Arrays that do not apply have a first axis of length 0.

    Attributes:
        logit_scale: fp32, 1 without.
        logit_softcap: fp32, 0 without.
        bias: fp32 [V_local].
        first_column: the column of the controls' state that is the shard's first id.
        slots: int64 [B], of the controls' tables; B is the whole batch.
        wants: int32 [slots], 0 where a request has neither penalties nor biases.
        mask: int32 [B, width / 32].
        token_bias: fp32 [slots, width].
        history: int32 [slots, width].
        touched: int32 [slots, width / TOUCHED_BLOCK], the bits of `TokenState.touched`.
        penalties: fp32 [slots, 3].
        drafts: int32 [B, K]; num_drafts: int32 [B].
    """

    logit_scale: np.float32 = np.float32(1)
    logit_softcap: np.float32 = np.float32(0)
    bias: np.ndarray = np.empty(0, F32)
    first_column: int = 0
    slots: np.ndarray = np.empty(0, I64)
    wants: np.ndarray = np.empty(0, I32)
    mask: np.ndarray = np.empty((0, 1), I32)
    token_bias: np.ndarray = np.empty((0, 1), F32)
    history: np.ndarray = np.empty((0, 1), I32)
    touched: np.ndarray = np.empty((0, 1), I32)
    penalties: np.ndarray = np.empty((0, 3), F32)
    drafts: np.ndarray = np.empty((0, 1), I32)
    num_drafts: np.ndarray = np.empty(0, I32)


@jit()
def tanh(x):
    """Return tanh of float64 x by the steps of `tpsample.core.score.tanh`."""
    size = abs(x)
    power = power_of_2(smaller(size, 64.0) * (2.0 * LOG2_E))
    large = 1.0 - 2.0 / (power + 1.0)
    square = size * size
    small = size * (1.0 - square / 3.0 + square * square * (2.0 / 15.0))
    magnitude = small if size < TANH_SMALL else large
    return -magnitude if x < 0.0 else magnitude


@jit()
def is_plain(head, row):
    """Return whether every logit of a row is the product.

    A batch keeps tables of controls as soon as one request needs them, for all of its rows. A call
    with a head costs as much as 64 ids; see `plain_rows`.
    """
    changed = head.logit_scale != F32(1) or head.logit_softcap != F32(0)
    if changed or len(head.bias):
        return False
    return len(head.slots) == 0 or (len(head.mask) == 0 and head.wants[head.slots[row]] == 0)


@jit(allocates=True)
def plain_rows(head, index):
    """Return bool [R], of rows int64 [R], what `is_plain` does of each."""
    plain = np.empty(len(index), np.bool_)
    for i in range(len(index)):
        plain[i] = is_plain(head, index[i])
    return plain


@jit(inline=True)
def changes_block(plain, head, row, block):
    """Return whether logits of a row may differ from its products in a block.

    Few blocks have an id with a mask, a penalty or a bias. To find it out by a call with a head
    would take a sixth of a step of 64 rows.

    Args:
        plain: bool, what `is_plain` returns of the row.
    """
    changes = head.logit_scale != F32(1) or head.logit_softcap != F32(0) or len(head.bias) > 0
    if not (plain or changes):
        slot, column = head.slots[row], block.local + head.first_column
        if len(head.mask):
            for word in range(column >> 5, ((column + block.count - 1) >> 5) + 1):
                changes = changes or head.mask[row, word] != ALL_ALLOWED
        touched = touched_by(head.touched[slot], column, block.count)
        if len(head.drafts) and head.num_drafts[row] > 0:
            touched |= I32(HAS_HISTORY)
        changes = changes or head.wants[slot] & touched != 0
    return changes and not plain


@jit(inline=True)
def touched_by(touched, column, count):
    """Return the bits of the blocks of the state in which some neighbouring columns lie, of a row.

    They may be two.
    """
    return touched[column // TOUCHED_BLOCK] | touched[(column + count - 1) // TOUCHED_BLOCK]


@jit()
def raw_logits(values, block, head, side):
    """Make the fp32 products of a block logits, before the controls, in place.

    Args:
        side: fp32, 0 for the products, 1 and -1 for what makes upper and lower ends of logits.
    """
    lanes = range(block.lane, block.lane + block.count)
    if head.logit_scale != F32(1):
        for j in lanes:
            values[j] = values[j] * head.logit_scale
    if head.logit_softcap != F32(0):
        for j in lanes:
            ratio = F64(values[j] / head.logit_softcap)
            capped = F32(tanh(ratio)) * head.logit_softcap
            capped += side * abs(head.logit_softcap) * F32(2.0**-21)
            values[j] = F32(np.nan) if ratio != ratio else capped
    if len(head.bias):
        for j in lanes:
            values[j] = values[j] + head.bias[block.local - block.lane + j]


@jit(allocates=True)
def control(values, block, row, head):
    """Apply masks, bias and penalties of a row to the logits of a block, in place."""
    if len(head.slots) == 0:
        return
    lane, count, column = block.lane, block.count, block.local + head.first_column
    slot = head.slots[row]
    if len(head.mask):
        for i in range(count):
            allowed = (head.mask[row, (column + i) >> 5] >> I32((column + i) & 31)) & I32(1)
            values[lane + i] = values[lane + i] if allowed else F32(-np.inf)
    wants = head.wants[slot]
    if wants == 0:
        return
    touched = touched_by(head.touched[slot], column, count)
    drafted = I32(HAS_HISTORY if len(head.drafts) and head.num_drafts[row] > 0 else 0)
    if wants & touched & I32(HAS_BIAS):
        bias = head.token_bias[slot, column : column + count]
        for i in range(count):
            values[lane + i] = values[lane + i] + bias[i]
    if wants & (touched | drafted) & I32(HAS_HISTORY):
        history = head.history[slot, column : column + count]
        if drafted:
            history = with_drafts(history, head.drafts[row, : head.num_drafts[row]], block)
        penalise(values[lane : lane + count], history, head.penalties[slot])


@jit(allocates=True)
def with_drafts(history, drafts, block):
    """Return the history of a block, int32 [count], after some drafted tokens."""
    history, first_id = history.copy(), block.base + block.lane
    for k in range(len(drafts)):
        if 0 <= drafts[k] - first_id < len(history):
            history[drafts[k] - first_id] += I32(2)
    return history


@jit()
def penalise(values, history, penalties):
    """Apply the penalties of a row to the logits of neighbouring ids, in place."""
    repetition, frequency, presence = penalties
    for i in range(len(values)):
        logit = values[i]
        scaled = logit / repetition if logit > F32(0) else logit * repetition
        logit = scaled if history[i] != 0 else logit
        occurred = history[i] >> 1
        logit = logit - frequency * F32(occurred)
        values[i] = logit - presence * F32(1 if occurred > 0 else 0)


@jit()
def up(value):
    """Return more than an fp32 number, by 2^-20 of it; ±inf and NaN as they are."""
    return value * F32(1.0 + 2.0**-20) if value > F32(0) else value * F32(1.0 - 2.0**-20)


@jit()
def upper_ends(products, error, out):
    """Find the upper ends of products, in all BLOCK lanes.

    Args:
        products, out: fp32 [BLOCK].
        error: how far the products are off at most.
    """
    for j in range(BLOCK):
        out[j] = up(products[j] + error)


@jit()
def lower_ends(products, error, out):
    """Find the lower ends of products; see `upper_ends`."""
    for j in range(BLOCK):
        out[j] = -up(error - products[j])


@jit()
def end_logits(values, block, row, head, side):
    """Make the ends of the products of a block ends of its logits, in place; see `raw_logits`."""
    raw_logits(values, block, head, side)
    control(values, block, row, head)


@jit()
def slack_of(upper, lower, block):
    """Return how far upper ends of a block's logits, fp32 [BLOCK], are above the logits at most.

    It is infinite if an end is not a number.
    """
    most = I32(0)
    for j in range(block.lane, block.lane + block.count):
        error_bound = F32(0) if upper[j] == F32(-np.inf) else upper[j] - lower[j]
        most = larger(most, bits_as(F32(error_bound), I32) & I32(0x7FFFFFFF))
    error_bound = up(bits_as(I32(most), F32))
    return error_bound if error_bound == error_bound else F32(np.inf)


@jit()
def exact_logits(weight, local, hidden, row, head):
    """Return the logits of one pair, before and after the controls.

    Args:
        local: of the shard.
        hidden: fp32 [D], the row's.
    """
    product = exact_product(weight.numbers, local * weight.stride, hidden)
    if is_plain(head, row):
        return product, product
    return logits_of(product, Block(weight.first_id + local, 0, 1, local), row, head)


@jit(allocates=True)
def logits_of(product, block, row, head):
    """Return the logits of the product of a block of one id; see `exact_logits`."""
    logits = np.empty(1, F32)
    logits[0] = product
    raw_logits(logits, block, head, F32(0))
    raw = logits[0]
    control(logits, block, row, head)
    return raw, logits[0]
