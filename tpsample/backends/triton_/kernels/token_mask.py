"""The ids each row may draw in a step, as packed bits over a shard.

Twin: `tpsample.request.controls.apply`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS


@triton.jit
def clear_bits(mask_row, token_ids, first_id, width):
    """Clear the bits of all ids [n] that the shard's columns cover; a negative id has none."""
    column = token_ids - first_id
    mine = (token_ids >= 0) & (column >= 0) & (column < width)
    column = tl.where(mine, column, 0)
    bit = tl.full(column.shape, 1, tl.int32) << (column & 31)
    tl.atomic_and(mask_row + (column >> 5), ~bit, mask=mine, sem="relaxed", scope="cta")


@triton.jit
def vocab_words(allowed_row, grammar_row, at, vocab_size):
    """Returns words `at` [n], int64, of the whole vocabulary's bits, 32 in each.

    A bit is set if both the allowed ids and the grammar leave its id, and it lies in [0, V).
    """
    bits_left = tl.minimum(tl.maximum(vocab_size - at * 32, 0), 32).to(tl.int64)
    words = (tl.full(at.shape, 1, tl.int64) << bits_left) - 1
    inside = at * 32 < vocab_size
    if allowed_row is not None:
        words &= tl.load(allowed_row + at, mask=inside, other=0).to(tl.int64)
    if grammar_row is not None:
        words &= tl.load(grammar_row + at, mask=inside, other=0).to(tl.int64)
    return words


@triton.jit
def count_bits(words):
    """How many of the low 32 bits of each int64 are set."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return (words + (words >> 16)) & 0x3F


@triton.jit(
    do_not_specialize=[*STEP_NUMBERS, "width"],
    do_not_specialize_on_alignment=["grammar_ptr", "forced_ptr"],
)
def token_mask_kernel(
    # inputs
    state_slot_ptr,  # [num_rows] int64
    allowed_ptr,  # [slots, ceil(vocab_size / 32)] int32, or None
    grammar_ptr,  # [num_rows, ceil(vocab_size / 32)] int32, or None
    stride_grammar_b,
    forced_ptr,  # [num_rows] int64, or None
    min_tokens_ptr,  # [slots] int32
    length_ptr,  # [slots] int32
    stop_ptr,  # [slots, num_stop] int32, each once, then -1
    bad_word_ptr,  # [slots, num_bad, bad_length] int32, backwards, padded with -1
    recent_ptr,  # [slots, num_recent] int32, latest first
    draft_ptr,  # [num_rows, max_drafts] int32, or None
    num_drafts_ptr,  # [num_rows] int32, or None
    # outputs
    mask_ptr,  # [num_rows, width / 32] int32
    # sizes
    first_id,
    width,
    vocab_size,
    num_stop,
    num_bad,
    bad_length,
    num_recent,
    max_drafts,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_slot_ptr + row)
    words = width // 32
    mask_row = mask_ptr + row * words
    allowed_row, grammar_row = None, None
    if allowed_ptr is not None:
        allowed_row = allowed_ptr + slot * tl.cdiv(vocab_size, 32)
    if grammar_ptr is not None:
        grammar_row = grammar_ptr + row * stride_grammar_b
    forced = tl.full((), -1, tl.int64)
    if forced_ptr is not None:
        forced = tl.load(forced_ptr + row)
    drafts = 0
    if draft_ptr is not None:
        drafts = tl.load(num_drafts_ptr + row)

    for start in range(0, words, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        at = first_id // 32 + offs
        low = vocab_words(allowed_row, grammar_row, at, vocab_size)
        high = vocab_words(allowed_row, grammar_row, at + 1, vocab_size)
        mask = (((high << 32) | low) >> (first_id % 32)).to(tl.int32)
        if forced_ptr is not None:
            column = forced - first_id
            bit = (tl.full((), 1, tl.int64) << (column & 31)).to(tl.int32)
            mask = tl.where(forced != -1, tl.where(column >> 5 == offs, bit, 0), mask)
        tl.store(mask_row + offs, mask, mask=offs < words)

    if TABLES:
        tl.debug_barrier()  # the bits below were stored by other threads of this program
        free = forced == -1
        offs_n = tl.arange(0, BLOCK_N)
        too_short = tl.load(length_ptr + slot) + drafts < tl.load(min_tokens_ptr + slot)
        if free & too_short:
            # Ids left beside the stop ids, over the whole vocabulary.
            others = tl.full((), 0, tl.int64)
            for start in range(0, tl.cdiv(vocab_size, 32), BLOCK):
                at = start + tl.arange(0, BLOCK)
                left = vocab_words(allowed_row, grammar_row, at, vocab_size)
                others += tl.sum(count_bits(left), axis=0)
            for start in range(0, num_stop, BLOCK_N):
                n = start + offs_n
                stop = tl.load(stop_ptr + slot * num_stop + n, mask=n < num_stop, other=-1)
                at = tl.where(stop >= 0, stop >> 5, vocab_size)
                left = vocab_words(allowed_row, grammar_row, at, vocab_size)
                others -= tl.sum((left >> (stop & 31)) & 1, axis=0)
            for start in range(0, num_stop, BLOCK_N):
                n = start + offs_n
                stop = tl.load(stop_ptr + slot * num_stop + n, mask=n < num_stop, other=-1)
                clear_bits(mask_row, tl.where(others > 0, stop, -1), first_id, width)
        for start in range(0, num_bad, BLOCK_N):
            n = start + offs_n
            sequence = bad_word_ptr + (slot * num_bad + n) * bad_length
            last = tl.load(sequence, mask=n < num_bad, other=-1)
            begun = last >= 0
            for j in range(1, bad_length):
                wanted = tl.load(sequence + j, mask=n < num_bad, other=-1)
                drawn = recent_ptr + slot * num_recent + j - 1 - drafts
                latest = tl.load(drawn, mask=j > drafts, other=-2)
                if draft_ptr is not None:
                    draft = draft_ptr + row * max_drafts + drafts - j
                    latest = tl.load(draft, mask=j <= drafts, other=latest)
                begun &= (wanted == -1) | (wanted == latest)
            clear_bits(mask_row, tl.where(free & begun, last, -1), first_id, width)
