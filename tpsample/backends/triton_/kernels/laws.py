"""The passes of a verification by ratio: largest logits, sums of masses, draws from residuals.

Twins: `tpsample.backends.torch_.verification`, and for the arithmetic `tpsample.core.residual`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.head import pack
from tpsample.backends.triton_.kernels.masses import mass_row
from tpsample.backends.triton_.kernels.masses import masses as masses_of
from tpsample.backends.triton_.kernels.noise import INTERPRET, noise_tile, row_stream
from tpsample.backends.triton_.kernels.order import ROW_POINTERS, best_of_groups, order_words
from tpsample.core import acceptance, masses, residual

DOMAIN_RECOVERY = Constant(acceptance.DOMAIN_RECOVERY)
TOP_MASS = Constant(masses.TOP_MASS)
LIMB, PLAIN_SHIFT = Constant(residual.LIMB), Constant(residual.PLAIN_SHIFT)
LIMB_MASK = Constant(2**residual.LIMB - 1)
SHARE_BITS, MASS_BITS = Constant(residual.SHARE_BITS), Constant(residual.MASS_BITS)


class Logits(NamedTuple):
    """Where the logits of the target are, and those of the drafter."""

    target_ptr: tl.tensor  # [B · S, V_local] fp32
    stride_target: tl.tensor
    draft_ptr: tl.tensor | None  # [B, K, V_local], or None if the drafts were certain
    stride_draft_b: tl.tensor | None
    stride_draft_k: tl.tensor | None
    num_positions: tl.tensor  # S


class LawRows(NamedTuple):
    """The numbers of the laws of each row and position, [B, S]."""

    temperature_ptr: tl.tensor  # fp32
    top_ptr: tl.tensor  # fp32
    draft_top_ptr: tl.tensor  # fp32
    cut_ptr: tl.tensor  # int64
    drafts_ptr: tl.tensor  # int64, -1 where there is no draft


class Columns(NamedTuple):
    """The program's block of the shard."""

    columns: tl.tensor  # int32 [BLOCK]
    ids: tl.tensor  # int32 [BLOCK]
    mask: tl.tensor  # whether they are of the shard
    first_id: tl.tensor  # a multiple of 4


@triton.jit
def block_of(vocab_start, lead, width, BLOCK: tl.constexpr):
    """The `Columns` of this program; the first block begins `lead` columns before the shard."""
    first_column = tl.program_id(0) * BLOCK - lead
    columns = first_column + tl.arange(0, BLOCK)
    mask = (columns >= 0) & (columns < width)
    return Columns(columns, vocab_start + columns, mask, vocab_start + first_column)


@triton.jit
def target_logits(logits, place, block):
    """fp32 logits of the target at a row and position; -inf outside the shard."""
    address = logits.target_ptr + place.to(tl.int64) * logits.stride_target + block.columns
    return tl.load(address, mask=block.mask, other=float("-inf"))


