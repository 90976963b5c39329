"""The passes of a verification by ratio: largest logits, sums of masses, draws from residuals.

Twins: `tpsample.backends.torch_.verification`, and for the arithmetic `tpsample.core.residual`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.head import (
    KEY_NAN,
    TOKEN_BITS,
    TOKEN_MASK,
    pack,
)
from tpsample.backends.triton_.kernels.masses import (
    ROUNDER_BITS,
    MassRow,
    between,
    halves,
    mass_row,
    powers,
    rounded,
    sums_of,
)
from tpsample.backends.triton_.kernels.noise import INTERPRET, noise_tile, row_stream
from tpsample.backends.triton_.kernels.order import (
    KEY_INF,
    NO_ID,
    Mark,
    better,
    by_thread,
    mark_of,
    no_best,
    row_kernel,
    upto,
    word_of_best,
)
from tpsample.core import acceptance, masses, residual

DOMAIN_RECOVERY = Constant(acceptance.DOMAIN_RECOVERY)
TOP_MASS = Constant(masses.TOP_MASS)
PLAIN_SHIFT, SHARE_BITS = Constant(residual.PLAIN_SHIFT), Constant(residual.SHARE_BITS)
LOWEST, HIGHEST = Constant(float("-inf")), Constant(float("inf"))


class ShardBlocks(NamedTuple):
    """The ids of this rank, and the blocks of them that the program takes."""

    start: tl.tensor
    lead: tl.tensor  # the first block begins so many columns before the shard
    width: tl.tensor
    first: tl.tensor  # the first block of the program
    last: tl.tensor  # the block behind its last one


class Columns(NamedTuple):
    """One block of the shard."""

    columns: tl.tensor  # int32 [BLOCK]
    ids: tl.tensor  # int32 [BLOCK]
    mask: tl.tensor  # whether they are of the shard
    first_id: tl.tensor  # a multiple of 4


class Law(NamedTuple):
    """The numbers of one law at a position, made once by a program."""

    address: tl.tensor  # of the first logit of the shard
    masses: MassRow


@triton.jit
def shard_of(vocab_start, lead, width, blocks_each, BLOCK: tl.constexpr):
    """The `ShardBlocks` of this program; it takes `blocks_each` neighbouring blocks of its row."""
    first = tl.program_id(0) * blocks_each
    last = tl.minimum(first + blocks_each, tl.cdiv(lead + width, BLOCK))
    return ShardBlocks(vocab_start, lead, width, first, last)


@triton.jit
def numbered_block(shard, number, BLOCK: tl.constexpr):
    """The `Columns` of a block of the shard."""
    first_column = number * BLOCK - shard.lead
    columns = first_column + tl.arange(0, BLOCK)
    mask = (columns >= 0) & (columns < shard.width)
    return Columns(columns, shard.start + columns, mask, shard.start + first_column)


@triton.jit
def draft_address(draft_ptr, stride_draft_b, stride_draft_k, row, index):
    """Where the drafter's logits for one draft of a row begin."""
    first = row.to(tl.int64) * stride_draft_b + index.to(tl.int64) * stride_draft_k
    return draft_ptr + first


@triton.jit
def load_logits(address, block):
    """fp32 logits of a block; -inf outside the shard."""
    return tl.load(address + block.columns, mask=block.mask, other=LOWEST).to(tl.float32)


@triton.jit
def law_of(address, top_ptr, temperature_ptr, place):
    """The `Law` of logits at an address, with the numbers of a row and position."""
    return Law(address, mass_row(tl.load(top_ptr + place), tl.load(temperature_ptr + place)))


@triton.jit
def mark_with_nan(cut):
    """The `Mark` of a cut for logits in which a NaN is +inf.

    All NaNs of the twin's kept set are `upto` it, and no other token, but in a row with both a NaN
    and a +inf. A row with a NaN has no token and no draft, so that no mass of it is looked at.
    """
    mark, key = mark_of(cut), cut >> TOKEN_BITS
    own_id = (~cut & TOKEN_MASK).to(tl.int32)
    token = tl.where(key == KEY_NAN, own_id, mark.token)
    return Mark(mark.at, mark.after, tl.where((key > KEY_INF) & (key < KEY_NAN), TOKEN_MASK, token))


