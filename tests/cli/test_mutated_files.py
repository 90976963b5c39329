"""Whatever a record holds, `verify` ends with a status and a line of text."""

from __future__ import annotations

import random
import resource
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="needs the extra hf")
pytest.importorskip("rich", reason="needs typer and rich")
from typer.testing import CliRunner

from tests.support.cases import Case
from tests.support.mutations import mutated_record
from tests.support.ranks import run_ranks
from tpsample import SamplingParams
from tpsample.record import write_record

MAX_GROWTH_MB = 64


def _record(path: Path) -> None:
    """A step of three rows with filters, masks, penalties and tokens so far."""
    case = Case.make(300, 3)
    params = [
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, logit_bias={5: -1.0}),
        SamplingParams(bad_words=[[5, 6]], min_tokens=2, stop_token_ids=[8], min_p=0.1),
        SamplingParams(repetition_penalty=1.2, allowed_token_ids=[1, 2, 3, 299]),
    ]
    case = Case(case.hidden_states, case.weight, params, case.positions)
    so_far = {"prompt_token_ids": [[1, 5]] * 3, "output_token_ids": [[], [5], [2]]}
    out = case.oracle()
    write_record(path, case.hidden_states, case.weight, params, case.positions, out, **so_far)


def _outcomes(folder: Path, seeds: range) -> list[str]:
    """List the faults, in a process whose memory grows by nothing else. Runs on one rank."""
    from tpsample.cli.app import app

    right, wrong = folder / "right", folder / "wrong"
    command = ["verify", str(wrong)]
    _record(right)
    write = partial(mutated_record, right, wrong)
    # No tensor may be asked for that this machine would have to find the memory for.
    limit = 8 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    write(random.Random(-1))
    CliRunner().invoke(app, command)  # imports
    before, faults, statuses = _peak_mb(), [], set()
    for seed in seeds:
        write(random.Random(seed))
        done = CliRunner().invoke(app, command)
        statuses.add(done.exit_code)
        lines = done.stderr.splitlines()
        failed = done.exit_code == 2
        ended = done.exception is None or isinstance(done.exception, SystemExit)
        fault = None
        if not ended or done.exit_code not in (0, 1, 2):
            fault = f"status {done.exit_code}, {done.exception!r}"
        elif len(lines) != failed:
            fault = f"status {done.exit_code}, {len(lines)} lines: {done.stderr[:300]!r}"
        elif "alloc" in done.stderr or _peak_mb() - before > MAX_GROWTH_MB:
            fault = f"memory {_peak_mb() - before:.0f} MB: {done.stderr[:300]!r}"
            before = _peak_mb()
        if fault:
            faults.append(f"seed {seed}: {fault}")
    if len(seeds) > 50 and statuses != {0, 1, 2}:
        faults.append(f"expected statuses 0, 1 and 2, got {statuses}")
    return faults


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    "count", [100, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_every_file_ends_with_a_status_and_a_line(tmp_path: Path, count: int) -> None:
    (faults,) = run_ranks(1, _outcomes, tmp_path, range(count), timeout_s=600)
    assert faults == []


def test_the_memory_of_a_record_is_seen(tmp_path: Path) -> None:
    """Twice the limit, as a fault that the test above must notice."""
    (grown,) = run_ranks(1, _grown_by, 2 * MAX_GROWTH_MB)
    assert grown > MAX_GROWTH_MB


def _grown_by(megabytes: int) -> float:
    before = _peak_mb()
    torch.ones(megabytes, 2**18)
    return _peak_mb() - before
