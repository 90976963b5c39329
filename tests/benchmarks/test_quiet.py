"""A page says how busy the machine was, and whether a time may be taken from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import drawing, harness, quiet
from benchmarks.harness import Run, execute
from benchmarks.report import RESULT, write_report
from benchmarks.results import Result, View, row
from benchmarks.timing import Timing


def _page(
    loads: list[float], median_us: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    point = row("tpsample", "tpsample", Timing((median_us,) * 3, True), shape="9x9", batch=1)
    made_up = SimpleNamespace(
        QUESTION="How long?", VIEWS=[View("latency", "Time", x="batch")], rows=lambda run: [point]
    )
    monkeypatch.setattr(drawing, "available", lambda: False)
    monkeypatch.setattr(harness, "load", lambda name: made_up)
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(
        quiet,
        "load",
        lambda: {"load": [loads.pop(0), 0.5, 0.25], "busy_cores": 2.0, "gpu_percent": []},
    )
    execute("made up", Run.small(), folder / RESULT)
    return write_report(folder).read_text()


def test_a_page_says_how_busy_the_machine_was(tmp_path, monkeypatch):
    page = _page([0.1, 9.0], 5.0, tmp_path, monkeypatch)
    assert (
        "**The machine was not quiet, so take no time from here: the load average was 9.0 when the "
        in page
    )
    assert "| load before (1, 5, 15 min) | 0.1, 0.5, 0.25 |" in page
    assert "| load after (1, 5, 15 min) | 9, 0.5, 0.25 |" in page


def test_a_quiet_machine_is_not_called_busy(tmp_path, monkeypatch):
    page = _page([0.1, 1.0], 5.0, tmp_path, monkeypatch)
    assert "not quiet" not in page


def test_long_times_are_shown_in_milliseconds(tmp_path, monkeypatch):
    page = _page([0.0] * 2, 638_872.6, tmp_path, monkeypatch)
    assert "9x9, ms:" in page and "| 1 | 639 (639–639) |" in page
    page = _page([0.0] * 2, 12.5, tmp_path, monkeypatch)
    assert "9x9, µs:" in page and "| 1 | 12.5 (12.5–12.5) |" in page


def test_a_result_without_loads_says_nothing_of_them(tmp_path, monkeypatch):
    _page([9.0] * 2, 5.0, tmp_path, monkeypatch)
    older = Result.load(tmp_path / RESULT)
    older.loads = {}
    older.save(tmp_path / RESULT)
    assert "load before" not in write_report(tmp_path).read_text()
