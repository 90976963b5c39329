"""On a machine with a GPU: the committed tokens of every kind of request and way to verify."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.gpu.golden import on_processes, recorded
from tests.support.commands import run_command
from tests.support.golden import EXACT, differing

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@ON_A_GPU
@pytest.mark.parametrize(
    "arguments",
    [
        *EXACT,
        *("heads 2", "changes 3", "verified 3"),
        *("reports 2 gloo peer", "verified 2 nccl collective", "slots 3 nccl p2p"),
    ],
)
def test_golden_tokens_on_a_gpu(arguments: str) -> None:
    """In a process of its own: the tests interpret kernels, this one compiles them."""
    done = run_command(sys.executable, "-m", "tests.gpu.golden", *arguments.split())
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_difference_is_named() -> None:
    """The same comparison without a GPU, and a token that was changed."""
    (found,) = recorded("heads", 1, "cpu", "torch")
    assert differing(found, ["heads"]) == []
    name = next(name for name in found if name.endswith(": tokens"))
    found[name][0] += 1
    assert differing(found, ["heads"]) == [name]


@pytest.mark.long
def test_processes_draw_what_one_rank_does() -> None:
    """The same ranks without a GPU."""
    (found,) = recorded("heads", 1, "cpu", "torch")
    assert on_processes("heads", 2, "gloo", "collective", "cpu") == [found, found]
