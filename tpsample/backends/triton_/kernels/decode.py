"""Words to tokens and status, of every row and of the rows that a filter has drawn anew.

Twins: `backends.torch_.decode`, and `ShardLogits.write_tokens` of `backends.torch_.passes`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS, Constant
from tpsample.backends.triton_.kernels.head import KEY_NAN, TOKEN_BITS, TOKEN_MASK
from tpsample.backends.triton_.kernels.overlap import wait_for_previous_launch
from tpsample.core import word

NO_TOKEN = Constant(word.NO_TOKEN)
KEY_MINUS_INF = Constant(word.KEY_MINUS_INF)
STATUS_NAN = Constant(int(word.Status.NAN))
STATUS_PEER_LOST = Constant(int(word.Status.PEER_LOST))
STATUS_EMPTY = Constant(int(word.Status.EMPTY))


@triton.jit
def decode(best):
    """Winning int64 words to (token id int64, status int32); -1 where there is none."""
    key = (best >> TOKEN_BITS) & 0xFFFFFFFF
    is_nan = key == KEY_NAN
    is_empty = key <= KEY_MINUS_INF
    token_id = tl.where(is_nan | is_empty, NO_TOKEN, (best & TOKEN_MASK) ^ TOKEN_MASK)
    status = tl.where(is_nan, STATUS_NAN, tl.where(is_empty, STATUS_EMPTY, 0))
    return token_id, status.to(tl.int32)


@triton.jit(
    do_not_specialize=STEP_NUMBERS,
    do_not_specialize_on_alignment=["seed_ptr", "token_ptr", "status_ptr", "out_seed_ptr"],
)
def decode_kernel(
    # inputs
    words_ptr,  # [num_sources, …] int64; zero afterwards, for the next step
    stride_words_s,
    seed_ptr,  # [num_rows] int64
    # outputs
    token_ptr,  # [num_rows, num_samples] int64
    status_ptr,  # [num_rows] int32
    out_seed_ptr,  # [num_rows] int64, a copy: the batch may change its own
    # sizes
    num_rows,
    num_samples,
    num_sources,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether it is launched before the kernel that makes the words ends
):
    if OVERLAP:
        wait_for_previous_launch()
    offs_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_b = offs_b < num_rows
    row_status = tl.zeros((BLOCK,), tl.int32)
    for sample in range(num_samples):
        best = tl.zeros((BLOCK,), tl.int64)
        for source in range(num_sources):
            words = words_ptr + source * stride_words_s + sample * num_rows + offs_b
            best = tl.maximum(best, tl.load(words, mask=mask_b, other=0))
        # Several threads may have read a word that one of them clears.
        tl.debug_barrier()
        for source in range(num_sources):
            words = words_ptr + source * stride_words_s + sample * num_rows + offs_b
            tl.store(words, tl.zeros((BLOCK,), tl.int64), mask=mask_b)
        token_id, status = decode(best)
        tl.store(token_ptr + offs_b * num_samples + sample, token_id, mask=mask_b)
        row_status = tl.maximum(row_status, status)
    tl.store(status_ptr + offs_b, row_status, mask=mask_b)
    tl.store(out_seed_ptr + offs_b, tl.load(seed_ptr + offs_b, mask=mask_b), mask=mask_b)


@triton.jit(
    do_not_specialize=STEP_NUMBERS,
    do_not_specialize_on_alignment=["row_ptr", "token_ptr", "status_ptr"],
)
def write_tokens_kernel(
    # inputs
    words_ptr,  # [F, num_samples] int64
    row_ptr,  # [F] int64, their places in the batch
    # outputs
    token_ptr,  # [num_rows, num_samples] int64
    status_ptr,  # [num_rows] int32; a lost row stays lost
    # sizes
    num_samples,
):
    """Overwrite the tokens and status of some rows. Grid: (F,)."""
    filtered = tl.program_id(0)
    row = tl.load(row_ptr + filtered)
    lost = tl.load(status_ptr + row) == STATUS_PEER_LOST
    row_status = tl.full((), 0, tl.int32)
    for sample in range(num_samples):
        token_id, status = decode(tl.load(words_ptr + filtered * num_samples + sample))
        tl.store(token_ptr + row * num_samples + sample, tl.where(lost, NO_TOKEN, token_id))
        row_status = tl.maximum(row_status, status)
    # Every thread has read the status that one of them replaces.
    tl.debug_barrier()
    tl.store(status_ptr + row, tl.where(lost, STATUS_PEER_LOST, row_status))
