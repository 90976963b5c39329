"""The kernels compiled ahead of time, and whether the report can say no."""

import dataclasses
import json
import sys
from dataclasses import astuple

import pytest
import triton

from benchmarks.questions import tune
from benchmarks.static import builds, report
from benchmarks.static.aot import GPUS, Binary, programs_per_sm
from benchmarks.static.builds import lm_head, package_kernels
from benchmarks.static.report import MAX_EPILOGUE, judge
from tests.support.commands import run_command
from tpsample.backends.triton_.screen_launches import SCREEN_TILES
from tpsample.backends.triton_.tile_table import Gpu, all_tiles, rule
from tpsample.core.weight_format import BF16

TILE_64, WEIGHTS = next(each for each in all_tiles() if each[0].block_b == 64)


def run_report(folder, *options):
    """The report in a process that compiles what has changed: (exit status, rows)."""
    record, cache = folder / "report.json", f"{triton.knobs.cache.dir}-report"
    command = (sys.executable, "-m", "benchmarks.static.report", "--cache", cache)
    command += ("--json", record, *options)
    done = run_command(*command, timeout_s=900)
    print(done.stdout)
    assert record.exists(), done.stderr
    return done.returncode, json.loads(record.read_text())["rows"]


def meets_the_requirements(folder, capsys, *options):
    """The rows of a report without a fault."""
    with capsys.disabled():
        print()
        status, rows = run_report(folder, *options)
    assert [fault for row in rows for fault in row["faults"]] == []
    assert status == 0
    assert any(row["epilogue"] for row in rows)
    assert {row["variant"] for row in rows} >= {"plain", "push", "everything", "drafts, everything"}
    return rows


@pytest.mark.heavy
def test_one_tile_and_every_other_kernel_meet_the_requirements(tmp_path, capsys):
    rows = meets_the_requirements(tmp_path, capsys, "--few")
    assert {row["arch"] for row in rows if row["variant"] == "plain"} == set(GPUS)
    assert {row["arch"] for row in rows if row["variant"] == "screen"} == {86, 89, 90}
    kernels = {name.split(":")[1] for name in package_kernels()}
    assert {row["kernel"] for row in rows} >= kernels


def test_a_head_with_everything_lacks_little():
    """Nobody screens there, a plain step has no drafts, and a verification draws one sample."""
    tile = rule(64, 0, BF16, Gpu("H200", 90, 132))
    heads = [each.launch for each in builds._lm_heads(90, [(tile, BF16)], ("everything",))]
    lacking = [{name for name, value in head.arguments if value is None} for head in heads]
    assert lacking[0] == {"listed_ptr", "num_listed_ptr", "draft_ptr", "num_drafts_ptr"}
    assert lacking[1:] == [{"listed_ptr", "num_listed_ptr", "num_samples"}]


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_every_kernel_meets_the_requirements(tmp_path, capsys):
    rows = meets_the_requirements(tmp_path, capsys)
    compiled = {(row["arch"], row["tile"]) for row in rows if row["tile"]}
    tiles = {tile for tile, _ in all_tiles()}
    # Before sm_90 and on sm_120 the largest tile is halved, and there the smallest is another.
    assert len(compiled) == len(GPUS) * (len(tiles) + len(SCREEN_TILES)) - 5
    assert {row["dtype"] for row in rows} >= {"bf16", "fp16", "fp32"}


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_every_candidate_of_the_tuner_meets_the_requirements(tmp_path):
    gpu = Gpu("H200", 90, 132)
    rules = [rule(rows, 128256, BF16, gpu) for rows in tune.CANDIDATES]
    tiles = {tile for each in rules for tile in tune.candidates(each, gpu)}
    words = [f"--tile={','.join(map(str, astuple(tile)))}" for tile in tiles]
    status, rows = run_report(tmp_path, "--arch", "90", *words)
    assert status == 0 and len(rows) == len(tiles)
    assert {row["programs_per_sm"] for row in rows} >= {1, 2, 3, 4}


