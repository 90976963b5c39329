"""The command that says how long `warm_up()` takes counts what a warm-up launches."""

import re
import sys

import pytest
import torch

from benchmarks.lab.launches import listed
from benchmarks.static.warm_up import specialisations
from tests.support.commands import ROOT, run_command
from tests.support.virtual import small_tiles
from tpsample import LMHeadSampler

COUNTED = re.compile(r"sm_90: (\d+) specialisations of \d+ kernels; lm_head_kernel (\d+), .*")


@pytest.mark.long
def test_it_counts_what_a_warm_up_that_runs_launches(monkeypatch):
    sampler = small_tiles(LMHeadSampler(torch.zeros(70, 4), backend="triton"))
    counted = specialisations(sampler, [1])
    monkeypatch.setattr("tpsample.core.tensors.READ_ON", ())
    with listed(run_them=True) as launches:
        sampler.warm_up(rows=[1])
    assert counted == set(launches) != set()


@pytest.mark.long
def test_it_prints_a_line_of_an_architecture_and_two_of_this_cpu():
    pytest.importorskip("numba")
    command = (sys.executable, "-m", "benchmarks.static.warm_up", "--arch", "90")
    done = run_command(*command, timeout_s=500)
    assert done.returncode == 0, done.stderr[-2000:]
    gpu, cold, warm, _ = done.stdout.splitlines()
    assert (counted := COUNTED.fullmatch(gpu)), gpu
    page = (ROOT / "tpsample/README.md").read_text()
    assert f"and {counted[1]} on sm_90 and on sm_100; 80 and {counted[2]} of these" in page, gpu
    took = [float(line.split()[-5]) for line in (cold, warm)]
    assert took[0] > 2 * took[1] > 0
