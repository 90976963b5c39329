"""The command for a profiler takes the steps that it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import one_step
from benchmarks.lab.launches import listed
from tpsample.local.triton_backend import TritonBackend


@pytest.mark.parametrize(("warm_up", "tile"), [(1, None), (2, "256,4,64,1,1")])
def test_one_step_after_the_warm_up(warm_up, tile, capsys):
    words = ["--dry-run", "--batch", "3", "--world-size", "4", "--warm-up", str(warm_up)]
    with listed(run_them=True) as launches:
        assert one_step.main([*words, *(["--tile", tile] if tile else [])]) == 0
    assert capsys.readouterr().out == f"250×64 batch 3: {warm_up} + 1 steps\n"
    assert set(launches.values()) == {warm_up + 1}
    lm_head = dict(next(iter(launches)).arguments)
    assert lm_head["BLOCK_V"] == (256 if tile else 1024)
    assert TritonBackend.tile is None


def test_without_a_gpu_only_a_dry_run_goes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here"):
        one_step.main([])