@triton.jit
def target_powers(logits, ids, mask, law, mark):
    """2^E of logits of the target, fp32, without a mass outside the kept set."""
    kept = mask & upto(between(logits, LOWEST, HIGHEST), ids, mark)
    power, _, _ = powers(logits, law.masses, kept)
    return power


@triton.jit
def draft_powers(logits, law):
    """2^E of logits of the drafter, fp32, without a mass where they are -inf or NaN."""
    power, _, _ = powers(logits, law.masses, logits > LOWEST)
    return power


@triton.jit
def product(a, b):
    """a · b, int64, of int32 numbers.

    Written in Triton, a factor that is one number gets its 64 bits before a loop. The product in
    the loop is then one of 64 bits, of four instructions.
    """
    if INTERPRET or is_hip():
        return a.to(tl.int64) * b.to(tl.int64)
    else:
        return tl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;",
            "=l,r,r",
            [a, b + tl.zeros((1,), tl.int32)],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )


@triton.jit
def shares(high, low, weight):
    """floor(q · weight / 2^40), int64, of masses by their halves with ROUNDER_BITS added.

    q = 2^20 h + l and weight = 2^32 a + b, -2^31 <= b < 2^31, so that every factor has 32 bits:
    floor((2^52 h a + 2^32 l a + 2^20 h b + l b) / 2^40) = 2^12 h a + floor(
    (h b + 2^12 l a + floor(l b / 2^20)) / 2^20). Twin: `tpsample.core.residual.shares`.
    """
    h, l = high - ROUNDER_BITS, low - ROUNDER_BITS  # noqa: E741
    b = weight.to(tl.int32)
    a = ((weight - b) >> 32).to(tl.int32)
    rest = product(h, b) + ((product(l, a) << 12) + (product(l, b) >> 20))
    return (product(h, a) << 12) + (rest >> 20)


@triton.jit
def recovery_scores(residuals, target, noise):
    """fp32 scores of a draw from the residual. Twin: `tpsample.core.residual`."""
    number = tl.where(residuals > 0, residuals, target).to(tl.float32)
    shift = tl.where(residuals > 0, -SHARE_BITS, PLAIN_SHIFT)
    bits = number.to(tl.int32, bitcast=True)
    exponent = (shift + (bits >> 23) - 127).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    if INTERPRET:
        return exponent + (tl.log2(mantissa.to(tl.float64)).to(tl.float32) - noise)
    else:
        return exponent + (tl.log2(mantissa) - noise)


@triton.jit
def best_of_law(address, shard, BLOCK: tl.constexpr):
    """The largest order word of the program's blocks, in a row with the address of its logits."""
    best = no_best(BLOCK)
    for number in range(shard.first, shard.last):
        block = numbered_block(shard, number, BLOCK)
        best = better(best, load_logits(address, block), block.ids, block.mask)
    return word_of_best(best)


@triton.jit
def best_score(best, token):
    """The word of the best fp32 score and its lowest token id; 0 if all scores are -inf.

    No score is NaN.
    """
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, token, NO_ID), axis=0)
    return tl.where(top > LOWEST, pack(top, token), 0)


@triton.jit
def sum_of_halves(high, low):
    """Σ q, int64, of sums of the halves of q by thread."""
    return tl.sum((high.to(tl.int64) << 20) + low, axis=0)


