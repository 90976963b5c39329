"""Every benchmark runs tiny on a CPU, and none shows a number behind a wrong token."""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import run
from benchmarks.gpu import check, numerics, sections
from benchmarks.gpu.record import ARCHIVE, Record
from benchmarks.gpu.sections import Section
from benchmarks.lab import baselines, drawing, harness, machine, quiet, ranks, reads
from benchmarks.lab.harness import Benchmark, NotCaptured, Run, execute
from benchmarks.lab.page import PAGE, write_page
from benchmarks.lab.problem import (
    NEAR_TIE,
    NearTies,
    Problem,
    WrongToken,
    make_sampler,
    make_weight,
    near_tie,
)
from benchmarks.lab.results import RESULT, Result, View, row
from benchmarks.lab.shapes import TINY, Shape
from benchmarks.lab.timing import Prepared, Timing, measure, prepare
from benchmarks.questions import BENCHMARKS, filters, step
from tests.support.commands import run_command
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, reference
from tpsample.cli.app import app
from tpsample.distributed import Job

CPU = torch.device("cpu")
NAMES = tuple(name for name, each in BENCHMARKS.items() if each.by_default)
SAMPLING = [name for name in NAMES if name != "ceilings"]


# Run in processes of their own, benchmarks that go the way of single_gpu, and what test_gpu_compile
# runs.
NOT_DRY = (
    "goldens",
    "oracle",
    "single_gpu",
    "virtual_ranks",
    "invariance",
    "environment",
    "processes",
    "tiles",
    "ceilings",
    "shard",
    "screened",
    "epilogue",
    "exchange",
    "filters",
)


def _small(job: Job | None = None) -> Run:
    return Run.small(job, batches=(2,), repeats=1)


@pytest.fixture
def wrong_token(monkeypatch):
    """Every sampler returns a wrong id in its first row."""
    finish = LMHeadSampler.finish

    def planted(self, out):
        out = finish(self, out)
        out.token_ids[0] = (out.token_ids[0] + 1) % self.vocab_size
        return out

    monkeypatch.setattr(LMHeadSampler, "finish", planted)