@triton.jit
def draft_logits(logits, row, index, block, mask):
    """fp32 logits of the drafter for one draft of a row; -inf outside the mask."""
    first = row.to(tl.int64) * logits.stride_draft_b + index.to(tl.int64) * logits.stride_draft_k
    address = logits.draft_ptr + first + block.columns
    return tl.load(address, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def target_masses(logits, laws, place, block):
    """P, int64 [BLOCK], 0 outside the kept set."""
    its = target_logits(logits, place, block)
    kept = order_words(its, block.ids, block.mask) >= tl.load(laws.cut_ptr + place)
    row = mass_row(tl.load(laws.top_ptr + place), tl.load(laws.temperature_ptr + place))
    return tl.where(block.mask & kept, masses_of(its, row), 0)


@triton.jit
def draft_masses(logits, laws, place, block):
    """Q, int64 [BLOCK], 0 without a draft."""
    draft = tl.load(laws.drafts_ptr + place)
    if logits.draft_ptr is None:
        return tl.where(block.mask & (block.ids == draft), TOP_MASS, tl.zeros_like(draft))
    else:
        positions = logits.num_positions
        there = block.mask & (draft >= 0)
        its = draft_logits(logits, place // positions, place % positions, block, there)
        row = mass_row(tl.load(laws.draft_top_ptr + place), tl.load(laws.temperature_ptr + place))
        return tl.where(its > float("-inf"), masses_of(its, row), 0)


@triton.jit
def shares(mass, weight):
    """floor(mass · weight / 2^40), int64. Twin: `tpsample.core.residual.shares`."""
    low, middle = weight & LIMB_MASK, (weight >> LIMB) & LIMB_MASK
    rest = mass * middle + (mass * low >> LIMB)
    return (mass * (weight >> (2 * LIMB)) << 2) + (rest >> (MASS_BITS - LIMB))


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


@triton.jit(
    do_not_specialize=["num_positions", "num_drafts"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
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
    BLOCK: tl.constexpr,
):
    """The largest order words of target and drafter. Grid: (blocks, B · (S + K))."""
    block = block_of(vocab_start, lead, width, BLOCK)
    logits = Logits(
        target_ptr, stride_target, draft_ptr, stride_draft_b, stride_draft_k, num_positions
    )
    row = tl.program_id(1) // (num_positions + num_drafts)
    index = tl.program_id(1) % (num_positions + num_drafts)
    if draft_ptr is None:
        its = target_logits(logits, row * num_positions + index, block)
    else:
        if index < num_positions:
            its = target_logits(logits, row * num_positions + index, block)
        else:
            its = draft_logits(logits, row, index - num_positions, block, block.mask)
    best = best_of_groups(its, block.ids, block.mask, BLOCK)
    tl.atomic_max(tops_ptr + tl.program_id(1) + tl.arange(0, 1), best, sem="relaxed")


@triton.jit(do_not_specialize=["num_positions"], do_not_specialize_on_alignment=ROW_POINTERS)
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
    BLOCK: tl.constexpr,
):
    """The sums of both laws, and the masses of the drafts. Grid: (blocks, B · S)."""
    block = block_of(vocab_start, lead, width, BLOCK)
    logits = Logits(
        target_ptr, stride_target, draft_ptr, stride_draft_b, stride_draft_k, num_positions
    )
    laws = LawRows(temperature_ptr, top_ptr, draft_top_ptr, cut_ptr, drafts_ptr)
    place, rows = tl.program_id(1), tl.num_programs(1)
    draft = tl.load(drafts_ptr + place)
    own = block.mask & (block.ids == draft)
    sums = sums_ptr + place
    mass = target_masses(logits, laws, place, block)
    tl.atomic_add(sums, tl.sum(mass, axis=0), sem="relaxed")
    has_own = (draft >= block.first_id) & (draft < block.first_id + BLOCK)
    if has_own:
        tl.atomic_add(sums + rows, tl.sum(tl.where(own, mass, 0), axis=0), sem="relaxed")
    if draft_ptr is not None:  # noqa: SIM102
        if draft >= 0:
            mass = draft_masses(logits, laws, place, block)
            tl.atomic_add(sums + 2 * rows, tl.sum(mass, axis=0), sem="relaxed")
            if has_own:
                own_mass = tl.sum(tl.where(own, mass, 0), axis=0)
                tl.atomic_add(sums + 3 * rows, own_mass, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_positions", "num_places"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
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
    found_ptr,  # [1 or 2, B, N] int64, zero before: the best words, and the sums of the residuals
    # sizes
    num_positions,  # S
    num_places,  # N
    vocab_start,
    lead,
    width,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of a draw from each residual, and its sum. Grid: (blocks, B · N)."""
    block = block_of(vocab_start, lead, width, BLOCK)
    logits = Logits(
        target_ptr, stride_target, draft_ptr, stride_draft_b, stride_draft_k, num_positions
    )
    laws = LawRows(temperature_ptr, top_ptr, draft_top_ptr, cut_ptr, drafts_ptr)
    at, rows = tl.program_id(1), tl.num_programs(1)
    row, index = at // num_places, tl.load(place_ptr + at).to(tl.int32)
    place = row * num_positions + index
    target = target_masses(logits, laws, place, block)
    # Most blocks of a filtered row have no mass.
    if tl.max(target, axis=0) > 0:
        share = shares(target, tl.load(weights_ptr + at))
        draft = draft_masses(logits, laws, place, block)
        left = share - shares(draft, tl.load(weights_ptr + rows + at))
        left = tl.maximum(left, tl.zeros_like(left))
        if SUMS:
            tl.atomic_add(found_ptr + rows + at, tl.sum(left, axis=0), sem="relaxed")
        one = tl.arange(0, 1)
        seed, position = tl.load(seed_ptr + row + one), tl.load(position_ptr + row + one)
        r0, r1, r2 = row_stream(seed, position + index, index, DOMAIN_RECOVERY)
        quads = block.first_id // 4 + tl.arange(0, BLOCK // 4)
        noise = noise_tile(quads, r0, r1, r2).reshape(left.shape)
        words = pack(recovery_scores(left, target, noise), block.ids)
        best = tl.max(tl.where(target > 0, words, 0), axis=0)
        tl.atomic_max(found_ptr + at, best, sem="relaxed")