@row_kernel
def law_tops_kernel(
    # inputs
    target_ptr,  # [B · S, V_local] fp32
    stride_target,
    draft_ptr,  # [B, K, V_local], or None
    stride_draft_b,
    stride_draft_k,
    # outputs
    tops_ptr,  # [B, S + K] int64, zero before
    # sizes
    num_positions,  # S
    num_drafts,  # K, 0 without logits of the drafter
    vocab_start,
    lead,
    width,
    blocks_each,  # blocks of a program
    BLOCK: tl.constexpr,
):
    """The largest order words of target and drafter. Grid: (programs, B · (S + K))."""
    shard = shard_of(vocab_start, lead, width, blocks_each, BLOCK)
    row = tl.program_id(1) // (num_positions + num_drafts)
    index = tl.program_id(1) % (num_positions + num_drafts)
    target = target_ptr + (row * num_positions + index).to(tl.int64) * stride_target
    if draft_ptr is None:
        best = best_of_law(target, shard, BLOCK)
    else:
        if index < num_positions:
            best = best_of_law(target, shard, BLOCK)
        else:
            index -= num_positions
            draft_at = draft_address(draft_ptr, stride_draft_b, stride_draft_k, row, index)
            best = best_of_law(draft_at, shard, BLOCK)
    tl.atomic_max(tops_ptr + tl.program_id(1), best, sem="relaxed")


