"""Least times by hand: what counts and rates make of small numbers, and what is a fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.lab.launches import Launch
from benchmarks.static.aot import GPUS, Binary
from benchmarks.static.chips import ARCHS, CHIPS, LANE_SOURCES, LANES, Chip, results
from benchmarks.static.least_times import (
    PASS_REASONS,
    PASSES,
    Counted,
    Counts,
    Product,
    aligned,
    compared,
    faults_of,
    launches,
    least,
    sections,
    steps,
    widened,
)
from tpsample.backends.triton_.passes import BLOCK
from tpsample.backends.triton_.tile_table import Tile
from tpsample.backends.triton_.verification import RESIDUAL_PARTS

CHIP = Chip("a chip", 90, 100, 1.0, 2.0, 4.0, 100, 200, "made up")
"""100 SMs at 1 GHz: 12,800 instructions of a thread take 1 ns."""
TILE = Tile(block_v=128, block_b=64, block_d=64, num_warps=4, num_stages=4)
FREE = Product(TILE, Counter(issue=0), Counter())


def counted(per_thread: int, **kinds: int) -> Counted:
    return Counted(8.0, Counter(issue=per_thread, **kinds), dict.fromkeys(LANES, 0.0), 256)


def counts_of(per_thread: int) -> dict[int, Counts]:
    each = {name.name: counted(per_thread) for name in PASSES}
    return dict.fromkeys(ARCHS, Counts(each, {64: FREE, 16: FREE}, FREE))


def test_instructions_are_told_apart_by_the_unit_that_executes_them():
    found = results(["FFMA2", "FADD.FTZ", "FSETP.GT.AND", "IADD3", "IMAD.WIDE", "DFMA", "BRA"])
    assert found == {"issue": 7, "fp32": 3, "integer": 2, "multiply": 1, "float64": 1}
    assert results(["MUFU.RCP", "I2FP.F32.U32", "LDG.E.128"]) == {
        "issue": 3,
        "special": 1,
        "convert": 1,
        "memory": 1,
    }


def test_every_rate_has_a_value_per_architecture_and_a_source():
    assert set(LANE_SOURCES) == set(LANES)
    assert {len(each) for each in LANES.values()} == {len(ARCHS)}
    assert {chip.arch for chip in CHIPS} == set(ARCHS) < set(GPUS)
    assert all(chip.sources for chip in CHIPS)


@pytest.mark.parametrize(
    ("name", "fp32", "float64"),
    [("A100", 19.5, 9.7), ("H100", 67, 34), ("L40S", 91.6, 1.4), ("B200", 75, 37), ("L4", 30, 0.5)],
)
def test_lanes_and_clocks_make_the_rates_of_the_data_sheets(name, fp32, float64):
    chip = next(chip for chip in CHIPS if chip.name == name)
    for kind, tflops in (("fp32", fp32), ("float64", float64)):
        found = 2 * chip.lanes(kind) * chip.sms * chip.clock / 1000
        assert found == pytest.approx(tflops, rel=0.06)


def test_a_chip_without_a_figure_for_l2_has_the_bytes_per_cycle_of_the_h100():
    h100, h200 = (next(chip for chip in CHIPS if chip.name == each) for each in ("H100", "H200"))
    assert h200.l2 is None and h200.l2_rate == pytest.approx(h100.l2_rate, rel=2e-3)


def test_a_pass_takes_as_long_as_its_busiest_unit():
    # 2049 ids are two blocks of 2048: 128 programs of 256 threads.
    busy = least(CHIP, counted(800, integer=480), 64, 2049)
    assert busy.unit == "integer" and busy.busy == pytest.approx(128 * 256 * 480 / 6.4e6)
    assert busy.l2 == pytest.approx(64 * 2049 * 4 / 4e6)
    assert busy.memory == pytest.approx(64 * 2049 * 4 / 2e6)
    assert busy.us == busy.busy
    idle = least(CHIP, counted(8), 64, 2048)
    assert idle.unit == "issue" and idle.us == idle.l2 > idle.busy > 0


def test_a_logit_more_costs_what_twice_the_block_adds():
    launch = Launch("a:mass_kernel", (("BLOCK", 2048), ("num_warps", 8), ("width", 17)))
    assert dict(widened(launch).arguments)["BLOCK"] == 4096
    assert dict(aligned(launch).arguments)["width"] == 16
    once, twice = (Binary(0, 0, 0, 0, ("FADD",) * n + ("BRA",) * 40) for n in (240, 480))
    found = compared(launch, once, twice)
    assert found.each["issue"] == found.each["fp32"] == 30
    assert found.per_logit() == 35 and found.per_logit("fp32") == 30 and found.block == 2048


def test_a_product_repeats_its_loop():
    product = Product(TILE, Counter(issue=1000), Counter(issue=100))
    programs, iterations = -(-16032 // 128), 4096 // 64
    needed = programs * 128 * (1000 + (iterations - 1) * 100)
    assert product.busy_us(CHIP, 16032) == pytest.approx(needed / 12.8e6)


def test_steps_add_their_passes_to_the_weight():
    of = steps(CHIP, counts_of(8)[90])
    weight = 16032 * 4096 * 2
    assert of.plain == pytest.approx(2 * 16032 * 4096 * 64 / 100e6)  # the product is longer
    assert of.plain_16 == pytest.approx(weight / 2e6)
    logits = 64 * 16032 * 4 / 4e6
    assert of.filtered == pytest.approx(of.plain + 2 * logits)
    limbs = 4 * 16032 * 4096 * 16 / 200e6
    assert of.screened == pytest.approx(max(weight / 2 / 2e6, limbs) + 0.0189 * weight / 2e6)


def test_an_exception_wants_a_reason_and_a_reason_an_exception():
    many = faults_of(counts_of(8 * 20))
    assert not [fault for fault in many if "µs, L2" in fault or "no chip" in fault]
    cheap = faults_of(counts_of(8))
    assert {fault.split(":")[0] for fault in cheap if "no chip needs" in fault} == {*PASS_REASONS}
    assert any(fault.startswith("B200: filtered ÷ plain") for fault in cheap)


def test_a_pass_is_flagged_above_its_reason_without_one_or_if_it_spills(monkeypatch):
    most, why = PASS_REASONS["mass"]
    dear = counts_of(8 * 20)
    dear[90].passes["mass"] = counted(8 * (most + 1))
    assert any(
        f"mass has {most + 1:.1f} instructions per logit" in each for each in faults_of(dear)
    )
    dear[90].passes["mass"] = replace(counted(8 * most), spilled=8)
    assert any("mass spills 8 bytes" in each for each in faults_of(dear))
    monkeypatch.delitem(PASS_REASONS, "mass")
    assert any("H100: mass needs" in each and why not in each for each in faults_of(dear))


def test_the_page_says_what_is_predicted_and_gives_every_reason():
    page = "\n\n".join(sections(counts_of(8 * 20)))
    assert "**Every time here is predicted.**" in page
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert sum("redicted" in title for title in titles) == 3
    assert all(why in page for _, why in PASS_REASONS.values())
    assert all(chip.name in page and chip.sources in page for chip in CHIPS)


def test_some_step_launches_every_pass():
    found, heads, screen = launches(90)
    assert set(found) == {each.name for each in PASSES} == set(PASS_REASONS)
    assert set(heads) == {64, 16} and screen.kernel.endswith("screen_kernel")
    parts = {"residual": RESIDUAL_PARTS}
    for name, launch in found.items():
        assert launch.named["BLOCK"] * parts.get(name, 1) == BLOCK


def test_several_blocks_of_a_program_share_what_is_done_once():
    mass = replace(counted(800), each={**dict.fromkeys(LANES, 0.0), "issue": 60.0}, most_blocks=8)
    assert mass.per_block(1)["issue"] == 800 and mass.per_block(8)["issue"] == 480 + 320 / 8
    few, many = (least(CHIP, mass, 64, 2048 * n) for n in (1, 1000))
    assert few.busy == pytest.approx(least(CHIP, counted(800), 64, 2048).busy)
    assert many.busy == pytest.approx(1000 * 64 * 256 * 520 / 12.8e6)
