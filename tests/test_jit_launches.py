"""Every step compiles for a GPU as it is launched, with the arguments it has then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.jit_launches import cases


@pytest.fixture(scope="module")
def launched() -> dict[str, list[str]]:
    """Kernels by case, of a process that does not interpret."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.jit_launches"],
        env=compiled,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, kernel = line.rsplit(": ", 1)
        kernels.setdefault(name, []).append(kernel)
    return kernels


@pytest.mark.parametrize("name", cases())
def test_a_step_compiles_as_it_is_launched(launched, name):
    masks = ("allowed ids", "bad words", "min_tokens", "grammar", "forced ids")
    finish = "peer_finish_kernel" if name.startswith("peer") else "finish_kernel"
    expected = ["lm_head_kernel", finish]
    if name in (*masks, "all together", "drafts"):
        expected.insert(0, "token_mask_kernel")
    assert launched[name] == expected
