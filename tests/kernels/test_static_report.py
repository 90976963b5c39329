"""The kernels compiled ahead of time, and whether the report can say no."""

import dataclasses
import json
import sys
from dataclasses import astuple

import pytest
import torch

from benchmarks.questions import tune
from benchmarks.static.aot import GPUS, Binary, programs_per_sm
from benchmarks.static.builds import lm_head, package_kernels
from benchmarks.static.report import MAX_EPILOGUE, cells, judge
from benchmarks.static.sass import (
    early_exit_faults,
    main_loop,
    matrix_instruction,
    matrix_instructions,
    opcodes,
    overlap_faults,
    pipe_counts,
    push_order_faults,
    spills,
)
from tests.support.commands import run_command
from tpsample.local.screen_launches import SCREEN_TILES
from tpsample.local.tile_table import Gpu, all_tiles, rule

TILE_64, DTYPE = next((tile, dtype) for tile, dtype in all_tiles() if tile.block_b == 64)


def run_report(folder, *options):
    """The report in a process that compiles: (exit status, rows)."""
    record = folder / "report.json"
    command = (sys.executable, "-m", "benchmarks.static.report", "--json", record, *options)
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
    assert any(row["epilogue"] is not None for row in rows)
    assert {row["variant"] for row in rows} >= {"plain", "push", "everything"}
    return rows


def test_one_tile_and_every_other_kernel_meet_the_requirements(tmp_path, capsys):
    rows = meets_the_requirements(tmp_path, capsys, "--few")
    assert {row["arch"] for row in rows if row["variant"] == "plain"} == set(GPUS)
    assert {row["arch"] for row in rows if row["variant"] == "screen"} == {86, 89, 90}
    kernels = {name.split(":")[1] for name in package_kernels()}
    assert {row["kernel"] for row in rows} >= kernels


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_every_kernel_meets_the_requirements(tmp_path, capsys):
    rows = meets_the_requirements(tmp_path, capsys)
    compiled = {(row["arch"], row["tile"]) for row in rows if row["tile"]}
    tiles = {tile for tile, _ in all_tiles()}
    # The largest tile is not for sm_86 and sm_89.
    assert len(compiled) == len(GPUS) * (len(tiles) + len(SCREEN_TILES)) - 2
    assert {row["dtype"] for row in rows} >= {"bf16", "fp16", "fp32"}


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_every_candidate_of_the_tuner_meets_the_requirements(tmp_path):
    gpu = Gpu("H200", 90, 132)
    rules = [rule(rows, 128256, torch.bfloat16, gpu) for rows in tune.CANDIDATES]
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
        return judge(lm_head(arch, TILE_64, DTYPE), fits, None).faults

    assert faults(89, 99) == faults(80, 163) == []
    assert "shared memory: 102400 of 101376 bytes" in faults(89, 100)


