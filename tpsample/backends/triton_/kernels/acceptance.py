"""The arithmetic on rows of a verification, one program per row.

Twins: `tpsample.backends.torch_.verification`, `tpsample.core.acceptance`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.decode import NO_TOKEN, STATUS_NAN, decode
from tpsample.backends.triton_.kernels.head import KEY_NAN, TOKEN_BITS
from tpsample.backends.triton_.kernels.laws import TOP_MASS
from tpsample.backends.triton_.kernels.noise import GREEDY_BELOW, row_stream
from tpsample.backends.triton_.kernels.order import KEY_MASK, row_kernel, value_of
from tpsample.core import acceptance, residual, word

DOMAIN_ACCEPT = Constant(acceptance.DOMAIN_ACCEPT)
LOWEST_DRAWABLE = Constant(word.LOWEST_DRAWABLE)
SHARE_UNIT = Constant(2.0**-residual.SHARE_BITS)
WEIGHT_OF_ONE = Constant(2.0 ** (residual.SHARE_BITS + residual.MASS_BITS))


@triton.jit
def uniforms(seed, position, index):
    """u of positions `index`, int32, of a row: float64. Twin: `tpsample.core.acceptance`."""
    seed, position = seed + tl.zeros_like(index).to(tl.int64), position + index
    high, low, _ = row_stream(seed, position, index, DOMAIN_ACCEPT)
    bits = (high.to(tl.int64) << 20) | (low >> 12).to(tl.int64)
    return (2 * bits + 1).to(tl.float64) * 2.0**-53


@triton.jit
def share_weight(coefficient, total):
    """The weight by which masses become shares. Twin: `tpsample.core.residual.share_weight`."""
    weight = coefficient / tl.maximum(total, 1).to(tl.float64) * WEIGHT_OF_ONE
    return tl.where(total >= TOP_MASS, weight, 0.0).to(tl.int64)


@triton.jit
def at_index(values, index, place):
    """The one of `values` whose index is `place`."""
    return tl.sum(tl.where(index == place, values, tl.zeros_like(values)), axis=0)


@row_kernel
def drafted_rows_kernel(
    # inputs
    drafts_ptr,  # [B, S - 1] int64
    drawn_ptr,  # [B] bool, rows that are not drawn, or None
    position_ptr,  # [B] int64
    # outputs
    own_drafts_ptr,  # [B, S] int64, -1 where there is none
    row_position_ptr,  # [B, S] int64
    # sizes
    vocab_size,
    num_positions,  # S
    POSITIONS: tl.constexpr,  # >= S
):
    """The drafts of each row up to its first that is no id, and their positions. Grid: (B,)."""
    row, index = tl.program_id(0), tl.arange(0, POSITIONS)
    drafts = drafts_ptr + row * (num_positions - 1) + index
    drafts = tl.load(drafts, mask=index < num_positions - 1, other=NO_TOKEN)
    if drawn_ptr is not None:
        drafts = tl.where(tl.load(drawn_ptr + row) != 0, NO_TOKEN, drafts)
    known = (drafts >= 0) & (drafts < vocab_size)
    end = tl.min(tl.where(known, POSITIONS, index), axis=0)
    mask, places = index < num_positions, row * num_positions + index
    tl.store(own_drafts_ptr + places, tl.where(index < end, drafts, NO_TOKEN), mask=mask)
    tl.store(row_position_ptr + places, tl.load(position_ptr + row) + index, mask=mask)


@row_kernel
def coupled_kernel(
    # inputs
    drafts_ptr,  # [B, S] int64, -1 where there is none
    sampled_ptr,  # [B, S] int64, the tokens drawn
    status_ptr,  # [B, S] int32
    seed_ptr,  # [B, S] int64
    # outputs
    accepted_ptr,  # [B] int64
    token_ptr,  # [B, S] int64
    row_status_ptr,  # [B] int32
    out_seed_ptr,  # [B] int64
    # sizes
    num_positions,  # S
    POSITIONS: tl.constexpr,  # >= S
):
    """Accept the drafts that are the tokens drawn, up to the first other one. Grid: (B,)."""
    row, index = tl.program_id(0), tl.arange(0, POSITIONS)
    mask, places = index < num_positions, row * num_positions + index
    drafts = tl.load(drafts_ptr + places, mask=mask, other=NO_TOKEN)
    tokens = tl.load(sampled_ptr + places, mask=mask, other=NO_TOKEN)
    accepted = (drafts == tokens) & (drafts >= 0)
    stop = tl.min(tl.where(accepted, POSITIONS, index), axis=0)
    tl.store(token_ptr + places, tl.where(index <= stop, tokens, NO_TOKEN), mask=mask)
    tl.store(accepted_ptr + row, stop.to(tl.int64))
    tl.store(row_status_ptr + row, tl.load(status_ptr + row * num_positions + stop))
    tl.store(out_seed_ptr + row, tl.load(seed_ptr + row * num_positions))


@row_kernel
def law_rows_kernel(
    # inputs
    gathered_ptr,  # [num_sources, B, S + K] int64, the ranks' largest order words
    temperature_ptr,  # [B, S] fp32, as the requests have it
    status_ptr,  # [B, S] int32
    drafts_ptr,  # [B, S] int64
    # outputs
    top_ptr,  # [B, S] fp32
    draft_top_ptr,  # [B, S] fp32
    cut_ptr,  # [B, S] int64
    own_status_ptr,  # [B, S] int32
    own_drafts_ptr,  # [B, S] int64, -1 where the status is not OK
    # sizes
    num_positions,  # S
    num_drafts,  # K, 0 without logits of the drafter
    num_sources,
):
    """The numbers of the laws at one position of a row, but for filters. Grid: (S, B)."""
    index, row, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    width = num_positions + num_drafts
    first, draft_first = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for source in range(num_sources):
        words = gathered_ptr + (source * rows + row) * width
        first = tl.maximum(first, tl.load(words + index))
        has_draft = index < num_drafts
        draft_word = tl.load(words + num_positions + index, mask=has_draft, other=0)
        draft_first = tl.maximum(draft_first, draft_word)
    place = row * num_positions + index
    top = value_of(first)
    certain = ~(tl.load(temperature_ptr + place) >= GREEDY_BELOW) | (top == float("inf"))
    draft, status = tl.load(drafts_ptr + place), tl.load(status_ptr + place)
    nan_draft = (((draft_first >> TOKEN_BITS) & KEY_MASK) == KEY_NAN) & (draft >= 0)
    status = tl.where(nan_draft & (status == 0), STATUS_NAN, status)
    tl.store(top_ptr + place, top)
    tl.store(draft_top_ptr + place, value_of(draft_first))
    tl.store(cut_ptr + place, tl.where(certain, first, LOWEST_DRAWABLE))
    tl.store(own_status_ptr + place, status)
    tl.store(own_drafts_ptr + place, tl.where(status == 0, draft, NO_TOKEN))


@row_kernel
def accept_kernel(
    # inputs
    sums_ptr,  # [2 or 4, B, S] int64, over all ranks, as `law_sums_kernel` makes them
    drafts_ptr,  # [B, S] int64
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    # outputs
    own_drafts_ptr,  # [B, S] int64, -1 where the drafter cannot have drawn the draft
    place_ptr,  # [B, N] int64
    weights_ptr,  # [2, B, N] int64
    coefficient_ptr,  # [B, N] fp64
    # sizes
    num_positions,  # S
    CERTAIN: tl.constexpr,  # whether the drafts were
    BLOCKWISE: tl.constexpr,  # N = S, else N = 1
    POSITIONS: tl.constexpr,  # >= S
):
    """Accept drafts token by token, or find the coefficients of a block. Grid: (B,)."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, POSITIONS)
    mask, places = index < num_positions, row * num_positions + index
    count = rows * num_positions
    total = tl.load(sums_ptr + places, mask=mask, other=0)
    mass = tl.load(sums_ptr + count + places, mask=mask, other=0)
    draft = tl.load(drafts_ptr + places, mask=mask, other=NO_TOKEN)
    if CERTAIN:
        draft_mass = tl.where(draft >= 0, TOP_MASS, tl.zeros_like(draft))
        draft_total = draft_mass
    else:
        draft_total = tl.load(sums_ptr + 2 * count + places, mask=mask, other=0)
        draft_mass = tl.load(sums_ptr + 3 * count + places, mask=mask, other=0)
    tl.store(own_drafts_ptr + places, tl.where(draft_mass > 0, draft, NO_TOKEN), mask=mask)
    p = mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
    q = draft_mass.to(tl.float64) / tl.maximum(draft_total, 1).to(tl.float64)

    one = tl.full((POSITIONS,), 1.0, tl.float64)
    if BLOCKWISE:
        ratios, coefficient = tl.where(q > 0, p / tl.where(q > 0, q, one), 0.0), one
        last = tl.full((), 1.0, tl.float64)
        for i in range(num_positions - 1):
            last = tl.minimum(last * at_index(ratios, index, i), 1.0)
            coefficient = tl.where(index == i + 1, last, coefficient)
        tl.store(place_ptr + places, index.to(tl.int64), mask=mask)
        tl.store(coefficient_ptr + places, coefficient, mask=mask)
        tl.store(weights_ptr + places, share_weight(coefficient, total), mask=mask)
        tl.store(weights_ptr + count + places, share_weight(one, draft_total), mask=mask)
    else:
        u = uniforms(tl.load(seed_ptr + row), tl.load(position_ptr + row), index)
        accepted = mask & (u * q < p) & (q > 0)
        stop = tl.min(tl.where(accepted, POSITIONS, index), axis=0)
        tl.store(place_ptr + row, stop.to(tl.int64))
        tl.store(coefficient_ptr + row, 1.0)
        weight = at_index(share_weight(one, total), index, stop)
        tl.store(weights_ptr + row, weight)
        tl.store(weights_ptr + rows + row, at_index(share_weight(one, draft_total), index, stop))


