"""The largest words of each row as one Triton launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tpsample.backends.torch_ import logprobs as plain
from tpsample.backends.triton_.kernels.largest import largest_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.request.row_filter import MAX_TOP_WORDS, MAX_WEIGHED_WORDS

FEW, MOST = MAX_TOP_WORDS, MAX_WEIGHED_WORDS
"""Words that one program puts in order. A kernel for few of them serves most requests, and no third
one: a request must not compile what another of its kind has not."""
BLOCK = 4096
COMPARED = 2**14
"""Pairs of words that a program compares at a time, so that they find registers."""


class Start(NamedTuple):
    """Numbers that the first of two selections leaves for the launch between them.

    Attributes:
        least: int64 [F], becomes a number that the words that were found reach and no other does;
            1 where there are fewer than were wanted.
        number: int32 [F], becomes 0.
    """

    least: Tensor
    number: Tensor


def largest(
    words: Tensor,
    count: int,
    number: Tensor | None = None,
    *,
    start: Start | None = None,
    ordered: bool = True,
    most: int | None = None,
) -> Tensor:
    """Return the `count` largest words of each row, int64 [F, count], then 0.

    Args:
        words: int64 [F, n] >= 0, which differ within a row, but for 0.
        count: at most MOST.
        number: int32 [F], how many words of a row count, from its first on; None for all.
        start: is written.
        ordered: whether they are descending, or in any order.
        most: FEW or MOST; None takes the one for `count`.
    """
    words = words.contiguous()
    selected, most = words.new_empty(words.shape[0], count), most or (FEW if count <= FEW else MOST)
    if words.shape[0]:
        launch_kernel(
            largest_kernel,
            (words.shape[0],),
            words_ptr=words,
            number_ptr=number,
            largest_ptr=selected,
            least_ptr=start and start.least,
            zero_ptr=start and start.number,
            num_words=words.shape[1],
            count=count,
            ORDERED=ordered,
            MOST=most,
            CHUNK=COMPARED // most,
            BLOCK=BLOCK,
            num_warps=16 if ordered else 8,  # else registers spill
        )
    return selected


def in_order(words: Tensor) -> Tensor:
    """Return the words of each row, int64 [F, n] >= 0, in falling order."""
    if words.shape[1] > MOST:
        return words.sort(dim=1, descending=True).values
    return largest(words, words.shape[1], most=MOST)  # how many there are follows from logits


def first_of(gathered: Tensor, count: int) -> Tensor:
    """Return the first words over all ranks, int64 [F, count], of [W, F, count or more]."""
    if gathered.shape[0] == 1 or count > MOST:
        return plain.first_of(gathered, count)
    return largest(gathered[:, :, :count].transpose(0, 1).flatten(1), count)