def test_the_report_refuses_to_run_interpreted(tmp_path):
    command = (sys.executable, "-m", "benchmarks.static.report")
    done = run_command(*command, env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 2 and "unset TRITON_INTERPRET" in done.stdout


PRODUCT = "HGMMA.64x64x16.F32.BF16"


def binary(*ops: str, registers: int = 64, stack_bytes: int = 0) -> Binary:
    """An LM head that overlaps as it should."""
    overlapping = ("UBLKPF.L2", *ops, "PREEXIT")
    return Binary(registers, stack_bytes, 72 * 1024, 0, overlapping)


@pytest.mark.parametrize(
    ("extra_per_logit", "fault"),
    [(MAX_EPILOGUE, None), (MAX_EPILOGUE + 1, "epilogue: 31.0")],
    ids=["at the limit", "over it"],
)
def test_a_dear_epilogue_is_flagged(extra_per_logit, fault):
    logits_per_thread = TILE_64.block_v * TILE_64.block_b // (32 * TILE_64.num_warps)
    greedy = binary(PRODUCT)
    dear = binary(PRODUCT, *["FFMA"] * int(extra_per_logit * logits_per_thread))
    row = judge(lm_head(90, TILE_64, DTYPE), dear, greedy)
    assert row.epilogue == extra_per_logit == row.epilogue_by_pipe["fp"]
    assert row.faults == [] if fault is None else row.faults[0].startswith(fault)


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
    faults = judge(lm_head(90, TILE_64, DTYPE), compiled, None).faults
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


def test_at_the_wait_two_stages_are_not_in_flight():
    row = judge(lm_head(90, TILE_64, DTYPE), binary("HGMMA.64x64x16.F32.BF16"), None)
    stage = row.programs_per_sm * TILE_64.block_v * TILE_64.block_d * 2
    stages = TILE_64.num_stages
    assert row.weight_bytes_in_flight == (stage * (stages - 2), stage * (stages - 1))
    assert f"{stage * (stages - 2) // 1024}–{stage * (stages - 1) // 1024}K" in cells(row)


def test_tensor_memory_limits_occupancy():
    assert programs_per_sm(Binary(32, 0, 0, 256, ()), 4, GPUS[100]) == 2


SASS = """
        .headerflags    @"EF_CUDA_SM90"
.text.lm_head_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/              @!PT LDS RZ, [RZ] ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   MUFU.LG2 R4, R5 ;
        /*0050*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0060*/                   STL.64 [R1+0x8], R2 ;
        /*0070*/                   I2FP.F32.U32 R3, R3 ;
        /*0080*/                   NOP;
"""


LOOPS = """
.L_x_1:
        /*0000*/                   LDG.E R1, [R2] ;
.L_x_2:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR6][R4.64] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0050*/                   FADD R1, R1, R1 ;
        /*0060*/               @P1 BRA `(.L_x_3) ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/               @P1 BRA `(.L_x_4) ;
.L_x_4:
"""


def test_the_loop_of_the_product_is_the_innermost_with_matrix_instructions():
    loop = main_loop(LOOPS)
    assert [op.split(".")[0] for op in loop] == ["LDGSTS", "HGMMA", "HGMMA", "BRA"]
    assert matrix_instructions(loop) == 2
    assert main_loop(SASS) == []


def test_reading_sass():
    ops = opcodes(SASS)
    assert ops[:2] == ["LDC", "BRA"] and len(ops) == 8
    assert spills(ops) == 1
    assert matrix_instruction(ops) == "HGMMA"
    assert matrix_instruction(["HFMA2.MMA", "FFMA"]) == "-"
    assert matrix_instruction(["UTCHMMA.2CTA"]) == "UTCHMMA"
    assert pipe_counts(ops) == {"memory": 3, "other": 3, "mufu": 1, "convert": 1}


def push_sass(*names: str) -> list[str]:
    """SASS of a kernel that pushes, as sm_90 has it, from short names."""
    lines = {
        "max": "REDG.E.MAX.S64.STRONG.GPU desc[UR6][R2.64], R4",
        "barrier": "BAR.SYNC.DEFER_BLOCKING 0x0",
        "fence gpu": "MEMBAR.ALL.GPU",
        "arrive": "ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR6][R4.64], R7",
        "read": "LDG.E.64.STRONG.SYS R2, desc[UR6][R2.64]",
        "clear": "STG.E.64 desc[UR6][R2.64], RZ",
        "push": "ST.E.64.STRONG.SYS desc[UR6][R8.64], R2",
        "push weakly": "ST.E.64 desc[UR6][R8.64], R2",
        "push and wait": "ATOMG.E.MAX.S64.STRONG.SYS PT, R6, desc[UR6][R8.64], R2",
        "push by maximum": "REDG.E.MAX.S64.STRONG.SYS desc[UR6][R8.64], R2",
        "push sm_80": "STG.E.64.STRONG.SYS [R6.64], R2",
        "fence sys": "MEMBAR.ALL.SYS",
        "fence sc": "MEMBAR.SC.SYS",
    }
    text = "".join(f"        /*{16 * i:04x}*/  @P0 {lines[n]} ;\n" for i, n in enumerate(names))
    return opcodes(text)


GOOD = ["max", "barrier", "fence gpu", "arrive", "barrier"]
GOOD += ["read", "read", "barrier", "clear", "push", "push"]


@pytest.mark.parametrize(
    "names",
    [GOOD, [*GOOD[:9], "push sm_80"], ["max", "max", *GOOD[1:]]],
    ids=["sm_90", "sm_80", "several maxima"],
)
def test_the_right_memory_order_passes(names):
    assert push_order_faults(push_sass(*names)) == []


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["max", "fence gpu", "arrive", "barrier", "push"], "no CTA barrier"),
        (["barrier", "max", "arrive", "push"], "no CTA barrier"),
        ([*GOOD, "max", "arrive"], "no CTA barrier"),
        ([*GOOD, "fence sys"], "waits for the link"),
        ([*GOOD[:9], "fence sc", "push"], "waits for the link"),
        ([*GOOD[:9], "push and wait"], "atomic of another GPU"),
        ([*GOOD, "push by maximum"], "atomic of another GPU"),
        ([*GOOD[:9], "push weakly"], "no push"),
        (GOOD[:9], "no push"),
        ([*GOOD[:7], "clear", *GOOD[7:]], "between reading the words and clearing"),
        ([*GOOD, "read", "clear"], "between reading the words and clearing"),
        (["arrive", *GOOD], "before any maximum"),
        (["max", "barrier", "push"], "no arrival counter"),
    ],
)
def test_a_wrong_memory_order_is_flagged(names, fault):
    assert any(fault in found for found in push_order_faults(push_sass(*names)))


@pytest.mark.parametrize(
    ("ops", "first", "faults"),
    [
        ("LDG UBLKPF.L2 STG HGMMA.64 HGMMA.64 PREEXIT EXIT", True, []),
        ("LDC ACQBULK LDG.E STG.E EXIT", False, []),
        ("LDG STG.E UBLKPF.L2 HGMMA.64 PREEXIT EXIT", True, ["UBLKPF"]),
        ("LDG UBLKPF.L2 STG.E PREEXIT HGMMA.64 EXIT", True, ["PREEXIT"]),
        ("LDG STG.E HGMMA.64 EXIT", True, ["UBLKPF", "PREEXIT"]),
        ("LDG.E ACQBULK STG.E EXIT", False, ["ACQBULK"]),
        ("LDC EXIT", False, ["ACQBULK"]),
    ],
)
def test_kernels_that_overlap_are_judged(ops, first, faults):
    found = overlap_faults(ops.split(), first=first)
    assert len(found) == len(faults)
    assert all(name in text for name, text in zip(faults, found, strict=True))


@pytest.mark.parametrize(
    ("ops", "faults"),
    [
        (["S2R", "LDG.E.U8", "ISETP", "EXIT", "LDG.E", "EXIT"], 0),
        (["LDG.E.U8", "LDG.E", "EXIT"], 1),
        (["S2R", "EXIT", "LDG.E.U8", "EXIT"], 1),
        (["LDG.E.U8", "LDG.E"], 1),
    ],
    ids=["flag, exit", "flag and more", "nothing", "no exit"],
)
def test_a_row_that_is_done_is_left_at_once(ops, faults):
    assert len(early_exit_faults(ops)) == faults
