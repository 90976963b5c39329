"""The points of one world size: what is wrong is left out, what is done is not done again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import scaling as command
from benchmarks.lab import baselines
from benchmarks.lab.baselines import GUMBEL, RACE
from benchmarks.lab.harness import Run
from benchmarks.lab.problem import Problem, make_weight
from benchmarks.lab.results import RESULT, Result
from benchmarks.lab.whole_logits import AllToAll
from benchmarks.questions import scaling as question
from benchmarks.questions import scaling_candidates
from benchmarks.questions.scaling import missing
from benchmarks.questions.scaling_candidates import MODES, ONE_RANK, TPSAMPLE
from tests.support import scaling
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample.distributed import Job
from tpsample.pipeline import Pipeline


def _wrong_first_row(out):
    out.token_ids[0] = (out.token_ids[0] + 1) % 1000
    return out


def _two_ranks(run: Run, path: Path, fault: str = "") -> None:
    rank = dist.get_rank()
    if fault == "one rank of tpsample" and rank == 1:
        finish = Pipeline.finish
        Pipeline.finish = lambda self, out: (
            _wrong_first_row(finish(self, out)) if self.ranks.world_size > 1 else finish(self, out)
        )
    if fault == "columns":
        logits = AllToAll.logits
        AllToAll.logits = lambda self, hidden_states: logits(self, hidden_states).roll(1, 1)
    own = None if rank else path  # the other rank may be on a host without the file
    command.measure(Job(rank, 2, rank, 2, "test"), run, own)


def _run(folder: Path, **changes) -> tuple[Run, Path]:
    """A run, and the file of its result."""
    scaling.unmeasured(**changes).save(folder / RESULT)
    return scaling.a_run(**changes), folder / RESULT


@pytest.mark.parametrize("dtype", ["bf16", *long(("fp32",))])
@pytest.mark.parametrize("modes", [["plain"], *long((list(MODES),))], ids=len)
def test_two_ranks_measure_every_candidate(modes, dtype, tmp_path):
    sizes = {"world_sizes": [2], "modes": modes, "exchanges": ["auto", "two_level"]}
    run, path = _run(tmp_path, **sizes, batches=(3,), dtype=dtype)
    run_ranks(2, _two_ranks, run, path)
    result = Result.load(path)
    assert not missing(result) and not result.left_out
    for mode in modes:
        rows = [row for row in result.rows if row["mode"] == mode]
        sent = {row["family"]: row["bytes_sent"] for row in rows}
        assert set(sent) == {TPSAMPLE, ONE_RANK, "all-gather", "all-to-all"}
        assert 8 * 3 <= sent[TPSAMPLE] < sent["all-to-all"] <= sent["all-gather"]
        assert sent[ONE_RANK] == 0
        best = {row["family"]: row["median_us"] for row in rows if row["fastest"]}
        assert all(best[row["family"]] <= row["median_us"] for row in rows)
        assert {TPSAMPLE, "two_level"} <= {row["candidate"] for row in rows}
    assert result.checks["rows_compared"] == 3 * 3 * len(modes)


@pytest.mark.parametrize(
    ("fault", "left", "why"),
    [
        ("one rank of tpsample", {TPSAMPLE}, "the oracle says"),
        ("columns", {f"all-to-all + {name}" for name in (RACE, GUMBEL)}, "not the product"),
    ],
)
def test_a_candidate_that_is_wrong_on_a_rank_is_left_out_and_said(fault, left, why, tmp_path):
    run, path = _run(tmp_path, world_sizes=[2], batches=(3,))
    run_ranks(2, _two_ranks, run, path, fault)
    result = Result.load(path)
    assert {each["candidate"] for each in result.left_out} == left
    assert all(why in each["why"] for each in result.left_out)
    measured = {row["candidate"] for row in result.rows}
    assert measured and not measured & left
    assert all(row["best_baseline"] not in left for row in result.rows if "best_baseline" in row)


def test_ids_that_change_while_they_are_timed_are_left_out(tmp_path, monkeypatch):
    finish, calls = Pipeline.finish, []

    def drifting(self, out):
        calls.append(1)
        out = finish(self, out)
        return out if len(calls) == 1 else _wrong_first_row(out)

    monkeypatch.setattr(Pipeline, "finish", drifting)
    run, path = _run(tmp_path, world_sizes=[1], batches=(1,))
    command.measure(Job(), run, path)
    result = Result.load(path)
    assert "timed steps" in result.left_out[0]["why"]
    assert {row["kind"] for row in result.rows} == {"baseline"}


def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    run, path = _run(tmp_path, world_sizes=[1], batches=(1,), modes=["plain", "top_k 50"])
    measured = []

    def of_point(run, weight, point):
        measured.append(point["mode"])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return original(run, weight, point)

    original = question._of_point
    monkeypatch.setattr(question, "_of_point", of_point)
    with pytest.raises(KeyboardInterrupt):
        command.measure(Job(), run, path)
    first = Result.load(path)
    command.measure(Job(), run, path)
    result = Result.load(path)
    assert not missing(result) and measured == ["plain", "top_k 50", "top_k 50"]
    assert result.rows[: len(first.rows)] == first.rows
    assert result.checks["rows_compared"] == 2 * first.checks["rows_compared"] > 0
    assert len(set(result.notes)) == len(result.notes) and len(result.sessions) == 2


def test_no_point_is_begun_when_the_time_is_over(tmp_path):
    run, path = _run(tmp_path, world_sizes=[1])
    command.measure(Job(), run, path, seconds=-1.0)
    assert Result.load(path).rows == []


def _check_baseline(mode, monkeypatch, sample):
    monkeypatch.setattr(baselines, "samplers", lambda problem, **filters: {"planted": sample})
    weight = make_weight(1000, 64, torch.device("cpu"))
    run = scaling.a_run()
    run.job = Job()
    entries = scaling_candidates.build(run, Problem.make(weight, 4), mode)
    (entry,) = [each for each in entries if each.kind == "baseline"]
    entry.check()


def test_a_baseline_may_draw_no_id_outside_the_vocabulary(monkeypatch):
    with pytest.raises(AssertionError, match="4 ids below 1000"):
        _check_baseline("plain", monkeypatch, lambda logits: logits.argmax(1) + 1000)


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode]])
def test_a_baseline_may_draw_no_id_that_the_filters_drop(mode, monkeypatch):
    _check_baseline(mode, monkeypatch, lambda logits: logits.argmax(1))
    with pytest.raises(AssertionError, match="not one that the filters keep"):
        _check_baseline(mode, monkeypatch, lambda logits: logits.argmin(1))


def test_a_draw_of_the_k_largest_is_one_of_them():
    logits = torch.randn(64, 1000)
    ids = baselines.topk_sample(logits, 5)
    rank = (logits > logits.gather(1, ids[:, None])).sum(1)
    assert int(rank.max()) < 5 and len(rank.unique()) > 1
