"""Every kernel that a section of the GPU check launches is compiled before it."""

from __future__ import annotations

import functools
import json
import pickle
import sys
import time

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.gpu import precompile, sections
from benchmarks.lab.kernels import row_noise_kernel
from benchmarks.lab.launches import Launch, Pointer, filled, listed, searched
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from tests.support.commands import run_command
from tests.support.limits import slowness
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams

CPU = torch.device("cpu")
REHEARSALS = sections.rehearsals(True)
SECTIONS = list(REHEARSALS)
DEAR = ("filters", "features", "kinds", "exchange", "shard", "screened")
"""Sections that go the way of others here, and take long."""


def _launch(**arguments) -> Launch:
    return Launch.of(row_noise_kernel, (), arguments)


def _rehearsed(section: str) -> list[Launch]:
    launches, problem = precompile.rehearse(REHEARSALS[section], CPU)
    assert problem is None
    return launches


@triton.autotune(configs=[triton.Config({"BLOCK": 16})], key=[])
@triton.heuristics({"ROWS": lambda _: 2})
@triton.jit
def tuned_kernel(x_ptr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), ROWS)


class TestLaunch:
    def test_of_a_kernel_that_others_tune_is_of_the_kernel(self):
        """It has its blocks already, so that the tuner could not give them again."""
        launch = Launch(f"{__name__}:tuned_kernel", ())
        assert launch.function is tuned_kernel.fn.fn

    def test_is_the_same_where_the_compiler_sees_no_difference(self):
        whole = torch.zeros(64, dtype=torch.int64)
        base = {
            "seed_ptr": whole,
            "stride_stream": 32,
            "num_rows": 3,
            "BLOCK_B": 32,
            "num_warps": 4,
        }
        first = _launch(**base)
        assert _launch(**{**base, "stride_stream": 48, "num_rows": 16}) == first
        others = {name: value for name, value in base.items() if name != "seed_ptr"}
        assert Launch.of(row_noise_kernel, (whole.clone(),), others) == first
        for change in (
            {"seed_ptr": whole[1:]},
            {"seed_ptr": whole.int()},
            {"seed_ptr": None},
            {"stride_stream": 33},
            {"stride_stream": 1},
            {"stride_stream": 2**31},
            {"num_rows": 2**31},
            {"BLOCK_B": 64},
            {"num_warps": 8},
        ):
            assert _launch(**{**base, **change}) != first, change

    def test_travels_to_another_process(self):
        launch = _launch(seed_ptr=torch.zeros(8), num_rows=3, BLOCK_B=32)
        assert pickle.loads(pickle.dumps(launch)) == launch
        assert launch.kernel == "benchmarks.lab.kernels:row_noise_kernel"
        assert dict(launch.arguments)["seed_ptr"] == Pointer(torch.float32)

    def test_is_listed_and_not_made(self):
        problem = Problem.make(make_weight(300, 16, CPU), 3)
        candidate = problem.sampled_by(make_sampler(problem.weight, 3))
        candidate.token_ids.fill_(-7)
        with listed() as launches:
            candidate.step()
            candidate.step()
        assert next(iter(launches)).kernel.endswith(":lm_head_kernel")
        assert set(launches.values()) == {2}
        assert candidate.token_ids.tolist() == [-7] * 3
        candidate.check()  # kernels run again


def test_steps_that_do_not_run_search_their_filtered_rows():
    params = [SamplingParams(seed=row, top_p=0.9) for row in range(2)]
    sampler = LMHeadSampler(torch.zeros(300, 8), backend="triton")
    batch = SamplingBatch.from_params(params, vocab_size=300)
    with listed() as launches, searched(), filled():
        sampler(torch.zeros(2, 8), batch, 0)
    assert "best_kept_kernel" in {launch.kernel.split(":")[1] for launch in launches}


class TestRehearsal:
    @pytest.mark.parametrize(
        "section", [*(s for s in SECTIONS if s not in DEAR), *long(*((s,) for s in DEAR))]
    )
    def test_lists_all_that_a_section_launches(self, section, tmp_path):
        rehearsed = _rehearsed(section)
        with listed(run_them=True) as launched:
            facts = list(sections.run_section(section, True, tmp_path, time.time() + 600))
        assert launched and facts
        json.dumps(facts)  # it is part of a record
        assert set(launched) <= set(rehearsed)

    def test_on_a_gpu_every_shape_and_batch_is_a_part(self):
        parts = sections.rehearsals(False)
        assert "single_gpu 128256x8192 64" in parts and "goldens" in parts
        covered = {part.split()[0] for part in parts}
        assert covered == set(sections.SECTIONS) - {
            *("environment", "compile"),
            *("noise", "processes", "kernel_times"),  # one small kernel, or other shapes
        }


class TestSection:
    def test_compiles_in_processes(self):
        until = time.time() + 120 * slowness()
        parts = {"oracle": REHEARSALS["oracle"], "nothing": functools.partial(int, "nothing")}
        facts = precompile.compile_parts(parts, CPU, until, 1)
        assert facts["launches"] == facts["compiled"] == len(_rehearsed("oracle")) > 0
        assert [line.split(":")[0] for line in facts["not_rehearsed"]] == ["nothing"]


@pytest.mark.parametrize(
    "sections", long((("virtual_ranks",),), (tuple(SECTIONS),)), ids=["few", "all"]
)
@pytest.mark.timeout(1200)
def test_the_launch_finds_in_the_cache_what_was_compiled(sections, tmp_path):
    """In processes that compile, for a GPU that is absent."""
    found = []
    for action in ("compile", "launch"):
        done = run_command(
            *(sys.executable, "-m", "tests.support.compiled_first", action, *sections),
            env={"TRITON_CACHE_DIR": str(tmp_path)},
            timeout_s=900,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        lines = done.stdout.splitlines()
        assert [line for line in lines if line.endswith(" None")], lines
        assert not [line for line in lines if "Error" in line]
        found.append(lines[-2:])
    assert found[0] == found[1] and found[0][0].startswith("cubins ['")
