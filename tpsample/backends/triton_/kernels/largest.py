"""The largest of a row's words, by one program.

Twin: `torch.topk`. It looks at the 64 bits of every word two at a time, and needs a launch more to
sort the words that it finds.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.order import row_kernel

NO_WORD = Constant(1 << 62)
"""Above all words."""
ONE_BY_ONE = Constant(16)
"""As many words are found sooner one after the other, each the largest of all that are left."""
COUNT_BITS = Constant(20)
COUNT_MASK = Constant((1 << 20) - 1)


@triton.jit
def words_at(row_words_ptr, start, number, BLOCK: tl.constexpr):
    """Words [BLOCK] of a row from a place on; 0 behind the last."""
    offs = start + tl.arange(0, BLOCK)
    return tl.load(row_words_ptr + offs, mask=offs < number, other=0)


@triton.jit
def number_from(row_words_ptr, least, number, BLOCK: tl.constexpr):
    """How many words of a row are >= a least one."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, number, BLOCK):
        words = words_at(row_words_ptr, start, number, BLOCK)
        count += tl.sum((words >= least).to(tl.int32), axis=0)
    return count


@triton.jit
def places_of(words, row_words_ptr, number, CHUNK: tl.constexpr):
    """For each of some words, how many words of a row are greater, int32."""
    greater = tl.zeros(words.shape, tl.int32)
    for start in range(0, number, CHUNK):
        others = words_at(row_words_ptr, start, number, CHUNK)
        greater += tl.sum((others[None, :] > words[:, None]).to(tl.int32), axis=1)
    return greater


@triton.jit
def ends_of(words, least, above):
    """The smallest of these words and one more than the largest, beside the ends of others."""
    least = tl.minimum(least, tl.min(tl.where(words > 0, words, NO_WORD), axis=0))
    return least, tl.maximum(above, 1 + tl.max(words, axis=0))


@triton.jit
def halved(words, least, above, reaching, count):
    """A number that the `count` largest words reach and no other word does.

    Each round counts against three numbers and keeps a quarter of the span, because one sum over
    all threads brings three counts.
    """
    while (reaching > count) & (above - least > 1):
        step = (above - least + 3) >> 2
        first, second, third = least + step, least + 2 * step, least + 3 * step
        counts = (words >= first).to(tl.int64) + ((words >= second).to(tl.int64) << COUNT_BITS)
        counts = tl.sum(counts + ((words >= third).to(tl.int64) << (2 * COUNT_BITS)), axis=0)
        of_first, of_second = counts & COUNT_MASK, (counts >> COUNT_BITS) & COUNT_MASK
        of_third = counts >> (2 * COUNT_BITS)
        if of_third >= count:
            least, reaching = third, of_third.to(tl.int32)
        elif of_second >= count:
            least, above, reaching = second, third, of_second.to(tl.int32)
        elif of_first >= count:
            least, above, reaching = first, second, of_first.to(tl.int32)
        else:
            above = first
    return least


@triton.jit
def halved_in_memory(row_words_ptr, number, least, above, reaching, count, BLOCK: tl.constexpr):
    """Do what `halved` does, with more words than find registers."""
    while (reaching > count) & (above - least > 1):
        middle = least + ((above - least) >> 1)
        of_middle = number_from(row_words_ptr, middle, number, BLOCK)
        if of_middle < count:
            above = middle
        else:
            least, reaching = middle, of_middle
    return least


@row_kernel
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

    Few are taken one by one. For more, halving finds a word such that as many as are wanted are not
    less. These are written down in any order, and then each counts how many of them are greater,
    which is its place. Where there are hardly more words than places, each word counts at once.
    """
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    words, largest = words_ptr + row * num_words, largest_ptr + row * count
    number = num_words
    if number_ptr is not None:
        number = tl.minimum(num_words, tl.load(number_ptr + row))
    if zero_ptr is not None:
        tl.store(zero_ptr + row, 0)
    if ORDERED:  # noqa: SIM102
        if number <= MOST:
            own = tl.load(words + offs, mask=offs < number, other=0)
            place, present = places_of(own, words, number, CHUNK), own > 0
            tl.store(largest + place, own, mask=present & (place < count))
            num_present = tl.sum(present.to(tl.int32), axis=0)
            tl.store(
                largest + offs, tl.zeros_like(own), mask=(offs >= num_present) & (offs < count)
            )
            return

    if (number <= BLOCK) & (count <= ONE_BY_ONE):
        block, best = words_at(words, 0, number, BLOCK), tl.full((), 0, tl.int64)
        for place in range(count):
            best = tl.max(block, axis=0)
            tl.store(largest + place, best)
            block = tl.where(block == best, 0, block)
        if least_ptr is not None:
            tl.store(least_ptr + row, tl.maximum(best, 1))
        return

    # As many as `reaching` words are >= least, and fewer than `count` are >= above.
    least, above = tl.full((), NO_WORD, tl.int64), tl.full((), 1, tl.int64)
    if number <= BLOCK:
        block = words_at(words, 0, number, BLOCK)
        least, above = ends_of(block, least, above)
        reaching = tl.sum((block >= least).to(tl.int32), axis=0)
        least = halved(block, least, above, reaching, count)
    else:
        for start in range(0, number, BLOCK):
            block = words_at(words, start, number, BLOCK)
            least, above = ends_of(block, least, above)
        reaching = number_from(words, least, number, BLOCK)
        least = halved_in_memory(words, number, least, above, reaching, count, BLOCK)

    written = tl.full((), 0, tl.int32)
    for start in range(0, number, BLOCK):
        block = words_at(words, start, number, BLOCK)
        chosen = (block >= least).to(tl.int32)
        place = written + tl.cumsum(chosen, axis=0) - 1
        tl.store(largest + place, block, mask=(chosen > 0) & (place < count))
        written += tl.sum(chosen, axis=0)
    num_written = tl.minimum(written, count)
    if least_ptr is not None:
        tl.store(least_ptr + row, tl.where(num_written < count, 1, least))

    if ORDERED:
        tl.debug_barrier()  # every thread sees what the others have written
        own = tl.load(largest + offs, mask=offs < num_written, other=0)
        greater = places_of(own, largest, num_written, CHUNK)
        tl.debug_barrier()  # and none writes before all have read
        place = tl.where(offs < num_written, greater, offs)
        tl.store(largest + place, own, mask=offs < count)
    else:
        none = tl.zeros((MOST,), tl.int64)
        tl.store(largest + offs, none, mask=(offs >= num_written) & (offs < count))
