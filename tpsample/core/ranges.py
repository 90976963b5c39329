"""Names the parts of a step in a profile, and costs next to nothing while nobody records one.

`torch.profiler.profile` shows the ranges by name. Under `torch.autograd.profiler.emit_nvtx` they
are ranges of NVTX, which Nsight Systems shows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

RANGES = ("head", "exchange", "filters", "verification")
"""Their names, behind "tpsample: "."""
_NOBODY_RECORDS = nullcontext()


def range_of(name: str) -> AbstractContextManager[object]:
    """Return the range of a part of a step, which a profile shows if one is recorded."""
    if not profiler._is_profiler_enabled:  # a range takes the host 10 µs
        return _NOBODY_RECORDS
    assert name in RANGES
    return profiler.record_function(f"tpsample: {name}")
