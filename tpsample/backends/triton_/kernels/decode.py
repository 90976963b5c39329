"""Words to tokens and status, of every row and of the rows that a filter has drawn anew.

Twin: `backends.torch_.decode`.
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
WORD_LOST = Constant(word.LOST)
STATUS_PEER_LOST = Constant(int(word.Status.PEER_LOST))
STATUS_BAD_SLOT = Constant(int(word.Status.BAD_SLOT))
STATUS_EMPTY = Constant(int(word.Status.EMPTY))
OF_ANY_ADDRESS = [
    *("seed_ptr", "undrawn_ptr", "bad_ptr", "filtered_ptr", "place_ptr"),
    *("token_ptr", "status_ptr", "out_seed_ptr"),
]
"""Arguments whose addresses make no other kernel."""


@triton.jit
def decode(best):
    """Winning int64 words to (token id int64, status int32); -1 where there is none."""
    key = (best >> TOKEN_BITS) & 0xFFFFFFFF
    is_nan = key == KEY_NAN
    is_empty = key <= KEY_MINUS_INF
    token_id = tl.where(is_nan | is_empty, NO_TOKEN, (best & TOKEN_MASK) ^ TOKEN_MASK)
    status = tl.where(is_nan, STATUS_NAN, tl.where(is_empty, STATUS_EMPTY, 0))
    return token_id, status.to(tl.int32)


@triton.jit
def flags_at(flag_ptr, rows, mask):
    """The flags of some rows, int1; false where a mask is, or where there are none."""
    if flag_ptr is None:
        return rows < 0
    else:
        return tl.load(flag_ptr + rows, mask=mask, other=0) != 0


@triton.jit
def status_of(row_status, undrawn, bad_ptr, rows):
    """The status of rows: that of their words, or of its slot where a row is not drawn."""
    bad = flags_at(bad_ptr, rows, undrawn)
    return tl.where(undrawn, tl.where(bad, STATUS_BAD_SLOT, 0), row_status)


@triton.jit(
    do_not_specialize=STEP_NUMBERS,
    do_not_specialize_on_alignment=OF_ANY_ADDRESS,
)
def decode_kernel(
    # inputs
    words_ptr,  # [num_sources, …] int64; zero afterwards, for the next step
    stride_words_s,
    seed_ptr,  # [num_rows] int64
    undrawn_ptr,  # [num_rows] bool, rows that get no token, or None
    bad_ptr,  # [num_rows] bool, those of them whose slot is bad, or None
    filtered_ptr,  # [F, num_samples] int64, the words that some rows have instead, or None
    place_ptr,  # [num_rows] int32, the place of each row among them, -1 or F or more if it has none
    # outputs
    token_ptr,  # [num_rows, num_samples] int64
    status_ptr,  # [num_rows] int32
    out_seed_ptr,  # [num_rows] int64, a copy: the batch may change its own
    # sizes
    num_rows,
    num_filtered,
    num_samples,
    num_sources,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether it is launched before the kernel that makes the words ends
):
    if OVERLAP:
        wait_for_previous_launch()
    offs_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_b = offs_b < num_rows
    row_status, undrawn = tl.zeros((BLOCK,), tl.int32), flags_at(undrawn_ptr, offs_b, mask_b)
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
        lost = best == WORD_LOST
        if filtered_ptr is not None:
            place = tl.load(place_ptr + offs_b, mask=mask_b, other=-1)
            found = (place >= 0) & (place < num_filtered) & (lost == 0)
            own = tl.load(filtered_ptr + place * num_samples + sample, mask=found, other=0)
            best = tl.where(found, own, best)
        token_id, status = decode(best)
        status = tl.where(lost, STATUS_PEER_LOST, status)
        token_id = tl.where(undrawn, NO_TOKEN, token_id)
        tl.store(token_ptr + offs_b * num_samples + sample, token_id, mask=mask_b)
        row_status = tl.maximum(row_status, status)
    row_status = status_of(row_status, undrawn, bad_ptr, offs_b)
    tl.store(status_ptr + offs_b, row_status, mask=mask_b)
    tl.store(out_seed_ptr + offs_b, tl.load(seed_ptr + offs_b, mask=mask_b), mask=mask_b)
