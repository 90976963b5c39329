"""The first words of a row's order, by the groups of ids in which they lie.

Twin: `ShardLogits.first_words` of `tpsample.logits.shard_logits`, whose docstring says why these
groups are enough.
"""

import triton
import triton.language as tl

from tpsample.kernels.epilogue import TOKEN_MASK
from tpsample.kernels.order import best_of_groups, is_done, load_block, order_words


@triton.jit
def group_columns(word, inside, vocab_start, lead, GROUP: tl.constexpr):
    """Columns int32 of the group in which a word's token lies, at places `inside` of it."""
    column = ((word & TOKEN_MASK) ^ TOKEN_MASK).to(tl.int32) - vocab_start
    return (column + lead) // GROUP * GROUP + inside - lead


@triton.jit(do_not_specialize=["groups"])
def group_first_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    row_done_ptr,  # [F] bool, or None
    # outputs
    words_ptr,  # [F, groups] int64; 0 in rows that are done
    # sizes
    groups,
    vocab_start,
    lead,
    width,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first order word of each group of ids. Grid: (blocks, F)."""
    block, row = tl.program_id(0), tl.program_id(1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    words = words_ptr + row.to(tl.int64) * groups + group
    if is_done(row_done_ptr, row):
        tl.store(words, tl.zeros_like(group).to(tl.int64), mask=group < groups)
        return
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    tl.store(words, best_of_groups(logits, ids, mask, GROUP), mask=group < groups)


@triton.jit
def group_words_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    first_ptr,  # [F, count] int64, a word of each chosen group
    # outputs
    words_ptr,  # [F, count, GROUP] int64; 0 outside the shard
    # sizes
    vocab_start,
    lead,
    width,
    GROUP: tl.constexpr,
):
    """All order words of some groups. Grid: (count, F)."""
    place, row, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    word = tl.load(first_ptr + row * count + place)
    columns = group_columns(word, tl.arange(0, GROUP), vocab_start, lead, GROUP)
    mask = (columns >= 0) & (columns < width)
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride_logits + columns, mask=mask, other=0.0)
    words = order_words(logits, vocab_start + columns, mask)
    out = words_ptr + (row.to(tl.int64) * count + place) * GROUP
    tl.store(out + tl.arange(0, GROUP), words)
