"""SASS is read right, and orders of memory, overlaps and early exits are judged."""

import pytest

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
