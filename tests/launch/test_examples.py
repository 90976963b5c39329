"""The examples run, and write the same on one rank and on two."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.commands import ROOT, TORCHRUN, run_command
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tests.support.tried import need_transformers
from tpsample.agreement import construction
from tpsample.distributed import Job
from tpsample.record.trace import TopKTrace

EXAMPLES = ROOT / "launch" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CHEAPEST = "continuous_batching"


def _load(name: str) -> Any:
    """An example as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main(module: Any, job: Job) -> Any:
    """Return what its `main` returns with the backend that a machine without a GPU chooses."""
    with mock.patch.object(construction, "interpreted", lambda: False), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # as of transformers' old arguments
        warnings.filterwarnings("error", module=module.__name__)  # an example does nothing doubtful
        return module.main(job)


def _run(name: str) -> Any:
    """Run an example on this rank, and return its value."""
    if not dist.is_initialized():
        return _plain(_main(_load(name), Job()))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    return _plain(_main(_load(name), Job(rank, world_size, rank, world_size)))


def _plain(found: Any) -> Any:
    if isinstance(found, TopKTrace):
        return {name: tensor.tolist() for name, tensor in found.tensors().items()}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_writes_the_same_on_one_rank_and_on_two(name: str) -> None:
    if name == "transformers_generate":
        need_transformers()
    first, second = run_ranks(2, _run, name)
    assert first == second and first
    if name != "dtensor_model":  # a mesh needs a process group
        assert _run(name) == first


@pytest.mark.parametrize("name", long(*NAMES))
def test_it_runs_on_three_ranks(name: str) -> None:
    if name == "transformers_generate":
        need_transformers()
    first, *others = run_ranks(3, _run, name)
    assert first and all(other == first for other in others)


def test_the_requests_of_the_batch_come_go_and_do_not_depend_on_each_other() -> None:
    example = _load("continuous_batching")
    together = _main(example, Job())
    assert [len(text) for text in together] == [9, 6, 8, 4, 7]
    example.PREEMPTED = {}
    assert _main(example, Job()) == together
    everyone, example.REQUESTS = example.REQUESTS, example.REQUESTS[:1]
    assert _main(example, Job()) == together[:1]
    example.REQUESTS = everyone
    example.SLOTS, example.BUDGET = 1, 2
    assert _main(example, Job()) == together


def test_the_drafted_text_is_plain_decodings_in_fewer_steps() -> None:
    example = _load("speculative_decoding")
    texts, steps = _main(example, Job())
    example.K = 0  # nothing is drafted: a step per token
    plain, plain_steps = _main(example, Job())
    assert texts == plain
    assert steps < 0.8 * plain_steps == 0.8 * (example.LENGTH - 2)


def test_ratios_over_replayed_sets_are_1() -> None:
    ratios = _main(_load("replay_rollouts"), Job())
    assert len(ratios["replayed"]) == 72
    assert ratios["replayed"] == pytest.approx([1.0] * 72, abs=1e-5)
    assert max(ratios["over all ids"]) < 0.9


@pytest.mark.parametrize("name", [CHEAPEST, *long(*(n for n in NAMES if n != CHEAPEST))])
def test_it_runs_under_torchrun_as_its_docstring_says(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    two_ranks = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    assert f"{two_ranks} launch/examples/{name}.py" in " ".join(docstring.split())
    done = run_command(*TORCHRUN, 2, f"launch/examples/{name}.py")
    assert done.returncode == 0, done.stderr
    assert "[" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_enough_to_read(name: str) -> None:
    assert 30 <= len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 100


def test_the_readme_names_every_example() -> None:
    page = (Path(EXAMPLES).parent / "README.md").read_text()
    assert [name for name in NAMES if f"examples/{name}.py" not in page] == []
