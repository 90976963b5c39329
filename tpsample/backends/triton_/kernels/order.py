"""Shared by the kernels over stored logits: a block of one row, its order words, its filters.

Twins: `tpsample.core.order`, and `backends.torch_.passes` for noise and first words. The docstring
of `first_words` says why the groups of ids in which they lie are enough.
"""

from functools import partial
from typing import NamedTuple

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS, Constant
from tpsample.backends.triton_.kernels.decode import KEY_MINUS_INF
from tpsample.backends.triton_.kernels.head import KEY_NAN, TOKEN_BITS, TOKEN_MASK, max_or_nan, pack
from tpsample.backends.triton_.kernels.noise import (
    DOMAIN_TOKEN,
    KEY0,
    KEY1,
    fma,
    log2_exponential,
    low_base,
    noise_tile,
    philox4x32,
    row_scale,
    row_stream,
)
from tpsample.backends.triton_.kernels.reorder import REORDERS, columns_of_threads
from tpsample.core import order, word

MASKED = Constant(float("-inf"))
NO_ID = Constant(word.MAX_VOCAB_SIZE)
KEY_MASK = Constant(0xFFFFFFFF)
LARGEST = Constant(order.LARGEST)
WARP = Constant(32)
KEY_INF, KEY_MINUS_ZERO = Constant(0xFF800000), Constant(0x7FFFFFFF)


class Draw(NamedTuple):
    """The parts of one row's scores beside its logits, each [1]."""

    seed: tl.tensor  # int64
    position: tl.tensor  # int64
    temperature: tl.tensor  # fp32


ROW_POINTERS = [
    *("seed_ptr", "position_ptr", "temperature_ptr", "top_ptr", "row_done_ptr", "cut_ptr", "y_ptr"),
    *("most_ptr", "share_ptr", "least_ptr", "least_of_total_ptr", "keep_ties_ptr", "limit_ptr"),
    "total_ptr",
    *("prefix_ptr", "reached_ptr", "next_prefix_ptr", "next_reached_ptr", "next_limit_ptr"),
    *("bin_ptr", "room_ptr"),
    *("words_ptr", "first_ptr", "marks_ptr", "number_ptr", "zero_ptr"),
    *("largest_ptr", "best_kept_ptr"),
    # of logprobs
    *("ids_ptr", "own_ptr", "processed_ptr", "shown_temperature_ptr", "sampled_ptr", "chosen_ptr"),
    *("log_total_ptr", "entropy_ptr", "as_logits_ptr", "top_of_ptr", "value_ptr", "rank_ptr"),
    # of kept sets
    *("of_greedy_ptr", "drawn_ptr", "size_ptr", "whole_ptr"),
    *("overflow_ptr", "offset_ptr", "mass_ptr", "listed_cut_ptr", "needed_ptr"),
    # of verifications
    *("draft_top_ptr", "drafts_ptr", "status_ptr", "place_ptr", "weights_ptr", "coefficient_ptr"),
    *("gathered_ptr", "tops_ptr", "sums_ptr", "residual_ptr", "own_drafts_ptr", "own_status_ptr"),
    *("accepted_ptr", "token_ptr", "row_status_ptr", "out_seed_ptr", "row_position_ptr"),
]
"""Arguments with a few numbers per row. Whether they begin at a multiple of 16 bytes makes no other
kernel."""

row_kernel = partial(
    triton.jit, do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=ROW_POINTERS
)
"""Compiles a kernel of rows, whose arguments of these names make no other kernel."""


@triton.jit
def blocks_of_program(blocks_each, lead, width, BLOCK: tl.constexpr):
    """The program's first block of its row, and the one behind its last. Grid: (F, programs).

    The numbers of the row are computed once for several blocks. Programs that run at the same time
    are of many rows. Those of one row would wait for each other where they add to its sums.
    """
    first = tl.program_id(1) * blocks_each
    return first, tl.minimum(first + blocks_each, tl.cdiv(lead + width, BLOCK))