@row_kernel
def law_sums_kernel(
    # inputs
    target_ptr,  # [B · S, V_local] fp32
    stride_target,
    draft_ptr,  # [B, K, V_local], or None
    stride_draft_b,
    stride_draft_k,
    temperature_ptr,  # [B, S] fp32
    top_ptr,  # [B, S] fp32
    draft_top_ptr,  # [B, S] fp32
    cut_ptr,  # [B, S] int64
    drafts_ptr,  # [B, S] int64
    # outputs
    sums_ptr,  # [2 or 4, B, S] int64, zero before: Z_P and P of the draft, then Z_Q and Q of it
    # sizes
    num_positions,  # S
    vocab_start,
    lead,
    width,
    blocks_each,  # blocks of a program, so few that a thread has less than 2^11 logits
    BLOCK: tl.constexpr,
):
    """The sums of both laws, and the masses of the drafts. Grid: (programs, B · S)."""
    shard = shard_of(vocab_start, lead, width, blocks_each, BLOCK)
    place, rows = tl.program_id(1), tl.num_programs(1)
    sums = sums_ptr + place
    draft = tl.load(drafts_ptr + place)
    column = (draft - vocab_start).to(tl.int32)
    is_own = (column >= tl.maximum(shard.first * BLOCK - lead, 0)) & (
        column < tl.minimum(shard.last * BLOCK - lead, width)
    )

    address = target_ptr + place.to(tl.int64) * stride_target
    target = law_of(address, top_ptr, temperature_ptr, place)
    mark = mark_with_nan(tl.load(cut_ptr + place))
    high_sum, low_sum = tl.zeros((BLOCK // 8,), tl.int32), tl.zeros((BLOCK // 8,), tl.int32)
    for number in range(shard.first, shard.last):
        block = numbered_block(shard, number, BLOCK)
        tile = load_logits(target.address, block)
        high, low = halves(target_powers(tile, block.ids, block.mask, target, mark))
        high_sum += sums_of(high)
        low_sum += sums_of(low)
    tl.atomic_add(sums, sum_of_halves(high_sum, low_sum), sem="relaxed")
    if is_own:
        logit = tl.load(target.address + column)
        mass = rounded(target_powers(logit, draft.to(tl.int32), is_own, target, mark))
        tl.atomic_add(sums + rows, mass, sem="relaxed")

    if draft_ptr is not None:  # noqa: SIM102
        if draft >= 0:
            row, index = place // num_positions, place % num_positions
            draft_at = draft_address(draft_ptr, stride_draft_b, stride_draft_k, row, index)
            other = law_of(draft_at, draft_top_ptr, temperature_ptr, place)
            high_sum, low_sum = tl.zeros((BLOCK // 8,), tl.int32), tl.zeros((BLOCK // 8,), tl.int32)
            for number in range(shard.first, shard.last):
                block = numbered_block(shard, number, BLOCK)
                high, low = halves(draft_powers(load_logits(other.address, block), other))
                high_sum += sums_of(high)
                low_sum += sums_of(low)
            tl.atomic_add(sums + 2 * rows, sum_of_halves(high_sum, low_sum), sem="relaxed")
            if is_own:
                own = tl.load(other.address + column).to(tl.float32)
                own_mass = rounded(draft_powers(own, other))
                tl.atomic_add(sums + 3 * rows, own_mass, sem="relaxed")


@row_kernel
def residual_kernel(
    # inputs
    target_ptr,  # [B · S, V_local] fp32
    stride_target,
    draft_ptr,  # [B, K, V_local], or None
    stride_draft_b,
    stride_draft_k,
    temperature_ptr,  # [B, S] fp32
    top_ptr,  # [B, S] fp32
    draft_top_ptr,  # [B, S] fp32
    cut_ptr,  # [B, S] int64
    drafts_ptr,  # [B, S] int64
    place_ptr,  # [B, N] int64, the positions that are looked at
    weights_ptr,  # [2, B, N] int64, those of target and draft
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    # outputs
    residual_ptr,  # [1 or 2, B, N] int64, zero before: best words, and sums of the residuals
    # sizes
    num_positions,  # S
    num_places,  # N
    vocab_start,
    lead,
    width,
    blocks_each,  # blocks of a program
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of a draw from each residual, and its sum. Grid: (programs, B · N)."""
    shard = shard_of(vocab_start, lead, width, blocks_each, BLOCK)
    at, rows = tl.program_id(1), tl.num_programs(1)
    row, index = at // num_places, tl.load(place_ptr + at).to(tl.int32)
    place = row * num_positions + index
    draft, draft_weight = tl.load(drafts_ptr + place), tl.load(weights_ptr + rows + at)
    address = target_ptr + place.to(tl.int64) * stride_target
    law, weight = law_of(address, top_ptr, temperature_ptr, place), tl.load(weights_ptr + at)
    mark = mark_with_nan(tl.load(cut_ptr + place))
    if draft_ptr is None:
        own_share = draft_weight  # TOP_MASS · weight / 2^40
    else:
        draft_at = draft_address(draft_ptr, stride_draft_b, stride_draft_k, row, index)
        other = law_of(draft_at, draft_top_ptr, temperature_ptr, place)
    one = tl.arange(0, 1)
    seed, position = tl.load(seed_ptr + row + one), tl.load(position_ptr + row + one)
    r0, r1, r2 = row_stream(seed, position + index, index, DOMAIN_RECOVERY)

    best = tl.full((BLOCK,), LOWEST, tl.float32)
    token = tl.zeros((BLOCK,), tl.int32)
    units = tl.zeros((BLOCK // 8,), tl.int64)
    for number in range(shard.first, shard.last):
        block = numbered_block(shard, number, BLOCK)
        tile = load_logits(law.address, block)
        high, low = halves(target_powers(tile, block.ids, block.mask, law, mark))
        # A mass is above 0 where its upper half is, or where that is 0 and the lower half is.
        largest = tl.maximum(high, low) - ROUNDER_BITS
        # Most blocks of a filtered row have no mass.
        if tl.max(largest, axis=0) > 0:
            left = shares(high, low, weight)
            if draft_ptr is None:
                left -= tl.where(block.ids == draft, own_share, tl.zeros_like(left))
            else:
                if draft >= 0:
                    drafted = draft_powers(load_logits(other.address, block), other)
                    draft_high, draft_low = halves(drafted)
                    left -= shares(draft_high, draft_low, draft_weight)
            if SUMS:
                units += by_thread(tl.maximum(left, tl.zeros_like(left)))
            quads = block.first_id // 4 + tl.arange(0, BLOCK // 4)
            noise = noise_tile(quads, r0, r1, r2).reshape(left.shape)
            target = ((high - ROUNDER_BITS).to(tl.int64) << 20) + (low - ROUNDER_BITS)
            score = recovery_scores(left, target, noise)
            beats = (largest > 0) & (score > best)
            best, token = tl.where(beats, score, best), tl.where(beats, block.ids, token)
    if SUMS:
        tl.atomic_add(residual_ptr + rows + at, tl.sum(units, axis=0), sem="relaxed")
    tl.atomic_max(residual_ptr + at, best_score(best, token), sem="relaxed")
