"""The work of a kernel while another one, or its own arithmetic, is still under way.

Both need compute capability 9.0, and are left out where it is less (`tpsample.core.machine`).
"""

import triton
import triton.language as tl


@triton.jit
def let_next_launch_start():
    """Allow the next kernel to start once every program of this one has called this or ended.

    The next kernel then occupies the GPU, and waits in `wait_for_previous_launch`.
    """
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_launch():
    """Wait until the kernel before is over and what it wrote can be read."""
    tl.extra.cuda.gdc_wait()


@triton.constexpr_function
def parts_of_row(threads, rows, num_bytes):
    """Return how many threads share a row, each with a multiple of 16 bytes; a power of two."""
    parts = 1
    while parts * 2 * rows <= threads and num_bytes % (32 * parts) == 0:
        parts *= 2
    return parts


@triton.jit
def prefetch_rows(ptr, BYTES: tl.constexpr):
    """Start moving the first BYTES of some rows from memory to L2, and go on at once.

    Addresses and BYTES are multiples of 16. The assembly runs in every thread, so where threads are
    more than rows, several take a part of a row each. They would all ask for the whole of it.
    """
    PARTS: tl.constexpr = parts_of_row(tl.extra.cuda.num_threads(), ptr.shape[0], BYTES)
    part = tl.arange(0, PARTS)[None, :] * (BYTES // PARTS)
    address = ptr.to(tl.int64)[:, None] + part
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [address, tl.full(address.shape, BYTES // PARTS, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
