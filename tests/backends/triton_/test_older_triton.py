"""The kernels compiled by the oldest Triton that is supported, which torch 2.10 and 2.11 bring.

The pinned one is installed beside the other packages of this environment and found before theirs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run_command
from tests.support.older import NO_NETWORK

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PIN = "constraints/cu12.txt"
OF_THE_DRIVER = (
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain"),
    *("cuFuncSetAttribute", "cuGetErrorString", "cuPointerGetAttribute"),
)


@pytest.fixture(scope="module")
def older(tmp_path_factory) -> dict[str, str]:
    """The variables that make a process find it."""
    folder = tmp_path_factory.mktemp("triton")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
    done = run_command(*pip, "-c", PIN, "triton", timeout_s=600)
    if any(reason in done.stderr for reason in NO_NETWORK):
        pytest.skip("needs a network, to install the older Triton")
    assert done.returncode == 0, done.stderr[-2000:]
    cache, driver = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("driver")
    # It links what launches a kernel with the driver's library, which an empty one stands for.
    source = driver / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in OF_THE_DRIVER))
    run_command("cc", "-shared", "-fPIC", "-o", driver / "libcuda.so.1", source)
    return {
        "PYTHONPATH": f"{folder}:{ROOT}",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_LIBCUDA_PATH": str(driver),
        "LD_LIBRARY_PATH": str(driver),
    }


def test_one_tile_and_every_other_kernel_meet_the_requirements(older, tmp_path, capsys):
    record = tmp_path / "report.json"
    command = (sys.executable, "-m", "benchmarks.static.report", "--few", "--json", record)
    done = run_command(*command, env=older, timeout_s=900)
    with capsys.disabled():
        print(done.stdout)
    found = json.loads(record.read_text())
    assert f"triton=={found['versions']['triton']}" in Path(ROOT / PIN).read_text().splitlines()
    assert [fault for row in found["rows"] for fault in row["faults"]] == []
    assert done.returncode == 0


def test_every_step_compiles_as_it_is_launched(older):
    done = run_command(sys.executable, "-m", "tests.support.jit_launches", env=older, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "plain: lm_head_kernel" in done.stdout


def test_the_launch_finds_in_the_cache_what_was_compiled(older):
    found = []
    for action in ("compile", "launch"):
        command = (sys.executable, "-m", "tests.support.compiled_first", action, "virtual_ranks")
        done = run_command(*command, env=older, timeout_s=600)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "Error" not in done.stdout
        found.append(done.stdout.splitlines()[-2:])
    assert found[0] == found[1]
    # This version builds what launches a kernel too, and the launch builds nothing more.
    assert all("'" in line for line in found[0])
