"""The page says what was measured, where tpsample loses, and whether the machine was quiet."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import drawing, quiet, text
from benchmarks.scaling import pictures
from benchmarks.scaling.page import write_page
from benchmarks.scaling.record import RECORD, Record
from tests.support import scaling


@pytest.fixture(autouse=True)
def pictures_only_where_they_are_looked_at(request, monkeypatch):
    if "pictures" not in request.node.name:
        monkeypatch.setattr(drawing, "available", lambda: False)


def _page(record: Record, folder) -> str:
    record.save(folder / RECORD)
    return write_page(folder).read_text()


def test_all_world_sizes_stand_on_one_page_with_its_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    page = _page(scaling.made_up(), tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    tokens = {f"tokens-1000x64-{mode}.png" for mode in ("plain", "top_p-0.95", "top_k-50")}
    assert drawn == tokens | {"bytes-1000x64.png", "ratio-1000x64.png"}
    assert all(f"({name})" in page for name in drawn)
    assert "| 1 | 3 | 300,000 | 150,000 | 150,000 |" in page
    assert "| 2 | 3 | 300,000 | 100,000 | 150,000 |" in page
    assert "enable_tp_lm_head_all_to_all" in page
    for line in ("not quiet", "Not complete", "Tiny", "CPU: these"):
        assert line not in page


@pytest.mark.parametrize(
    ("ours_us", "loses", "wins"), [(10.0, 0, 12), (50.0, 12, 0), (20.0, 12, 0)]
)
def test_losses_are_counted_against_the_best_baseline(ours_us, loses, wins, tmp_path):
    page = _page(scaling.made_up(ours_us), tmp_path)
    assert f"loses: {loses} of 12 points" in page and f"wins: {wins} of 12 points" in page
    assert f"| {text.three(ours_us / 20)} | all-to-all + race | 1000x64 | plain | 2 | 3 |" in page


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
    record = scaling.made_up()
    record.sessions[0][place] = scaling.QUIET | busy
    page = _page(record, tmp_path)
    assert "**The machine was not quiet" in page and said in page


def test_a_run_that_follows_another_at_once_is_not_called_disturbed(tmp_path):
    record = scaling.made_up()
    record.sessions[0]["before"] = scaling.QUIET | {"load": [1.9, 1.0, 0.5]}
    assert "was not quiet" not in _page(record, tmp_path)


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
    record = scaling.made_up()
    record.points = record.points[:-2]
    record.points[0]["left_out"] = [{"candidate": "other", "why": "wrong | token"}]
    page = _page(record, tmp_path)
    assert "points are missing (2 of W = 2)" in page
    assert "| other | wrong \\| token | 1000x64 | plain | 1 | 1 |" in page


def test_tiny_sizes_and_real_ones_on_a_cpu_are_told_apart(tmp_path):
    for tiny in (True, False):
        record = scaling.made_up(tiny=tiny)
        record.machine["hardware"] = "CPU"
        page = _page(record, tmp_path)
        assert ("Tiny sizes" in page) == tiny and "CPU: these times" in page


def test_of_the_samplers_behind_an_exchange_the_fastest_is_drawn():
    best = pictures.fastest(scaling.made_up().rows())
    alone = [r for r in best if (r["world_size"], r["batch"], r["mode"]) == (1, 1, "plain")]
    assert {row["family"] for row in alone} == {"tpsample", "all-gather", "all-to-all"}
    assert {row["median_us"] for row in best} == {10.0, 20.0, 30.0}


def test_few_values_keep_the_ends():
    assert drawing.few([4, 1, 2, 1]) == [1, 2, 4]
    assert drawing.few(range(1, 11)) == [1, 4, 7, 10]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(638872.6, "639,000"), (99.96, "100"), (12.04, "12"), (0.00012345, "0.000123"), (0.0, "0")],
)
def test_numbers_have_three_digits(value, shown):
    assert text.three(value) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(0, "0 B"), (999, "999 B"), (999.9, "1 KB"), (114_912_000, "115 MB")]
)
def test_bytes_have_a_unit(num_bytes, shown):
    assert text.size(num_bytes) == shown


def test_another_file_is_refused(tmp_path):
    (tmp_path / RECORD).write_text('{"schema": 1}')
    with pytest.raises(ValueError, match=r"a record of benchmarks\.scaling"):
        Record.load(tmp_path / RECORD)
