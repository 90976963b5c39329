"""The largest of a row's words, by one program.

Twin: `torch.topk`, which looks at the 64 bits of every word two at a time, and needs a launch more
to put what it finds in order.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.order import ROW_POINTERS

NO_WORD = Constant(1 << 62)
"""Above all words."""


@triton.jit
def words_at(row_words_ptr, start, number, BLOCK: tl.constexpr):
    """Words [BLOCK] of a row from a place on; 0 behind the last."""
    offs = start + tl.arange(0, BLOCK)
    return tl.load(row_words_ptr + offs, mask=offs < number, other=0)


@triton.jit
def number_from(row_words_ptr, least, number, BLOCK: tl.constexpr):
    """How many words of a row are >= a least one."""
    found = tl.full((), 0, tl.int32)
    for start in range(0, number, BLOCK):
        words = words_at(row_words_ptr, start, number, BLOCK)
        found += tl.sum((words >= least).to(tl.int32), axis=0)
    return found


@triton.jit(do_not_specialize=["num_words", "count"], do_not_specialize_on_alignment=ROW_POINTERS)
def largest_kernel(
    # inputs
    words_ptr,  # [F, num_words] int64 >= 0; all but 0 differ within a row
    number_ptr,  # [F] int32: how many words of a row count, or None: all
    # outputs
    largest_ptr,  # [F, count] int64, then 0
    least_ptr,  # [F] int64 that they alone reach, or 1 where there are fewer; or None
    zero_ptr,  # [F] int32, becomes 0; or None
    # sizes
    num_words,
    count,
    ORDERED: tl.constexpr,  # whether they are descending, or in any order
    MOST: tl.constexpr,  # >= count
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest words of each row. Grid: (F,).

    Halving finds a word such that as many as are wanted are not less. These are written down in
    any order, and then each counts how many of them are greater, which is its place.
    """
    row = tl.program_id(0).to(tl.int64)
    words, largest = words_ptr + row * num_words, largest_ptr + row * count
    number = num_words
    if number_ptr is not None:
        number = tl.minimum(num_words, tl.load(number_ptr + row))
    if zero_ptr is not None:
        tl.store(zero_ptr + row, 0)

    # As many as `found` words are >= least, and fewer than `count` are >= above.
    least, above = tl.full((), NO_WORD, tl.int64), tl.full((), 1, tl.int64)
    for start in range(0, number, BLOCK):
        its = words_at(words, start, number, BLOCK)
        least = tl.minimum(least, tl.min(tl.where(its > 0, its, NO_WORD), axis=0))
        above = tl.maximum(above, 1 + tl.max(its, axis=0))
    found = number_from(words, least, number, BLOCK)
    while (found > count) & (above - least > 1):
        middle = least + ((above - least) >> 1)
        of_middle = number_from(words, middle, number, BLOCK)
        if of_middle < count:
            above = middle
        else:
            least, found = middle, of_middle

    written = tl.full((), 0, tl.int32)
    for start in range(0, number, BLOCK):
        its = words_at(words, start, number, BLOCK)
        chosen = (its >= least).to(tl.int32)
        place = written + tl.cumsum(chosen, axis=0) - 1
        tl.store(largest + place, its, mask=(chosen > 0) & (place < count))
        written += tl.sum(chosen, axis=0)
    found = tl.minimum(written, count)
    if least_ptr is not None:
        tl.store(least_ptr + row, tl.where(found < count, 1, least))

    offs = tl.arange(0, MOST)
    if ORDERED:
        tl.debug_barrier()  # every thread sees what the others have written
        own = tl.load(largest + offs, mask=offs < found, other=0)
        greater = tl.zeros((MOST,), tl.int32)
        for start in range(0, found, CHUNK):
            others = words_at(largest, start, found, CHUNK)
            greater += tl.sum((others[None, :] > own[:, None]).to(tl.int32), axis=1)
        tl.debug_barrier()  # and none writes before all have read
        place = tl.where(offs < found, greater, offs)
        tl.store(largest + place, own, mask=offs < count)
    else:
        none = tl.zeros((MOST,), tl.int64)
        tl.store(largest + offs, none, mask=(offs >= found) & (offs < count))