def _on_ranks(folder: Path) -> list[str]:
    """The candidates of the benchmark of exchanges, as this rank saw them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = Job(rank, world_size, rank, world_size, "test")
    result = execute(BENCHMARKS["exchange"], _small(job), folder / RESULT if rank == 0 else None)
    return [each["candidate"] for each in result.rows]


class TestEachBenchmark:
    @pytest.mark.parametrize("name", NAMES)
    def test_writes_a_result_a_page_and_plots(self, name, tmp_path):
        pytest.importorskip("matplotlib")
        rows = execute(BENCHMARKS[name], _small(), tmp_path / RESULT).rows
        if name == "filters":
            self._every_setting_of_filters_has_one_row_a_point(rows)
        result = Result.load(tmp_path / RESULT)
        assert result.rows and result.aborted is None
        assert result.settings["tiny"] and result.machine["hardware"] == "CPU"
        assert (result.checks["rows_compared"] > 0) == (name in SAMPLING)
        views = {view["name"]: view["y"] for view in result.views}
        shown = {name for name, y in views.items() if any(y in each for each in result.rows)}
        assert views.keys() == shown
        page = write_page(tmp_path).read_text()
        assert "Tiny sizes" in page and result.machine["command"] in page
        drawn = {p.stem for p in tmp_path.glob("*.png")}
        assert shown <= drawn
        assert all(f"({name}.png)" in page for name in drawn)

    def _every_setting_of_filters_has_one_row_a_point(self, rows):
        names = ("candidate", "kind", "batch")
        points = [tuple(each.get(name) for name in names) for each in rows]
        assert len(set(points)) == len(points)
        for name in filters.SETTINGS:
            own = (f"tpsample, {name}", f"sort, {name}")
            kinds = {each["kind"] for each in rows if each["candidate"] in own}
            assert kinds == {"tpsample", "baseline"}

    def test_runs_on_two_ranks(self, tmp_path):
        candidates = run_ranks(2, _on_ranks, tmp_path)
        assert candidates[0] == candidates[1]
        result = Result.load(tmp_path / RESULT)
        assert result.machine["world_size"] == 2
        for exchange in ranks.EXCHANGES:
            assert f"{exchange}, 4 chunks" in candidates[0], result.notes

    @pytest.mark.parametrize("name", SAMPLING)
    def test_aborts_at_a_wrong_token(self, name, tmp_path, wrong_token):
        with pytest.raises(WrongToken, match="the oracle says"):
            execute(BENCHMARKS[name], _small(), tmp_path / RESULT)
        result = Result.load(tmp_path / RESULT)
        assert result.aborted and not result.rows
        assert "Aborted" in write_page(tmp_path).read_text()

    def test_a_page_is_written_where_nobody_counts_what_is_screened(self, tmp_path, monkeypatch):
        """As on a CPU without the interpreter, which is where a user tries it."""
        plain = functools.partial(make_sampler, backend="numba")
        monkeypatch.setattr(step, "make_sampler", plain)
        execute(BENCHMARKS["screened"], _small(), tmp_path / RESULT)
        page = write_page(tmp_path).read_text()
        assert "## Time ÷ time to read the weights once" in page and "Share of" not in page

    def test_a_deadline_leaves_whole_points(self):
        run = Run.small(batches=(1, 2), repeats=1)

        def past(row):
            run.deadline = 0.0

        result = execute(BENCHMARKS["single_gpu"], run, None, on_row=past)
        assert {each["batch"] for each in result.rows} == {1}
        assert {each["kind"] for each in result.rows} == {"tpsample", "baseline", "limit"}
        assert any("not measured" in note for note in result.notes)

    def test_a_broken_baseline_is_left_out_and_named(self, monkeypatch):
        def broken(logits):
            raise ImportError("no such symbol")

        monkeypatch.setattr(baselines, "softmax_race", broken)
        result = execute(BENCHMARKS["single_gpu"], _small(), None)
        names = [each["candidate"] for each in result.rows]
        assert baselines.RACE not in names and baselines.GUMBEL in names
        note = f"{baselines.RACE}: not measured, ImportError: no such symbol"
        assert note in result.notes

    def test_a_step_of_ours_without_a_graph_fails_after_it_is_measured(self, tmp_path, monkeypatch):
        def without_graph(step, device, graph):
            return Prepared(step, why="RuntimeError: operation not permitted")

        monkeypatch.setattr(harness, "prepare", without_graph)
        with pytest.raises(NotCaptured, match="tpsample: RuntimeError: operation not permitted"):
            execute(BENCHMARKS["single_gpu"], _small(), tmp_path / RESULT)
        assert "tpsample" in [each["candidate"] for each in Result.load(tmp_path / RESULT).rows]
        assert "tpsample: timed without a CUDA graph" in write_page(tmp_path).read_text()


class TestGate:
    def test_refuses_any_difference_on_a_cpu(self):
        problem = Problem.make(make_weight(TINY.vocab_size, TINY.hidden_size, CPU), 3)
        right = problem.sampled_by(make_sampler(problem.weight, 3))
        assert right.check() == NearTies()
        for wrong in (-1, TINY.vocab_size, int(right.token_ids[2]) ^ 1):
            token_ids = right.token_ids.clone()
            token_ids[2] = wrong
            with pytest.raises(WrongToken, match="row 2, sample 0"):
                problem.check(token_ids)

    def test_a_near_tie_allows_for_the_sum_of_a_logit(self):
        temperature = torch.tensor([0.0, 0.5, 1.0, 0.01])
        assert torch.all(near_tie(temperature, 0) == NEAR_TIE)
        logit = 6e-9 * 8192
        scores = torch.tensor([1.0, 2.8854, 1.4427, 14.427]) * logit
        torch.testing.assert_close(near_tie(temperature, 8192), NEAR_TIE + scores)

    def test_sees_ids_that_change_while_they_are_timed(self):
        problem = Problem.make(make_weight(TINY.vocab_size, TINY.hidden_size, CPU), 2)
        candidate = problem.sampled_by(make_sampler(problem.weight, 2))
        calls = []

        def step():
            calls.append(candidate.step())
            if len(calls) > 1:
                candidate.token_ids.add_(1)

        drifting = type(candidate)(problem, step, candidate.token_ids)
        with pytest.raises(WrongToken, match="timed steps"):
            _small().time_checked({"drifting": drifting}, {})

    def test_a_limit_that_skips_bytes_is_refused(self, monkeypatch):
        monkeypatch.setattr(reads, "read_words", lambda words, n: lambda: words[: len(words) // 2])
        with pytest.raises(AssertionError, match="every byte"):
            reads.weight_reads(make_weight(100, 64, CPU))

    def test_works_without_triton(self, monkeypatch):
        for module in (baselines, reads):
            monkeypatch.setattr(module, "has_triton", lambda device: False)
        rows = list(BENCHMARKS["single_gpu"].rows(_small()))
        assert {each["kind"] for each in rows} == {"tpsample", "baseline", "limit"}


def test_the_greedy_kernel_beside_the_sampled_one_finds_the_largest_logit():
    problem = Problem.make(make_weight(2500, 64, CPU), 5)  # three tiles of the interpreter
    values, ids = step.greedy(problem)()
    tile = values.view(torch.float32).argmax(dim=0, keepdim=True)
    logits = reference.logits(problem.hidden_states, problem.weight)
    assert len(ids) == 3
    assert ids.gather(0, tile).squeeze(0).tolist() == logits.argmax(dim=1).tolist()


class TestFilteredSteps:
    def test_a_problem_says_whether_its_batch_draws_in_fixed_rounds(self):
        plain = Problem.make(make_weight(1000, 64, CPU), 3).filtered(top_p=0.9)
        for fixed_rounds in (False, True):
            problem = replace(plain, fixed_rounds=fixed_rounds)
            assert problem.batch.plan.fixed_rounds == fixed_rounds
            problem.sampled_by(make_sampler(problem.weight, 3)).check()

    def test_a_candidate_that_is_to_run_without_a_graph_is_not_captured(self, monkeypatch):
        asked = {}

        def noted(step, device, graph=True):
            asked[step] = graph
            return prepare(step, device, graph)

        monkeypatch.setattr(harness, "prepare", noted)
        problem = Problem.make(make_weight(1000, 64, CPU), 3)
        sampler, run = make_sampler(problem.weight, 3), Run.small()
        graph, eager = (replace(problem.sampled_by(sampler), graph=g) for g in (True, False))
        times = run.time_checked({"graph": graph, "eager": eager}, {"other": lambda: None})
        assert set(times) == {"graph", "eager", "other"}
        assert asked.pop(graph.step) and not asked.pop(eager.step)
        assert list(asked.values()) == [True]


class TestTiming:
    def test_takes_the_candidates_in_turn(self):
        order = []
        steps = {name: lambda name=name: order.append(name) for name in "ABC"}
        prepared = {name: prepare(step, CPU) for name, step in steps.items()}
        times = measure(prepared, CPU, repeats=2)
        assert "".join(order) == "ABC" + "ABC" * 2
        assert [len(timing.times_us) for timing in times.values()] == [2, 2, 2]

    def test_the_slowest_rank_counts(self):
        slowest = Timing.slowest([Timing((1.0, 9.0, 3.0), True), Timing((5.0, 2.0, 4.0), True)])
        assert slowest.times_us == (5.0, 9.0, 4.0)
        fields = slowest.fields()
        assert [fields[name] for name in ("q1_us", "median_us", "q3_us")] == [4.5, 5.0, 7.0]


def test_a_page_says_how_busy_the_machine_was(tmp_path, monkeypatch):
    loads = [{"load": [n, 0.5, 0.2], "busy_cores": 2.0, "gpu_percent": []} for n in (0.1, 9.0)]
    point = row("tpsample", "tpsample", Timing((5.0,) * 3, True), shape="9x9", batch=1)
    monkeypatch.setattr(drawing, "available", lambda: False)
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(quiet, "load", lambda: loads.pop(0))
    made_up = Benchmark("made up", "?", [View("", "Time", x="batch")], lambda run: iter([point]))
    execute(made_up, Run.small(), tmp_path / RESULT)
    page = write_page(tmp_path).read_text()
    assert "no time from here: the load average was 9.0 when the run ended" in page
    assert "| 0.1, 0.5, 0.2 | 9, 0.5, 0.2 |" in page


def test_a_real_size_on_a_busy_cpu_is_not_called_tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "available", lambda: False)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    small = replace(_small(), shapes=(Shape(2000, 64, "none"),))
    execute(BENCHMARKS["epilogue"], small, tmp_path / RESULT)
    page = write_page(tmp_path).read_text()
    assert "Tiny sizes" not in page and "not quiet, so take no time from here" in page
    assert "\\*" not in page


class TestCommand:
    def test_writes_folders_named_topic_hardware_date(self, tmp_path):
        arguments = ["ceilings", "--tiny", "--repeats", "1", "--output", str(tmp_path)]
        done = CliRunner().invoke(run.app, arguments)
        assert done.exit_code == 0, done.output
        (folder,) = tmp_path.iterdir()
        assert folder.name.startswith("ceilings-cpu-20")
        assert (folder / PAGE).exists()

    @pytest.mark.parametrize(
        ("command", "names"),
        [
            ("tpsample.cli bench", ["exchange"]),
            *long(("tpsample.cli bench", NAMES), ("benchmarks.run", NAMES)),
        ],
        ids=["one", "all by tpsample", "all by benchmarks.run"],
    )
    def test_runs_them_as_a_user_without_a_gpu_does(self, command, names, tmp_path):
        """Without the interpreter, which a user does not ask for."""
        chosen = names if names != NAMES else ()
        words = ("-m", *command.split(), *chosen, "--tiny", "--batches", 2, "--repeats", 1)
        done = run_command(sys.executable, *words, "--output", tmp_path)
        assert done.returncode == 0, done.stderr
        assert {folder.name.split("-cpu-")[0] for folder in tmp_path.iterdir()} == set(names)
        assert "exchange: nothing measured: peer is not measured, because" in done.stderr

    def test_an_installed_package_says_where_they_are(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "benchmarks.run", None)
        shown = CliRunner().invoke(app, ["bench", "exchange", "--tiny"])
        assert shown.exit_code == 1 and "are in the source checkout" in shown.output

    def test_fails_at_a_wrong_token(self, tmp_path, wrong_token):
        arguments = ["epilogue", "--tiny", "--batches", "1", "--output", str(tmp_path)]
        assert CliRunner().invoke(run.app, arguments).exit_code == 1

    @pytest.mark.parametrize(
        "arguments", [["nothing"], ["--shapes", "1x1", "--tiny"], ["--batches", "x", "--tiny"]]
    )
    def test_refuses_what_it_does_not_know(self, arguments):
        assert CliRunner().invoke(run.app, arguments).exit_code == 2


class TestGpuCheck:
    @pytest.mark.parametrize("section", [s for s in sections.SECTIONS if s not in NOT_DRY])
    def test_sections_run_dry(self, section, tmp_path):
        facts = list(sections.run_section(section, True, tmp_path, time.time() + 600))
        json.dumps(facts)
        assert facts

    @pytest.mark.long
    def test_processes_start_and_report(self, tmp_path):
        (facts,) = sections.run_section("processes", True, tmp_path, time.time() + 600)
        assert facts["gloo, collective"].startswith("worked")

    def test_a_failing_section_leaves_the_others_alone(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sections.SECTIONS, "broken", Section(60, 0))
        record = Record(tmp_path, tmp_path / ARCHIVE, dry_run=True)
        assert check.run_all(["broken", "environment"], record, check.Ending(480)) == 1
        folder = tmp_path / "gpu_check-dry-run"
        found = json.loads((folder / "check.json").read_text())["sections"]
        assert found["broken"]["status"] == "failed" and "broken" in found["broken"]["error"]
        assert found["environment"]["status"] == "passed"
        assert "| broken | failed |" in (folder / PAGE).read_text()

    def test_another_run_adds_to_the_record(self, tmp_path, monkeypatch):
        """With children that only print what their section would."""
        facts = {"commit": "0123abc", "tiles": [{"tile": "128x16"}], "date": "2026-11-22"}
        printed = f"gpu_check: {json.dumps(facts)}\n"
        monkeypatch.setattr(check, "wait_for", lambda *_: (0, printed, ""))
        folder = tmp_path / "gpu_check-dry-run"
        for name in ("environment", "tiles"):
            record = Record(tmp_path, tmp_path / ARCHIVE, dry_run=True)
            assert check.run_all([name], record, check.Ending(480)) == 0
        found = json.loads((folder / "check.json").read_text())["sections"]
        assert list(found) == ["environment", "tiles"]
        assert len(found["tiles"]["facts"]["tiles"]) == 2
        assert "| environment | passed |" in (folder / PAGE).read_text()

    def test_every_wrong_tile_is_named(self, monkeypatch):
        words = iter(torch.tensor([[1], [2], [3]]))
        monkeypatch.setattr(numerics, "best_words", lambda problem, tile=None: next(words))
        with pytest.raises(AssertionError, match=r"block_v=256.*block_v=128"):
            list(numerics.tiles(CPU, True, 0, 1))

    def test_a_process_at_its_limit_leaves_its_output_and_no_child(self):
        code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""
        ended, out, _ = check.wait_for([sys.executable, "-c", code], 3.0, check.Ending(60))
        assert ended is None
        for _ in range(100):  # whoever adopts it has to reap it
            state = Path(f"/proc/{int(out)}/stat")
            if not state.exists() or state.read_text().split()[2] == "Z":
                return
            time.sleep(0.05)
        raise AssertionError("the child lives on")

    def test_the_commit_of_files_without_their_repository(self, monkeypatch):
        monkeypatch.setattr(machine, "printed", lambda *command: None)
        monkeypatch.setenv("TPSAMPLE_COMMIT", "0123abc")
        assert machine.describe(CPU)["commit"] == "0123abc"