@row_kernel
def emit_kernel(
    # inputs
    gathered_ptr,  # [num_sources, 1 or 2, B, N] int64, as `residual_kernel` makes them
    place_ptr,  # [B, N] int64
    coefficient_ptr,  # [B, N] fp64
    drafts_ptr,  # [B, S] int64
    status_ptr,  # [B, S] int32
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    sampled_ptr,  # [B, S] int64, below 0 in rows that are not drawn
    # outputs
    accepted_ptr,  # [B] int64
    token_ptr,  # [B, S] int64
    row_status_ptr,  # [B] int32
    # sizes
    num_positions,  # S
    num_sources,
    BLOCKWISE: tl.constexpr,  # N = S, else N = 1
    POSITIONS: tl.constexpr,  # >= S
):
    """Find where a row stops, and the tokens that it emits. Grid: (B,)."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, POSITIONS)
    mask, places = index < num_positions, row * num_positions + index
    statuses = tl.load(status_ptr + places, mask=mask, other=0)
    if BLOCKWISE:
        count = rows * num_positions
        words, sums = tl.zeros((POSITIONS,), tl.int64), tl.zeros((POSITIONS,), tl.int64)
        for source in range(num_sources):
            gathered = gathered_ptr + source * 2 * count + places
            words = tl.maximum(words, tl.load(gathered, mask=mask, other=0))
            sums += tl.load(gathered + count, mask=mask, other=0)
        coefficient = tl.load(coefficient_ptr + places, mask=mask, other=0.0)
        # A position without a law has no draft, so c alone enters its test.
        left = tl.where(statuses == 0, sums.to(tl.float64) * SHARE_UNIT, coefficient)
        u = uniforms(tl.load(seed_ptr + row), tl.load(position_ptr + row), index - 1)
        passed = mask & (index > 0) & (u * (left + 1 - coefficient) < left)
        stop = tl.max(tl.where(passed, index, 0), axis=0)
        best = at_index(words, index, stop)
    else:
        stop = tl.load(place_ptr + row).to(tl.int32)
        best = tl.full((), 0, tl.int64)
        for source in range(num_sources):
            best = tl.maximum(best, tl.load(gathered_ptr + source * rows + row))
    token, _ = decode(best)
    status = at_index(statuses, index, stop)
    drawn = tl.load(sampled_ptr + row * num_positions + stop) >= 0
    token = tl.where(drawn & (status == 0), token, NO_TOKEN)
    drafts = tl.load(drafts_ptr + places, mask=mask, other=NO_TOKEN)
    tokens = tl.where(index < stop, drafts, tl.where(index == stop, token, NO_TOKEN))
    tl.store(token_ptr + places, tokens, mask=mask)
    tl.store(accepted_ptr + row, stop.to(tl.int64))
    tl.store(row_status_ptr + row, status)
