"""On a machine with a GPU: the sections of the GPU check that say right or wrong."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.support.commands import run_command

RIGHT_OR_WRONG = ("noise", "goldens", "oracle", "invariance", "tiles", "virtual_ranks", "features")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("section", RIGHT_OR_WRONG)
def test_section(section, tmp_path):
    """In a process of its own: the tests interpret kernels, this one compiles them."""
    command = (sys.executable, "-m", "benchmarks.gpu.check", "--section", section)
    done = run_command(*command, "--output", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