def test_bad_tiles_are_flagged(tmp_path):
    spilling, narrow = "256,64,32,4,2", "32,16,64,4,4"
    status, rows = run_report(tmp_path, "--arch", "90", "--tile", spilling, "--tile", narrow)
    assert status == 1
    spilled, fell_back = (" ".join(row["faults"]) for row in rows)
    assert "spills" in spilled and "expected HGMMA" not in spilled
    assert "expected HGMMA" in fell_back and "got HMMA" in fell_back and "spills" not in fell_back


def test_too_much_shared_memory_is_flagged():
    def faults(arch, kilobytes):
        fits = dataclasses.replace(binary("HMMA.16816.F32.BF16"), shared_bytes=kilobytes * 1024)
        return judge(lm_head(arch, TILE_64, WEIGHTS), fits, None)["faults"]

    assert faults(89, 99) == faults(80, 163) == faults(120, 99) == []
    assert "shared memory: 102400 of 101376 bytes" in faults(89, 100)
    assert "shared memory: 102400 of 101376 bytes" in faults(120, 100)


def test_the_report_refuses_to_run_interpreted(capsys):
    assert triton.knobs.runtime.interpret and report.main([]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().out


PRODUCT = "HGMMA.64x64x16.F32.BF16"


def binary(*ops: str, registers: int = 64, stack_bytes: int = 0) -> Binary:
    """An LM head that overlaps as it should."""
    overlapping = ("UBLKPF.L2", *ops, "PREEXIT")
    return Binary(registers, stack_bytes, 72 * 1024, 0, overlapping)


@pytest.mark.parametrize(
    ("extra_per_logit", "fault"),
    [(MAX_EPILOGUE, None), (MAX_EPILOGUE + 1, f"epilogue: {MAX_EPILOGUE + 1}")],
    ids=["at the limit", "over it"],
)
def test_a_dear_epilogue_is_flagged(extra_per_logit, fault):
    logits_per_thread = TILE_64.block_v * TILE_64.block_b // (32 * TILE_64.num_warps)
    greedy = binary(PRODUCT)
    dear = binary(PRODUCT, *["FFMA"] * int(extra_per_logit * logits_per_thread))
    row = judge(lm_head(90, TILE_64, WEIGHTS), dear, greedy)
    assert row["epilogue"] == extra_per_logit == row["fp"]
    assert row["faults"] == [] if fault is None else row["faults"][0].startswith(fault)


@pytest.mark.parametrize(
    ("compiled", "fault"),
    [
        (binary(PRODUCT), None),
        (binary(PRODUCT, "LDL.64"), "spills: 1 instr"),
        (binary(PRODUCT, stack_bytes=8), "spills: 0 instructions, 8 bytes"),
        (binary("HMMA.16816.F32.BF16"), "expected HGMMA on H100/H200, got HMMA"),
        (binary("HFMA2.MMA"), "expected HGMMA on H100/H200, got -"),
    ],
    ids=["right", "spill", "stack", "wrong family", "none"],
)
def test_spills_and_fallbacks_are_flagged(compiled, fault):
    faults = judge(lm_head(90, TILE_64, WEIGHTS), compiled, None)["faults"]
    assert faults == [] if fault is None else faults[0].startswith(fault)


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared", "programs"),
    [
        (64, 4, 0, 8),  # 65536 / (64 · 128)
        (65, 4, 0, 4 * 1 + 3),  # 65 is rounded up to 72 a thread: 7 warps in each quarter
        (255, 8, 0, 1),
        (32, 4, 72 * 1024, 3),  # 228 / 73
        (16, 1, 0, 32),  # the limit on programs
        (16, 8, 0, 8),  # the limit on warps
    ],
)
def test_occupancy(registers, num_warps, shared, programs):
    assert programs_per_sm(Binary(registers, 0, shared, 0, ()), num_warps, GPUS[90]) == programs


def test_tensor_memory_limits_occupancy():
    assert programs_per_sm(Binary(32, 0, 0, 256, ()), 4, GPUS[100]) == 2
    assert programs_per_sm(Binary(32, 0, 0, 256, ()), 4, GPUS[103]) == 2


def test_blackwell_of_graphics_has_fewer_warps_and_no_tensor_memory():
    assert programs_per_sm(Binary(32, 0, 0, 0, ()), 4, GPUS[120]) == 12  # 48 warps
    assert programs_per_sm(Binary(16, 0, 0, 0, ()), 1, GPUS[120]) == 24
