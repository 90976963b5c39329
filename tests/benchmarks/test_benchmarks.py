"""Every benchmark runs tiny on a CPU, and none shows a number behind a wrong token."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import run
from benchmarks.lab import baselines, harness, ranks
from benchmarks.lab.harness import NotCaptured, Run, execute
from benchmarks.lab.page import write_page
from benchmarks.lab.problem import WrongToken
from benchmarks.lab.results import RESULT, Result
from benchmarks.lab.timing import Prepared
from benchmarks.questions import BENCHMARKS, filters
from tests.support.commands import run_command
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample.cli.app import app
from tpsample.distributed import Job

NAMES = tuple(name for name, each in BENCHMARKS.items() if each.by_default)
TINY = (*NAMES, "kinds")
SAMPLING = [name for name in TINY if name != "ceilings"]


def _small(job: Job | None = None) -> Run:
    return Run.small(job, batches=(2,), repeats=1)


def _on_ranks(folder: Path) -> list[str]:
    """The candidates of the benchmark of exchanges, as this rank saw them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = Job(rank, world_size, rank, world_size, "test")
    result = execute(BENCHMARKS["exchange"], _small(job), folder / RESULT if rank == 0 else None)
    return [each["candidate"] for each in result.rows]


class TestEachBenchmark:
    @pytest.mark.parametrize("name", TINY)
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
        assert shown <= drawn | {""}
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


class TestCommand:
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

    @pytest.mark.parametrize(
        "words",
        [
            ("--repeats", "-1"),
            *[("--output", path) for path in (__file__, "/dev/null", "/proc/none")],
            ("--onto", "/dev/null"),
        ],
    )
    def test_options_that_no_page_can_come_of_are_refused_before_a_step(self, words, monkeypatch):
        monkeypatch.setattr(run, "run_one", None)
        refused = CliRunner().invoke(run.app, ["exchange", "--tiny", *words])
        assert refused.exit_code == 2 and f"Invalid value for '{words[0]}'" in refused.output

    def test_a_page_gets_the_rows_of_another_dtype_but_not_of_other_repeats(self, tmp_path):
        words = ["exchange", "--tiny", "--batches", "2", "--onto", str(tmp_path), "--repeats"]
        for dtype in ("bf16", "fp32"):
            assert CliRunner().invoke(run.app, [*words, "1", "--dtype", dtype]).exit_code == 0
        result = Result.load(tmp_path / RESULT)
        assert result.settings["dtype"] == "bf16, fp32" and len(result.sessions) == 2
        refused = CliRunner().invoke(run.app, [*words, "2"])
        assert refused.exit_code != 0 and "repeats was 1, is 2" in refused.output

    @pytest.mark.parametrize(
        ("module", "words"), [("run", ["exchange", "--tiny"]), ("scaling", ["scaling"])]
    )
    def test_an_installed_package_says_where_they_are(self, module, words, monkeypatch):
        monkeypatch.setitem(sys.modules, f"benchmarks.{module}", None)
        shown = CliRunner().invoke(app, ["bench", *words])
        assert shown.exit_code == 1 and "are in the source checkout" in shown.output
