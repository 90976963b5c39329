"""A launch that is known hands a binary what Triton would hand it."""

from __future__ import annotations

import sys

from tests.support.commands import run_command


def test_known_launches_are_those_of_triton():
    """Every kernel of a step, in all its forms: the process fails at the first difference."""
    done = run_command(sys.executable, "-m", "tests.support.known_launches")
    assert done.returncode == 0, done.stderr[-4000:]
    counts = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    steps = {"lm_head_kernel", "decode_kernel", "peer_finish_kernel", "screen_kernel"}
    passes = {"group_first_kernel", "before_kernel", "digit_kernel", "residual_kernel"}
    assert counts.keys() >= steps | passes
    variants = 2 * (3 * 2 * 4 * 2 * 2)  # of one kernel, and all of them once more
    assert counts["decode_kernel"] >= 2 * variants
