"""The ids that can still win: an 8-bit product with a proven bound, before the exact one.

    rows      hidden states -> two int8 limbs, their norms; the rows' streams and scales
    screen    int8 product ± bound -> logits, scores: both ends of an interval -> per group of ids
              the highest upper end, per row the highest lower end
    list      groups whose upper end reaches the lower end of any row

`lm_head` then computes the ids of the listed groups. The true best score is not
below any lower end, so the winner, and every tie with it, is in a listed group: the words are those
of the whole vocabulary. The list has room for every group, so it cannot overflow.

The bound is on the product alone. Every later step, from the scale of the head to the noise, is
non-decreasing in the logit, also as it is rounded. So the ends of the interval go through the very
same operations as the logit itself. A NaN is taken for a candidate.

Proof and plain twin: `tpsample.backends.screening`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS, Constant
from tpsample.backends.triton_.kernels.controls import Controls, control_tile
from tpsample.backends.triton_.kernels.head import (
    GROUP,
    HeadArguments,
    Scoring,
    Shard,
    TileIds,
    gained_noise,
    head_tile,
    quads,
    token_ids,
    weight_rows,
)
from tpsample.backends.triton_.kernels.limbs import TINY, limb_product
from tpsample.backends.triton_.kernels.noise import NoiseRows, fma
from tpsample.backends.triton_.kernels.overlap import (
    let_next_launch_start,
    prefetch_rows,
    wait_for_previous_launch,
)

LARGEST = Constant(1e37)
"""Of an approximate product whose bound is still a number."""
SOFTCAP_SLACK = Constant(2.0**-18)
"""Relative to the cap: more than the errors of two soft-caps, whose exp need not be monotone."""


class Bounds(NamedTuple):
    """The numbers of `screening_rows_kernel` for each row, and of the 8-bit copy for each id."""

    unit_ptr: tl.tensor
    norm_ptr: tl.tensor
    error_ptr: tl.tensor
    copy_unit_ptr: tl.tensor
    residual_ptr: tl.tensor
    weight_norm_ptr: tl.tensor


class ScoreEnds(NamedTuple):
    """The highest upper end of each group and the highest lower end, by sample and row."""

    upper_ptr: tl.tensor
    stride: tl.tensor
    row_lower_ptr: tl.tensor


@triton.jit
def product_interval(product, row_v, offs_b, is_row, bounds):
    """Return lower and upper ends of the exact products of BLOCK_V ids and some rows."""
    unit = tl.load(bounds.unit_ptr + offs_b, mask=is_row, other=1.0)
    norm = tl.load(bounds.norm_ptr + offs_b, mask=is_row, other=0.0)
    error = tl.load(bounds.error_ptr + offs_b, mask=is_row, other=0.0)
    approximate = product * tl.load(bounds.copy_unit_ptr + row_v)[:, None] * unit[None, :]
    bound = tl.load(bounds.residual_ptr + row_v)[:, None] * norm[None, :]
    bound += tl.load(bounds.weight_norm_ptr + row_v)[:, None] * error[None, :]
    bound = tl.where(tl.abs(approximate) < LARGEST, bound + TINY, float("inf"))
    return approximate - bound, approximate + bound


@triton.jit
def head_interval(lower, upper, offs_v, shard, head):
    """Return both ends of the logits, from those of the products."""
    lower, upper = head_tile(lower, offs_v, shard, head), head_tile(upper, offs_v, shard, head)
    if head.softcap is not None:
        lower -= head.softcap * SOFTCAP_SLACK + tl.abs(lower) * 2.0**-22
        upper += head.softcap * SOFTCAP_SLACK + tl.abs(upper) * 2.0**-22
    return lower, upper


@triton.jit
def store_intervals(product, scoring, bounds, ends, first_row, BLOCK_E: tl.constexpr):
    """Turn limb products [BLOCK_V, BLOCK_B] into upper ends of groups and lower ends of rows.

    It takes BLOCK_E rows at a time, as `backends.triton_.kernels.head.store_candidates` does.
    """
    ids, rows, shard = scoring.ids, scoring.rows, scoring.shard
    BLOCK_V: tl.constexpr = product.shape[0]
    BLOCK_B: tl.constexpr = product.shape[1]
    if BLOCK_B > BLOCK_E:
        HALF: tl.constexpr = BLOCK_B // 2
        left, right = product.reshape((BLOCK_V, 2, HALF)).permute((0, 2, 1)).split()
        store_intervals(left, scoring, bounds, ends, first_row, BLOCK_E)
        if first_row + HALF < rows.num_rows:
            store_intervals(right, scoring, bounds, ends, first_row + HALF, BLOCK_E)
    else:
        GROUPS: tl.constexpr = BLOCK_V // GROUP
        offs_v = token_ids(ids, shard.stop, BLOCK_V)
        offs_b = first_row + tl.arange(0, BLOCK_B)
        is_row = offs_b < rows.num_rows
        row_v = weight_rows(offs_v, shard)
        lower, upper = product_interval(product, row_v, offs_b, is_row, bounds)
        lower, upper = head_interval(lower, upper, offs_v, shard, scoring.head)
        if scoring.controls.slot_ptr is not None:
            lower = control_tile(lower, scoring, offs_v, offs_b)
            upper = control_tile(upper, scoring, offs_v, offs_b)
        in_shard = ((offs_v >= shard.start) & (offs_v < shard.stop))[:, None]
        lower = tl.where(in_shard & (lower == lower), lower, float("-inf"))
        upper = tl.where(upper == upper, upper, float("inf"))
        upper = tl.where(in_shard, upper, float("-inf"))

        scale = tl.load(rows.scale_ptr + offs_b, mask=is_row, other=1.0)
        group = (ids.first - shard.start // 4 * 4) // GROUP + tl.arange(0, GROUPS)
        for sample in range(1 if rows.num_samples is None else rows.num_samples):
            offs_slot = sample * rows.num_rows + offs_b
            noise = gained_noise(quads(ids, shard.stop, BLOCK_V // 4), rows, offs_slot)
            row_lower = tl.max(fma(lower, scale[None, :], noise), axis=0)
            tl.atomic_max(
                ends.row_lower_ptr + offs_slot, row_lower, mask=is_row, sem="relaxed", scope="gpu"
            )
            scores = fma(upper, scale[None, :], noise)
            group_upper = tl.max(scores.reshape((GROUPS, GROUP, BLOCK_B)), axis=1)
            place = group.to(tl.int64)[:, None] * ends.stride + offs_slot[None, :]
            tl.store(ends.upper_ptr + place, group_upper, mask=is_row[None, :])


@triton.jit(
    do_not_specialize=[*STEP_NUMBERS, "vocab_start", "vocab_stop"],
)
def screen_kernel(
    # inputs: the rows' limbs, see `screening_rows_kernel`
    limb_ptr,
    stride_limb_half,
    stride_limb_b,
    unit_ptr,
    norm_ptr,
    error_ptr,
    # the 8-bit copy of the shard
    copy_ptr,  # [V_local, PADDED_SIZE] int8, zero behind the hidden size
    stride_copy_v,
    copy_unit_ptr,  # [V_local] fp32, the weight of one step of the copy
    residual_ptr,  # [V_local] fp32, ‖w - ŵ‖ rounded up
    weight_norm_ptr,  # [V_local] fp32, ‖w‖ rounded up
    # shard and sizes
    vocab_start,
    vocab_stop,
    num_rows,
    num_samples,
    # the rows' streams and scales
    stream_ptr,
    stride_stream,
    scale_ptr,
    # request controls of the rows, see `Controls`
    state_slot_ptr,
    wants_ptr,
    penalty_ptr,
    touched_ptr,
    history_ptr,
    token_bias_ptr,
    mask_ptr,
    draft_ptr,
    num_drafts_ptr,
    state_width,
    max_drafts,
    # head
    logit_scale,
    logit_softcap,
    bias_ptr,
    # outputs
    upper_ptr,  # [groups, …] fp32, by sample and row
    stride_upper,
    row_lower_ptr,  # [num_samples · num_rows] fp32, raised
    # blocks
    PADDED_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,  # all rows
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # rows of the epilogue at a time
    OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Bound every score of BLOCK_V ids from both sides; store upper ends, raise lower ends."""
    rows = NoiseRows(num_rows, num_samples, stream_ptr, stride_stream, scale_ptr)
    shard = Shard(vocab_start, vocab_stop)
    head = HeadArguments(logit_scale, logit_softcap, bias_ptr)
    controls = Controls(
        state_slot_ptr, wants_ptr, penalty_ptr, touched_ptr, history_ptr, token_bias_ptr,
        mask_ptr, draft_ptr, num_drafts_ptr, state_width, max_drafts,
    )  # fmt: skip
    ids = TileIds(vocab_start // 4 * 4 + tl.program_id(0) * BLOCK_V, None, None)
    offs_v = token_ids(ids, vocab_stop, BLOCK_V)
    row_v = weight_rows(offs_v, shard)
    # The copy does not depend on the launch before, so its first bytes travel while that ends.
    if PREFETCH > 0:
        prefetch_rows(copy_ptr + row_v.to(tl.int64) * stride_copy_v, PREFETCH)
    if OVERLAP:
        wait_for_previous_launch()
    product = limb_product(
        limb_ptr, stride_limb_half, stride_limb_b, copy_ptr, stride_copy_v, row_v, num_rows,
        PADDED_SIZE, BLOCK_B, BLOCK_D,
    )  # fmt: skip
    if OVERLAP:
        let_next_launch_start()

    bounds = Bounds(unit_ptr, norm_ptr, error_ptr, copy_unit_ptr, residual_ptr, weight_norm_ptr)
    ends = ScoreEnds(upper_ptr, stride_upper, row_lower_ptr)
    scoring = Scoring(ids, rows, shard, head, controls)
    store_intervals(product, scoring, bounds, ends, 0, BLOCK_E)


@triton.jit(do_not_specialize=STEP_NUMBERS)
def list_groups_kernel(
    # inputs
    upper_ptr,  # [groups, …] fp32
    stride_upper,
    row_lower_ptr,  # [num_slots] fp32
    # sizes
    groups,  # of the shard
    num_slots,  # num_samples · num_rows
    first_id,  # of the first group
    # outputs
    listed_ptr,  # [≥ groups] int32, first ids of the groups that can win, in any order
    num_listed_ptr,  # [1] int32, raised
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """List the groups in which some row may have its winner."""
    if OVERLAP:
        wait_for_previous_launch()
        let_next_launch_start()
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_s = tl.arange(0, BLOCK_S)
    row_lower = tl.load(row_lower_ptr + offs_s, mask=offs_s < num_slots, other=float("inf"))
    place = upper_ptr + group.to(tl.int64)[:, None] * stride_upper + offs_s[None, :]
    there = (group < groups)[:, None] & (offs_s < num_slots)[None, :]
    upper = tl.load(place, mask=there, other=float("-inf"))
    # Where all ids are masked the lower end is -inf, and nothing is above it.
    can_win = tl.max(((upper >= row_lower[None, :]) & (upper > float("-inf"))).to(tl.int32), axis=1)
    number = tl.sum(can_win, axis=0)
    first = tl.atomic_add(num_listed_ptr, number, sem="relaxed", scope="gpu")
    entry = listed_ptr + first + tl.cumsum(can_win, axis=0) - 1
    tl.store(entry, first_id + group * GROUP, mask=can_win != 0)
