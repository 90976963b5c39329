"""The sections of the GPU check: each runs dry, and a failing one leaves the others alone."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks.gpu import numerics, sections

CPU = torch.device("cpu")

ELSEWHERE = {*sections.rehearsals(True), "environment", "processes"} - {"features"}
"""Sections that test_gpu_compile runs, or that other tests run in processes of their own."""


class TestGpuCheck:
    @pytest.mark.parametrize("section", [s for s in sections.SECTIONS if s not in ELSEWHERE])
    def test_sections_run_dry(self, section, tmp_path):
        facts = list(sections.run_section(section, True, tmp_path, time.time() + 600))
        json.dumps(facts)
        assert facts

    @pytest.mark.long
    def test_processes_start_and_report(self, tmp_path):
        (facts,) = sections.run_section("processes", True, tmp_path, time.time() + 600)
        assert facts["gloo, collective"].startswith("worked")

    def test_every_wrong_tile_is_named(self, monkeypatch):
        words = iter(torch.tensor([[1], [2], [3]]))
        monkeypatch.setattr(numerics, "best_words", lambda problem, tile=None: next(words))
        with pytest.raises(AssertionError, match=r"block_v=256.*block_v=128"):
            list(numerics.tiles(CPU, True))

    def test_noise_that_is_no_number_is_seen(self, monkeypatch):
        class Blank:
            def __getitem__(self, grid):
                return lambda value_ptr, **_: value_ptr.fill_(torch.nan)

        monkeypatch.setattr(numerics, "noise_kernel", Blank())
        with pytest.raises(AssertionError, match="noise is off by inf"):
            list(numerics.noise(CPU, True))