@triton.jit
def by_thread(values):
    """Sums [BLOCK / 8] of [BLOCK] numbers over those that one thread holds.

    The compiler decides which numbers these are, because a reshape that may reorder moves none to
    another thread, and the first axis lies in one. So only the total of the sums has a meaning.
    Where no reshape may, those are taken that a thread has after an aligned load of fp32.
    """
    if REORDERS:
        return tl.sum(columns_of_threads(values, 8), axis=0)
    else:
        return tl.sum(tl.sum(values.reshape((2, values.shape[0] // 8, 4)), axis=2), axis=0)


@triton.jit
def add_up(address, numbers):
    """Add the sum of numbers `by_thread` to one in memory.

    Each warp adds its own, as in a sum over all threads they would wait for each other.
    """
    of_warps = tl.sum(numbers.reshape((numbers.shape[0] // WARP, WARP)), axis=1)
    tl.atomic_add(address + tl.zeros(of_warps.shape, tl.int32), of_warps, sem="relaxed")


@triton.jit
def load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK: tl.constexpr):
    """`load_nth_block` of the program. Grid: (F, blocks): programs that run at the same time are of
    many rows. Those of one row would wait for each other where they add to its bins."""
    block = tl.program_id(1)
    return load_nth_block(logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK)


@triton.jit
def load_nth_block(
    logits_ptr,
    stride_logits,
    vocab_start,
    lead,
    width,
    block,
    BLOCK: tl.constexpr,
    OTHER: tl.constexpr = MASKED,
):
    """Returns a block of the program's row: its logits [BLOCK], OTHER outside the shard; their
    ids, int32; whether these are of the shard; and the first id, a multiple of 4.

    The first block begins `lead` = vocab_start % 4 columns before the shard. `lead` is passed in,
    because the compiler specializes an argument that is 0 and then loads four logits at once. It
    cannot infer this from `vocab_start % 4`.
    """
    first_column = block * BLOCK - lead
    columns = first_column + tl.arange(0, BLOCK)
    mask = (columns >= 0) & (columns < width)
    address = logits_ptr + tl.program_id(0).to(tl.int64) * stride_logits + columns
    logits = tl.load(address, mask=mask, other=OTHER)
    return logits, vocab_start + columns, mask, vocab_start + first_column


@triton.jit
def is_done(row_done_ptr, row):
    """Whether the token of a row is known, so that a program has nothing to read; never if None."""
    done = tl.full((), 0, tl.int1)
    if row_done_ptr is not None:
        done = tl.load(row_done_ptr + row)
    return done


@triton.jit
def load_draw(seed_ptr, position_ptr, temperature_ptr, row):
    """Returns the `Draw` of a row."""
    offs = row + tl.arange(0, 1)
    return Draw(
        tl.load(seed_ptr + offs), tl.load(position_ptr + offs), tl.load(temperature_ptr + offs)
    )


@triton.jit
def order_words(logits, ids, mask):
    """Order words int64 [BLOCK], 0 outside the shard."""
    return tl.where(mask, pack(logits, ids), 0)


class Mark(NamedTuple):
    """An order word as numbers that logits are compared with; scalars, or a tensor of each.

    A token is at the word or before it if its logit is at least `at` and its id at most `token`. So
    is one whose logit is at least `after`, the next fp32 number.
    """

    at: tl.tensor  # fp32
    after: tl.tensor  # fp32
    token: tl.tensor  # int32


@triton.jit
def mark_of(word):
    """The `Mark` of an int64 that may be any bound of a search, and that no NaN reaches.

    >>> mark_of(0)  # every token of the shard
    Mark(-inf, -LARGEST, 2^20 - 1)
    """
    key = word >> TOKEN_BITS
    # No order word has the key of -0.0 or one below that of -inf: the next ones stand for them.
    absent = (key < KEY_MINUS_INF) | (key == KEY_MINUS_ZERO)
    at = tl.where(key > KEY_INF, float("inf"), value_of(word) + 0.0)
    bits = at.to(tl.int32, bitcast=True)
    after = (bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)
    token = tl.where(absent, TOKEN_MASK, (~word & TOKEN_MASK).to(tl.int32))
    return Mark(at, after, tl.where(key > KEY_INF, -1, token))


@triton.jit
def upto(logits, ids, mark):
    """Whether tokens are at a mark or before it, which a NaN is not.

    It takes three instructions per logit, and to compare words 25.
    """
    return logits >= tl.where(ids <= mark.token, mark.at, mark.after)


@triton.jit
def best_of_groups(values, ids, mask, GROUP: tl.constexpr):
    """The best word of each GROUP of neighbours, 0 for a group outside the shard.

    It takes two passes like `best_word`, because to pack and compare a word of 64 bits per logit
    costs more.
    """
    GROUPS: tl.constexpr = values.shape[0] // GROUP
    in_groups = tl.where(mask, values, float("-inf")).reshape((GROUPS, GROUP))
    best = max_or_nan(in_groups, 1)
    holds_best = (in_groups == best[:, None]) | (in_groups != in_groups)
    holds_best = holds_best & mask.reshape((GROUPS, GROUP))
    token_id = tl.where(holds_best, ids.reshape((GROUPS, GROUP)), NO_ID)
    token_id = tl.min(token_id, axis=1)
    return tl.where(token_id < NO_ID, pack(best, token_id), 0)


class Best(NamedTuple):
    """The best number of each lane over some blocks, with its id; NO_ID if there was none."""

    numbers: tl.tensor  # fp32 [BLOCK]
    ids: tl.tensor  # int32 [BLOCK]


@triton.jit
def no_best(BLOCK: tl.constexpr):
    """A `Best` of no block."""
    ids = tl.full((BLOCK,), NO_ID, tl.int32)
    return Best(tl.full((BLOCK,), float("-inf"), tl.float32), ids)


@triton.jit
def better(best, values, ids, mask):
    """A `Best` after one more block, whose ids are greater. The first NaN of a lane stays."""
    beats = (values > best.numbers) | (values != values) | (best.ids == NO_ID)
    beats = beats & mask & (best.numbers == best.numbers)
    return Best(tl.where(beats, values, best.numbers), tl.where(beats, ids, best.ids))


@triton.jit
def word_of_best(best):
    """The word of the best number of all lanes; 0 if there is none."""
    value = max_or_nan(best.numbers, 0)
    holds = (best.numbers == value) | (best.numbers != best.numbers)
    token = tl.min(tl.where(holds, best.ids, NO_ID), axis=0)
    return tl.where(token < NO_ID, pack(value, token), 0)


@triton.jit
def block_scores(logits, first_id, draw, sample, DOMAIN: tl.constexpr = DOMAIN_TOKEN):
    """fp32 scores of a block of one row, whose first id is a multiple of 4."""
    scale, gain = row_scale(draw.temperature)
    r0, r1, r2 = row_stream(draw.seed, draw.position, sample, DOMAIN)
    quads = first_id // 4 + tl.arange(0, logits.shape[0] // 4)
    noise = noise_tile(quads, r0, r1, r2).reshape(logits.shape)
    return fma(logits, scale, noise * gain)


@triton.jit
def token_scores(logits, ids, draw, sample):
    """fp32 scores of any ids int32 [n]. Each id takes a Philox call, which `block_scores` makes for
    four ids at once."""
    scale, gain = row_scale(draw.temperature)
    r0, r1, r2 = row_stream(draw.seed, draw.position, sample)
    zero = tl.zeros(ids.shape, tl.uint32)
    k0, k1 = tl.full((1,), KEY0, tl.uint32), tl.full((1,), KEY1, tl.uint32)
    w0, w1, w2, w3 = philox4x32((ids >> 2).to(tl.uint32), r0 + zero, r1 + zero, r2 + zero, k0, k1)
    low, high = tl.where(ids & 1 == 0, w0, w1), tl.where(ids & 1 == 0, w2, w3)
    own = tl.where(ids & 2 == 0, low, high)
    noise = log2_exponential(own, low_base(w0, w1, w2, w3))
    return fma(logits, scale, noise * gain)


@triton.jit
def value_of(word):
    """The fp32 number behind each word's key; NaN for KEY_NAN, -inf for no word, 0."""
    key = tl.maximum((word >> TOKEN_BITS) & KEY_MASK, KEY_MINUS_INF).to(tl.uint32)
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_number(word):
    """Whether a row's first order word is of a logit that can be drawn."""
    key = (word >> TOKEN_BITS) & KEY_MASK
    return (key > KEY_MINUS_INF) & (key != KEY_NAN)


@triton.jit
def nan_word():
    """A word with the key of a NaN; its token id means nothing."""
    return tl.full((), KEY_NAN, tl.int64) << TOKEN_BITS


@triton.jit
def least_logit(top, temperature, y):
    """The least unmasked logit of a row >= max x + T · y, or above; NaN for a NaN.

    Twin: `tpsample.core.order.least_logit`.
    """
    floor = tl.where(top == top, -LARGEST, top)
    if y > float("-inf"):
        floor = logit_from(top, temperature, y)
    return floor


@triton.jit
def logit_from(top, temperature, y):
    """The number of `least_logit` for a finite y."""
    exact = top.to(tl.float64) + temperature.to(tl.float64) * y
    exact = tl.where(exact < -LARGEST, -LARGEST, exact)
    floor = exact.to(tl.float32)
    bits = floor.to(tl.int32, bitcast=True)
    above = (bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)
    return tl.where(floor.to(tl.float64) < exact, above, floor)


@triton.jit
def mass_limit(total, share):
    """int64: tokens before which there is less mass are kept; 2^62 where the share is all."""
    limit = tl.ceil(total.to(tl.float64) * share).to(tl.int64)
    return tl.where(share < 1, limit, tl.full((), 1 << 62, tl.int64))


@triton.jit
def pop(scores, orders):
    """The largest score word with its order word, and the scores without it; 0 and 0 at the end."""
    best = tl.max(scores, axis=0)
    order = tl.sum(tl.where((scores == best) & (best > 0), orders, 0), axis=0)
    return best, order, tl.where(scores == best, 0, scores)


@triton.jit
def _greater(one, other):
    return tl.maximum(one, other)


@triton.jit
def records(orders):
    """For each order word the largest of it and all in front of it."""
    return tl.associative_scan(orders, 0, _greater)


@triton.jit
def group_columns(word, inside, vocab_start, lead, GROUP: tl.constexpr):
    """Columns int32 of the group in which a word's token lies, at places `inside` of it."""
    column = ((word & TOKEN_MASK) ^ TOKEN_MASK).to(tl.int32) - vocab_start
    return (column + lead) // GROUP * GROUP + inside - lead


@triton.jit(do_not_specialize=STEP_NUMBERS)
def group_first_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    # outputs
    words_ptr,  # [F, groups] int64
    # sizes
    groups,
    vocab_start,
    lead,
    width,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first order word of each group of ids. Grid: (F, blocks)."""
    row, block = tl.program_id(0), tl.program_id(1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    words = words_ptr + row.to(tl.int64) * groups + group
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    tl.store(words, best_of_groups(logits, ids, mask, GROUP), mask=group < groups)


@row_kernel
def group_words_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    first_ptr,  # [F, count] int64: a word of each chosen group, or 0
    least_ptr,  # [F] int64
    # outputs
    words_ptr,  # [F, count · GROUP] int64, in any order
    number_ptr,  # [F] int32, how many words there are, zero before
    # sizes
    vocab_start,
    lead,
    width,
    GROUP: tl.constexpr,
):
    """The order words of some groups that are not less than the least. Grid: (count, F)."""
    place, row, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    group = tl.load(first_ptr + row.to(tl.int64) * count + place)
    if group > 0:
        columns = group_columns(group, tl.arange(0, GROUP), vocab_start, lead, GROUP)
        mask = (columns >= 0) & (columns < width)
        logits = logits_ptr + row.to(tl.int64) * stride_logits + columns
        logits = tl.load(logits, mask=mask, other=0.0)
        words = order_words(logits, vocab_start + columns, mask)
        listed = words >= tl.load(least_ptr + row)
        number = tl.sum(listed.to(tl.int32), axis=0)
        out = words_ptr + row.to(tl.int64) * count * GROUP
        out += tl.atomic_add(number_ptr + row, number, sem="relaxed")
        tl.store(out + tl.cumsum(listed.to(tl.int32), axis=0) - 1, words, mask=listed)
