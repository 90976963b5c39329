"""From a logits tile to words while it is still on chip: head, request controls, score, maximum.

The rows of a tile are token ids: neighbours, or groups of neighbours from a list.

Twin: `tpsample.backends.torch_.launch`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.controls import Controls, control_tile
from tpsample.backends.triton_.kernels.noise import INTERPRET, NoiseRows, fma, noise_tile
from tpsample.core import word

TOKEN_BITS = Constant(word.TOKEN_BITS)
TOKEN_MASK = Constant(word.TOKEN_MASK)
KEY_NAN = Constant(word.KEY_NAN)
GROUP = Constant(16)
"""Ids of a group: whole quads, whose noise is drawn together, and few enough to waste little."""


class TileIds(NamedTuple):
    """The ids of a tile; they begin at a multiple of four, and so does every group.

    Without a list, `first` is the tile's first id. With one, it is the tile's first place, where a
    group has 16 places and the list holds every group's first id.
    """

    first: tl.tensor
    listed_ptr: tl.tensor | None  # int32
    num_listed: tl.tensor | None


@triton.jit
def token_ids(ids, stop, COUNT: tl.constexpr):
    """Return the ids of the tile's first COUNT rows, int32; behind the list they are `stop`."""
    if ids.listed_ptr is None:
        return ids.first + tl.arange(0, COUNT)
    else:
        place = ids.first + tl.arange(0, COUNT)
        in_list = place // GROUP < ids.num_listed
        first = tl.load(ids.listed_ptr + place // GROUP, mask=in_list, other=0)
        return tl.where(in_list, first + place % GROUP, stop)


@triton.jit
def quads(ids, stop, COUNT: tl.constexpr):
    """Return the quads, id // 4, of the tile's first 4 · COUNT rows, int32."""
    if ids.listed_ptr is None:
        return ids.first // 4 + tl.arange(0, COUNT)
    else:
        place = ids.first + 4 * tl.arange(0, COUNT)
        in_list = place // GROUP < ids.num_listed
        first = tl.load(ids.listed_ptr + place // GROUP, mask=in_list, other=0)
        return tl.where(in_list, first + place % GROUP, stop) // 4


class Shard(NamedTuple):
    """The global ids [start, stop) of the weight's rows."""

    start: tl.tensor
    stop: tl.tensor


class HeadArguments(NamedTuple):
    """The steps from a product to a logit, each None if it is off."""

    scale: tl.tensor | None
    softcap: tl.tensor | None
    bias_ptr: tl.tensor | None


class Scoring(NamedTuple):
    """Everything that makes scores of a product of some ids and rows."""

    ids: TileIds
    rows: NoiseRows
    shard: Shard
    head: HeadArguments
    controls: Controls


class Outputs(NamedTuple):
    """The memory that a launch writes. Pointers to numbers of stored rows are None if there are
    none, and those to words of tiles also where nobody samples."""

    words_ptr: tl.tensor
    logits_ptr: tl.tensor | None
    stride_logits_b: tl.tensor | None
    slot_ptr: tl.tensor | None  # the place of each row among the stored ones, or -1
    num_stored: tl.tensor | None
    tile: tl.tensor
    first_ptr: tl.tensor | None  # the first order word of each tile
    best_ptr: tl.tensor | None  # and its best score words
    stride_words: tl.tensor | None


@triton.jit
def weight_rows(offs_v, shard):
    """The weight's rows of some ids; those past an edge read the row at the edge instead."""
    return tl.minimum(tl.maximum(offs_v, shard.start), shard.stop - 1) - shard.start


@triton.jit
def head_tile(product, offs_v, shard, head):
    """Accumulated product to logit: scale, soft-cap, bias, in this order."""
    if head.bias_ptr is not None:
        bias_v = tl.load(head.bias_ptr + weight_rows(offs_v, shard)).to(tl.float32)
    logits_tile = product
    if head.scale is not None:
        logits_tile = logits_tile * head.scale
    if head.softcap is not None:
        ratio = logits_tile / head.softcap
        if INTERPRET:
            ratio = ratio.to(tl.float64)
        # tanh x = 1 - 2 / (e^2x + 1): no cancellation that matters beside the rounding of a logit
        logits_tile = (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0)).to(tl.float32) * head.softcap
    if head.bias_ptr is not None:
        logits_tile = logits_tile + bias_v[:, None]
    return logits_tile


@triton.jit
def gained_noise(quads, rows, offs_slot):
    """-L of the ids of some quads, for one sample of each row; 0 for a greedy row."""
    stream = rows.stream_ptr + offs_slot
    r0 = tl.load(stream).to(tl.uint32, bitcast=True)
    r1 = tl.load(stream + rows.stride_stream).to(tl.uint32, bitcast=True)
    r2 = tl.load(stream + 2 * rows.stride_stream).to(tl.uint32, bitcast=True)
    gain = tl.load(stream + 3 * rows.stride_stream).to(tl.float32, bitcast=True)
    return noise_tile(quads, r0, r1, r2) * gain[None, :]


@triton.jit
def store_logits(logits_tile, outputs, first_slot, offs_v, offs_b, shard, num_rows):
    """Leave the tile's logits of stored rows in memory, from `first_slot` on; they never leave the
    rank."""
    slot = tl.load(outputs.slot_ptr + offs_b, mask=offs_b < num_rows, other=-1)
    mask_v = (offs_v >= shard.start) & (offs_v < shard.stop)
    column = (offs_v - shard.start)[:, None]
    row = (first_slot + slot).to(tl.int64)[None, :]
    address = outputs.logits_ptr + row * outputs.stride_logits_b + column
    tl.store(address, logits_tile, mask=mask_v[:, None] & (slot >= 0)[None, :])


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_or_nan(values, axis: tl.constexpr):
    """The maximum along an axis; NaN if there is one.

    The interpreter runs a custom reduction element by element, so there NaN is looked for
    separately.
    """
    if INTERPRET:
        is_nan = tl.max((values != values).to(tl.int32), axis=axis) > 0
        best = tl.where(is_nan, float("nan"), tl.max(values, axis=axis))
    else:
        best = tl.reduce(values, axis, _nan_max)
    return best


@triton.jit
def word_of_tile(best, token_id, first_id):
    """A word of each column, whose id leads back to the tile. A NaN's word has the tile's first id,
    because the search for the best number does not find the id of a NaN."""
    return pack(best, tl.where(best != best, first_id, token_id))


@triton.jit
def best_of_columns(score_tile, offs_v):
    """The best number of each column and the lowest id that has it; a NaN wins its column, and has
    the id TOKEN_MASK.

    Two passes (maximum, then lowest id that has it) cost 3 instructions per logit less than one
    reduction over (score, id) pairs.
    """
    best = max_or_nan(score_tile, 0)
    holds_best = score_tile == best[None, :]
    token_id = tl.min(tl.where(holds_best, offs_v[:, None], TOKEN_MASK), axis=0)
    # After a reduction every thread holds several columns that others hold too. Gathering them in
    # order leaves one per thread, so that packing and the atomic are done once.
    columns = tl.arange(0, score_tile.shape[1])
    return tl.gather(best, columns, 0), tl.gather(token_id, columns, 0)


@triton.jit
def pack(score, token_id):
    """(fp32 score, int32 id) to an int64 word of epoch 0.

    `tpsample.core.word` has the layout, an example and the twin.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    key = tl.where(score != score, KEY_NAN, ordered.to(tl.int64))
    return (key << TOKEN_BITS) | (token_id ^ TOKEN_MASK).to(tl.int64)


@triton.jit
def edge_tile(ids, shard, BLOCK_V: tl.constexpr):
    """Whether some rows of a tile may lie outside the shard."""
    if ids.listed_ptr is None:
        return (ids.first < shard.start) | (ids.first + BLOCK_V > shard.stop)
    else:
        return True


@triton.jit
def store_candidates(
    product,  # [BLOCK_V, BLOCK_B] fp32
    scoring,
    outputs,
    first_row,
    GIVEN: tl.constexpr,  # whether they are logits of the caller
    BLOCK_E: tl.constexpr,
):
    """Products of BLOCK_V ids and BLOCK_B rows to the maxima in memory, BLOCK_E rows at a time.

    Rows are columns of the accumulator, whose halves are taken until BLOCK_E are left. The noise
    then needs registers for BLOCK_E columns, not BLOCK_B, and a 128 × 256 tile (128 accumulators
    per thread) does not spill.
    """
    ids, rows, shard = scoring.ids, scoring.rows, scoring.shard
    BLOCK_V: tl.constexpr = product.shape[0]
    BLOCK_B: tl.constexpr = product.shape[1]
    if BLOCK_B > BLOCK_E:
        HALF: tl.constexpr = BLOCK_B // 2
        left, right = product.reshape((BLOCK_V, 2, HALF)).permute((0, 2, 1)).split()
        store_candidates(left, scoring, outputs, first_row, GIVEN, BLOCK_E)
        # Rows past the last draw no noise.
        if first_row + HALF < rows.num_rows:
            store_candidates(right, scoring, outputs, first_row + HALF, GIVEN, BLOCK_E)
    else:
        offs_v = token_ids(ids, shard.stop, BLOCK_V)
        offs_b = first_row + tl.arange(0, BLOCK_B)
        # A product that overflowed is no logit, because it would be a forced token.
        if not GIVEN:
            product = tl.where(product == float("inf"), float("nan"), product)
        logits_tile = head_tile(product, offs_v, shard, scoring.head)
        inside = offs_v
        if edge_tile(ids, shard, BLOCK_V):
            mask_v = (offs_v >= shard.start) & (offs_v < shard.stop)
            logits_tile = tl.where(mask_v[:, None], logits_tile, float("-inf"))
            inside = tl.where(mask_v, offs_v, TOKEN_MASK)
        if outputs.logits_ptr is not None:
            store_logits(logits_tile, outputs, 0, offs_v, offs_b, shard, rows.num_rows)

        if scoring.controls.slot_ptr is not None:
            logits_tile = control_tile(logits_tile, scoring, offs_v, offs_b)
            if outputs.logits_ptr is not None:
                store_logits(
                    logits_tile, outputs, outputs.num_stored, offs_v, offs_b, shard, rows.num_rows
                )

        if outputs.first_ptr is not None:
            is_row = offs_b < rows.num_rows
            slot = tl.load(outputs.slot_ptr + offs_b, mask=is_row, other=-1).to(tl.int64)
            place = slot * outputs.stride_words + outputs.tile
            first, first_token_id = best_of_columns(logits_tile, inside)
            first_word = word_of_tile(first, first_token_id, ids.first)
            tl.store(outputs.first_ptr + place, first_word, mask=slot >= 0)

        scale = tl.load(rows.scale_ptr + offs_b)
        for sample in range(1 if rows.num_samples is None else rows.num_samples):
            offs_slot = sample * rows.num_rows + offs_b
            noise = gained_noise(quads(ids, shard.stop, BLOCK_V // 4), rows, offs_slot)
            # log2 e / T and -L; a greedy row has the scale 1 and no noise.
            scores = fma(logits_tile, scale[None, :], noise)
            best, token_id = best_of_columns(scores, inside)
            word = pack(best, token_id)
            if outputs.best_ptr is not None:
                samples = 1 if rows.num_samples is None else rows.num_samples
                best_place = place + (slot * (samples - 1) + sample) * outputs.stride_words
                best_word = word_of_tile(best, token_id, ids.first)
                tl.store(outputs.best_ptr + best_place, best_word, mask=slot >= 0)
            tl.atomic_max(
                outputs.words_ptr + offs_slot,
                word,
                mask=offs_b < rows.num_rows,
                sem="relaxed",
                scope="gpu",
            )
