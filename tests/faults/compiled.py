"""Faults that compiled kernels show, or what is compiled: order of memory, prefetches, overlap."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tpsample/local/screen_launches.py
    the screen asks for rows behind its own
    - PREFETCH=min(tile.num_stages * tile.block_d, padded) if
    + PREFETCH=tile.num_stages * tile.block_d if
    > test_no_more_than_a_row_is_asked_for
tpsample/kernels/overlap.py
    every thread of a row asks for the whole of it
    - while parts * 2 * rows <= threads and num_bytes
    + while False and num_bytes
    > test_threads_that_hold_the_same_row_share_it
    parts of a row that no 16 bytes make
    - num_bytes % (32 * parts) == 0:
    + num_bytes % parts == 0:
tpsample/kernels/inbox.py
    compiled: an arrival neither releases nor acquires
    - if tl.atomic_add(arrive, 1, sem="acq_rel", scope="gpu") == num_arrivals - 1:
    + if tl.atomic_add(arrive, 1, sem="relaxed", scope="gpu") == num_arrivals - 1:
    > compiled/test_compiled_kernels.py::test_what_compiled_kernels_of_sm_90_do[one_push]
tpsample/kernels/epilogue.py
    compiled: maxima that other programs need not see
    - scope="gpu",
    + scope="cta",
""")
