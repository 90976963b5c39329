"""Tokens that rows have drawn, counted in the tables and in the state of a shard.

Twin: `ControlTables.append` of `tpsample.request.controls.tables`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS, Constant
from tpsample.core import touched as touched_blocks

HAS_HISTORY = Constant(touched_blocks.HAS_HISTORY)
TOUCHED_BLOCK = Constant(touched_blocks.TOUCHED_BLOCK)


@triton.jit(
    do_not_specialize=[*STEP_NUMBERS, "width"],
    do_not_specialize_on_alignment=["token_ptr"],
)
def append_kernel(
    # inputs
    slot_ptr,  # [B] int64
    token_ptr,  # [B, num_tokens] int64
    stride_token_b,
    stride_token_n,
    # outputs
    length_ptr,  # [slots] int32; None if no row has masks
    recent_ptr,  # [slots, num_recent] int32, latest first; likewise
    history_ptr,  # [slots, width] int32; None if no row has penalties, or there is no shard
    touched_ptr,  # [slots, width / TOUCHED_BLOCK] int32; likewise
    # sizes
    num_tokens,
    num_recent,
    idle_slot,
    vocab_size,
    shard_start,
    shard_stop,
    first_id,
    width,
):
    """Count the tokens of one row, in order. Grid: (B,), one warp each."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    # One thread writes, and reads again what it has written itself.
    for n in range(num_tokens):
        token = tl.load(token_ptr + row * stride_token_b + n * stride_token_n)
        if (token >= 0) & (token < vocab_size) & (slot != idle_slot):
            if length_ptr is not None:
                for k in range(1, num_recent):
                    at = recent_ptr + slot * num_recent + num_recent - k
                    tl.store(at, tl.load(at - 1))
                tl.store(length_ptr + slot, tl.load(length_ptr + slot) + 1)
                tl.store(recent_ptr + slot * num_recent, token.to(tl.int32))
            if history_ptr is not None:  # noqa: SIM102 (one is known to the compiler)
                if (token >= shard_start) & (token < shard_stop):
                    count = history_ptr + slot * width + token - first_id
                    block = slot * (width // TOUCHED_BLOCK) + (token - first_id) // TOUCHED_BLOCK
                    tl.store(count, tl.load(count) + 2)
                    tl.store(touched_ptr + block, tl.load(touched_ptr + block) | HAS_HISTORY)
