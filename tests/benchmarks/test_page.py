"""A page says what was measured, where tpsample loses, and whether the machine was quiet."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.lab import machine, plots, quiet, text
from benchmarks.lab.page import write_page
from benchmarks.lab.results import RESULT, Result, row, with_ratios
from benchmarks.lab.timing import Timing
from benchmarks.questions.scaling import warnings
from tests.support import scaling


@pytest.fixture(autouse=True)
def pictures_only_where_they_are_looked_at(request, monkeypatch):
    if "pictures" not in request.node.name:
        monkeypatch.setattr(plots, "available", lambda: False)


def _page(result: Result, folder) -> str:
    result.save(folder / RESULT)
    return write_page(folder).read_text()


def test_all_world_sizes_stand_on_one_page_with_its_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    page = _page(scaling.made_up(), tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    tokens = {f"tokens-1000x64-{mode}.png" for mode in ("plain", "top_p-0.95", "top_k-50")}
    assert drawn == tokens | {"bytes-1000x64.png", "ratio-1000x64.png"}
    assert all(f"({name})" in page for name in drawn)
    assert "batch 3:\n\n| world_size | tpsample | stored logits | all-gather | all-to-all |" in page
    assert "| 1 | 300,000 | 150,000 |  |  |" in page
    assert "| 2 | 300,000 |  | 100,000 | 150,000 |" in page
    for line in ("not quiet", "Not complete", "Tiny", "CPU: these"):
        assert line not in page


@pytest.mark.parametrize(
    ("ours_us", "loses", "wins"), [(10.0, 0, 12), (50.0, 12, 0), (20.0, 12, 0)]
)
def test_losses_are_counted_against_the_best_baseline(ours_us, loses, wins, tmp_path):
    page = _page(scaling.made_up(ours_us), tmp_path)
    assert f"is not faster: {loses} of 12 points" in page and f"is faster: {wins} of 12" in page
    ratio = text.three(ours_us / 20)
    assert f"| {ratio} | all-to-all + race | 1000x64 | plain | 2 | 3 |" in page


def test_losses_come_first_and_a_ratio_that_may_be_chance_is_starred(tmp_path):
    result = scaling.made_up()
    point = {"shape": "1000x64", "mode": "plain", "world_size": 1}
    result.rows = []
    for batch, ours in ((1, 3.0), (64, 1.0)):
        result.rows += with_ratios(
            [
                row("tpsample", "tpsample", Timing((ours,), True), **point, batch=batch),
                row("other", "baseline", Timing((2.0,), True), **point, batch=batch),
            ],
            limit_us=1.0,
        )
    result.rows[0]["may_be_chance"] = True
    page = _page(result, tmp_path)
    assert page.index("| 1.5 | other \\*\\* |") < page.index("| 0.5 | other |")
    assert "may be chance" in page


@pytest.mark.parametrize(
    ("place", "busy", "said"),
    [
        (
            "before",
            {"load": [0.9, 0.0, 0.0], "busy_cores": 0.7},
            "0.7 of 2 cores were busy when the run began",
        ),
        ("after", {"load": [2.6, 0.0, 0.0]}, "load average was 2.6 when the run ended"),
        ("before", {"gpu_percent": [0, 70]}, "in use when the run began"),
    ],
)
def test_a_machine_that_was_not_quiet_is_named(place, busy, said, tmp_path):
    result = scaling.made_up()
    result.sessions[0][place] = scaling.QUIET | busy
    page = _page(result, tmp_path)
    assert "**The machine was not quiet" in page and said in page


def test_cores_at_work_are_counted(monkeypatch):
    monkeypatch.setattr(quiet, "WATCHED_S", 0.5)
    with ThreadPoolExecutor() as pool:
        before = time.process_time()
        work = pool.submit(_work, time.monotonic() + 0.6)
        busy = quiet.busy_cores()
        work.result()
    of_this_process = (time.process_time() - before) / 0.6
    assert 0.3 * of_this_process < busy <= os.cpu_count()


def _work(until: float) -> None:
    while time.monotonic() < until:
        pass


def test_an_unfinished_run_says_what_is_missing_and_what_was_left_out(tmp_path):
    result = scaling.made_up()
    result.rows = [row for row in result.rows if (row["world_size"], row["mode"]) != (2, "plain")]
    where = {"world_size": 1, "shape": "1000x64", "mode": "plain", "batch": 1}
    result.left_out = [{**where, "candidate": "other", "why": "wrong | token"}]
    result.warnings = warnings(result, [])
    page = _page(result, tmp_path)
    assert "points are missing (2 of W = 2)" in page
    assert "| other | 1000x64 | plain | 1 | 1 | wrong \\| token |" in page


def test_other_files_are_refused(tmp_path):
    for data, said in (({"schema": 0}, "schema"), ({"schema": 2, "rows": []}, "not a benchmark")):
        (tmp_path / RESULT).write_text(json.dumps(data))
        with pytest.raises(ValueError, match=said):
            Result.load(tmp_path / RESULT)


def test_a_page_names_no_folder_of_the_machine(monkeypatch):
    """Neither does the command of a run, nor any page that is kept."""
    monkeypatch.setattr("sys.argv", ["run", "--output", "/home/me/pages", "--cache", "here/too"])
    assert machine.command().endswith(" --output pages --cache here/too")
    files = [path for path in machine.RESULTS.rglob("*") if path.suffix in (".md", ".json")]
    assert files
    for path in files:
        assert not re.search(r"[\s\"'=]/(tmp|home|root|work|mnt)/", path.read_text()), path
