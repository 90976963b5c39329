"""A mark compares logits as their order words compare, whatever word it is of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tpsample.backends.triton_.kernels import order as triton_order
from tpsample.core import order, word

INF = float("inf")
TINY = 2.0**-149
LOGITS = torch.tensor(
    [-INF, -order.LARGEST, -1.5, -TINY, -0.0, 0.0, TINY, 1.0, 1.5, order.LARGEST, INF] * 2
)
N = 32
MARKS = {
    "of tokens": order.order_words(LOGITS, 5).tolist(),
    "beside them": [w + by for w in order.order_words(LOGITS, 5).tolist() for by in (-1, 1)],
    "with ties": [
        w & ~word.TOKEN_MASK | bits
        for w in order.order_words(LOGITS, 5).tolist()
        for bits in (0, word.TOKEN_MASK)
    ],
    "of no token": [
        *(0, 1, word.TOKEN_MASK, word.LOWEST_DRAWABLE, order.ABOVE_ALL, 1 << 57),
        *(
            key << word.TOKEN_BITS | word.TOKEN_MASK - 6  # of the id 6
            for key in (word.KEY_MINUS_INF - 1, 0x7FFFFFFF, 0xFF800001)
        ),
        (word.KEY_NAN << word.TOKEN_BITS) - 1,
    ],
}


@triton.jit
def probe(logits_ptr, word_ptr, out_ptr, first_id, count, N: tl.constexpr):  # type: ignore
    offs = tl.arange(0, N)
    logits = tl.load(logits_ptr + offs, mask=offs < count, other=float("nan"))
    mark = triton_order.mark_of(tl.load(word_ptr + tl.program_id(0)))
    reached = triton_order.upto(logits, first_id + offs, mark)
    tl.store(out_ptr + tl.program_id(0) * N + offs, reached)


@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
def test_tokens_reach_a_mark_as_their_words_do(marks: list[int]) -> None:
    words = torch.tensor(marks)
    out = torch.empty(len(words), N, dtype=torch.bool)
    launch: Any = probe[(len(words),)]  # type: ignore[index]
    launch(LOGITS, words, out, 5, len(LOGITS), N)
    expected = order.order_words(LOGITS, 5) >= words.unsqueeze(1)
    assert torch.equal(out[:, : len(LOGITS)], expected)
    assert not out[:, len(LOGITS) :].any(), "a column beside the shard has a NaN's place"
