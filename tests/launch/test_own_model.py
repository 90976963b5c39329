"""The examples for model code of one's own draw the tokens of the definition, on several ranks."""

from __future__ import annotations

import importlib.util
import os
import time
import warnings
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.commands import ROOT, TORCHRUN, run_command
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample.agreement import construction
from tpsample.distributed import Job

FOLDER = ROOT / "launch" / "own_model"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
EVEN = "pipeline_parallel"
ALONE = "trainer_logprobs"
OWN_ROWS = "data_parallel_attention"
"""Ranks differ in what they return, because each has rows of its own."""


def _run(name: str) -> object:
    """Return what an example returns on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    native = mock.patch.object(construction, "interpreted", lambda: False)
    with native, warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.filterwarnings("error", module=name)  # an example does nothing doubtful
        return module.main(Job(rank, world_size, rank, world_size))


CASES = [(name, 2) for name in NAMES]
MORE = [(name, 4 if name == EVEN else 3) for name in NAMES if name != ALONE]


@pytest.mark.parametrize(("name", "world_size"), [*CASES, *long(*MORE)])
def test_its_tokens_are_those_of_the_definition(name: str, world_size: int) -> None:
    of_ranks = run_ranks(world_size, _run, name)
    for found, expected in of_ranks:
        assert found == (pytest.approx(expected, abs=1e-4) if name == ALONE else expected)
    lengths = [len(found) for found, _ in of_ranks]
    assert lengths[0] and (name == OWN_ROWS or all(each == of_ranks[0] for each in of_ranks))
    if name == OWN_ROWS:
        assert len(set(lengths)) > 1


@pytest.mark.parametrize("name", NAMES)
def test_it_is_at_most_forty_lines(name: str) -> None:
    assert 20 <= len((FOLDER / f"{name}.py").read_text().splitlines()) <= 40


@pytest.mark.parametrize("name", long(*NAMES))
def test_it_takes_less_than_a_minute_under_torchrun(name: str) -> None:
    started = time.monotonic()
    done = run_command(*TORCHRUN, 2, f"launch/own_model/{name}.py")
    assert done.returncode == 0, done.stderr
    assert "[" in done.stdout and time.monotonic() - started < 60


def test_the_page_has_a_line_for_each_and_fits_a_screen() -> None:
    page = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"]({name}.py)" not in page] == []
    assert len(page.splitlines()) <= 75
    assert "launch/own_model/README.md" in (ROOT / "README.md").read_text()
