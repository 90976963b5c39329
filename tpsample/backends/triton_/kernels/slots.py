"""The rows of a step over slots, and which of them are drawn.

Twin: `Selection` of `tpsample.request.selection`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.request import selection

PADDING = Constant(selection.PADDING)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def read_slots_kernel(
    # inputs
    slot_ptr,  # [num_rows] int64, as the caller named them
    occupancy_ptr,  # [num_slots + 1] int64, below 0 where there is no request
    temperature_ptr,  # [num_slots + 1] fp32
    seed_ptr,  # [num_slots + 1] int64
    # outputs
    index_ptr,  # [num_rows] int64, the slot that a row reads, num_slots if it is not drawn
    undrawn_ptr,  # [num_rows] bool
    bad_ptr,  # [num_rows] bool, whether it is not drawn, and no padding
    row_temperature_ptr,  # [num_rows] fp32
    row_seed_ptr,  # [num_rows] int64
    # sizes
    num_rows,
    num_slots,
    BLOCK: tl.constexpr,
):
    """Find the slots that rows read. Grid: (ceil(num_rows / BLOCK),)."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_rows
    slots = tl.load(slot_ptr + offs, mask=mask, other=PADDING)
    inside = (slots >= 0) & (slots < num_slots)
    occupied = tl.load(occupancy_ptr + slots, mask=inside, other=-1) >= 0
    # The first row that names a slot has it.
    earlier = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        others = start + tl.arange(0, BLOCK)
        named = tl.load(slot_ptr + others, mask=others < num_rows, other=PADDING)
        same = (named[None, :] == slots[:, None]) & (others[None, :] < offs[:, None])
        earlier = tl.maximum(earlier, tl.max(same.to(tl.int32), axis=1))
    drawn = inside & occupied & (earlier == 0)
    index = tl.where(drawn, slots, num_slots)
    tl.store(index_ptr + offs, index, mask=mask)
    tl.store(undrawn_ptr + offs, drawn == 0, mask=mask)
    tl.store(bad_ptr + offs, (drawn == 0) & (slots != PADDING), mask=mask)
    temperature = tl.load(temperature_ptr + index, mask=mask)
    tl.store(row_temperature_ptr + offs, temperature, mask=mask)
    tl.store(row_seed_ptr + offs, tl.load(seed_ptr + index, mask=mask), mask=mask)
