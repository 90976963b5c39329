"""Ids are gated before they are timed, candidates take turns, and a page says how busy it was."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.lab import machine, plots, quiet, reads
from benchmarks.lab.harness import Benchmark, Run, execute
from benchmarks.lab.page import write_page
from benchmarks.lab.problem import (
    Compared,
    Problem,
    WrongToken,
    make_sampler,
    make_weight,
)
from benchmarks.lab.results import RESULT, View, row
from benchmarks.lab.shapes import TINY
from benchmarks.lab.timing import Timing

CPU = torch.device("cpu")


class TestGate:
    def test_refuses_any_difference_on_a_cpu(self):
        problem = Problem.make(make_weight(TINY.vocab_size, TINY.hidden_size, CPU), 3)
        right = problem.sampled_by(make_sampler(problem.weight, 3))
        assert right.check() == Compared(3)
        for wrong in (-1, TINY.vocab_size, int(right.token_ids[2]) ^ 1):
            token_ids = right.token_ids.clone()
            token_ids[2] = wrong
            with pytest.raises(WrongToken, match="row 2, sample 0"):
                problem.check(token_ids)

    def test_a_limit_that_skips_bytes_is_refused(self, monkeypatch):
        monkeypatch.setattr(reads, "read_words", lambda words, n: lambda: words[: len(words) // 2])
        with pytest.raises(AssertionError, match="every byte"):
            reads.weight_reads(make_weight(100, 64, CPU))


class TestFilteredSteps:
    def test_a_problem_says_whether_its_batch_draws_in_fixed_rounds(self):
        plain = Problem.make(make_weight(1000, 64, CPU), 3).filtered(top_p=0.9)
        for fixed_rounds in (False, True):
            problem = replace(plain, fixed_rounds=fixed_rounds)
            assert problem.batch.plan.fixed_rounds == fixed_rounds
            problem.sampled_by(make_sampler(problem.weight, 3)).check()


class TestTiming:
    def test_the_slowest_rank_counts(self):
        slowest = Timing.slowest([Timing((1.0, 9.0, 3.0), True), Timing((5.0, 2.0, 4.0), True)])
        assert slowest.times_us == (5.0, 9.0, 4.0)
        fields = slowest.fields()
        assert [fields[name] for name in ("q1_us", "median_us", "q3_us")] == [4.5, 5.0, 7.0]


def test_a_page_says_how_busy_the_machine_was(tmp_path, monkeypatch):
    loads = [{"load": [n, 0.5, 0.2], "busy_cores": 2.0, "gpu_percent": []} for n in (0.1, 9.0)]
    point = row("tpsample", "tpsample", Timing((5.0,) * 3, True), shape="9x9", batch=1)
    monkeypatch.setattr(plots, "available", lambda: False)
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(quiet, "load", lambda: loads.pop(0))
    made_up = Benchmark("made up", "?", [View("", "Time", x="batch")], lambda run: iter([[point]]))
    execute(made_up, Run.small(), tmp_path / RESULT)
    page = write_page(tmp_path).read_text()
    assert "no time from here: the load average was 9.0 when the run ended" in page
    assert "| 0.1, 0.5, 0.2 | 9, 0.5, 0.2 |" in page


def test_a_page_of_results_is_no_change_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        own = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *own, *words], check=True, capture_output=True)

    page = tmp_path / "benchmarks" / "results" / "scaling" / "README.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "code.py").write_text("")
    page.write_text("")
    git("init")
    git("add", ".")
    git("commit", "--message", "one")
    monkeypatch.setattr(machine, "ROOT", tmp_path)

    def changed() -> bool | None:
        return machine.describe(torch.device("cpu"))["uncommitted_changes"]

    assert changed() is False
    page.write_text("measured again")
    page.with_name("result.json").write_text("{}")
    assert changed() is False
    (tmp_path / "code.py").write_text("pass")
    assert changed() is True
