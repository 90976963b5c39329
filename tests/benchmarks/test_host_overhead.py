"""The walk of a step counts functions of the host, and no kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.questions import host_overhead
from tpsample.core.checks import check_num_samples

PACKAGE = Path(host_overhead.PACKAGE)


def test_kernels_are_not_walked():
    compiled = ("\n@triton.jit", "\n@jit(")
    kernels = [
        path for path in PACKAGE.rglob("*.py") if any(c in path.read_text() for c in compiled)
    ]
    assert {"numba_", "triton_"} <= {part for path in kernels for part in path.parts}
    assert [path for path in kernels if host_overhead.is_walked(str(path))] == []


@pytest.mark.parametrize("room", ["torch_", "triton_", "numba_"])
def test_launches_are_walked(room):
    assert host_overhead.is_walked(str(PACKAGE / "backends" / room / "launch.py"))
    assert not host_overhead.is_walked(torch.__file__)


def test_calls_and_files_are_counted():
    found = host_overhead.walk(lambda: (check_num_samples(None), check_num_samples(2)))
    assert found == {"calls": 4, "files": 1}
