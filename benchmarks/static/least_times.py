"""How long does a step take at least, on GPUs that are absent? Predicted by counts and data sheets.

    python -m benchmarks.static.least_times [--page FOLDER] [--cache FOLDER]

Compiles the passes over stored logits, the LM head and the screen for each architecture of
`benchmarks.static.chips`. Counts their instructions by the unit that executes them. A pass takes at
least as long as its busiest unit, and as its logits take from L2. Both sides of a branch count, so
that a pass which leaves most blocks early takes less, and a loop counts once. Launches, latencies,
waits of atomics and kernels with one program per row are left out. Every time is predicted, and
none is measured.

Exits with 1 if a requirement fails:

- a pass needs no more time for its instructions than to read its logits from L2, on any chip;
- a step with top_p takes at most 1.10 times a plain one, 64 rows on an eighth of the head;
- a screened step of 16 rows takes at most 0.75 times a plain one.

Each has its list of reasons, which the page prints. An exception without a reason is a fault. So is
a reason that nothing needs, or a pass above the instructions that its reason allows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks.lab.launches import Launch
from benchmarks.lab.machine import RESULTS
from benchmarks.lab.text import cell, table
from benchmarks.static import builds
from benchmarks.static.aot import GPUS, Binary, compile_all
from benchmarks.static.chips import (
    ARCHS,
    CHIPS,
    LANE_SOURCES,
    LANES,
    Chip,
    results,
)
from benchmarks.static.counts_page import write_page
from tpsample.backends.triton_.passes import MOST_BLOCKS, PROGRAMS_PER_SM
from tpsample.backends.triton_.tile_table import Gpu, Tile, rule
from tpsample.core.weight_format import BF16
from tpsample.request.kinds import KINDS

V, D, W, ROWS, SCREENED_ROWS = 128256, 4096, 8, 64, 16
WIDTHS = {"an eighth": V // W, "whole": V}
MAX_FILTERED, MAX_SCREENED = 1.10, 0.75
TOP_P = ("before",)
"""The passes of a step with top_p that its best scores decide."""
CANDIDATES = 0.0189
"""The share of the head that 16 rows read behind a screen at T = 1, as the page screen_candidates
counted it on a model."""
MEASURED = "h100-2026-11-27-last"
MEASURED_SHAPE, MEASURED_WIDTH = "151936x4096 B64", 151936


class Pass(NamedTuple):
    """One pass over stored logits: a kernel, and whether it weighs masses, or sums their moments,
    if that is its choice."""

    name: str
    kernel: str
    choice: bool | None = None

    def is_of(self, launch: Launch) -> bool:
        name, named = launch.kernel.split(":")[1].removesuffix("_kernel"), launch.named
        choice = named.get("MASS", named.get("MOMENTS"))
        if name == "bin":  # it weighs what a cut leaves, too
            choice = named["cut_ptr"] is not None
        return name == self.kernel and choice == self.choice


PASSES = (
    *(Pass(name, name) for name in ("group_first", "before")),
    Pass("mass", "mass", False),
    Pass("mass and moment", "mass", True),
    Pass("digit of masses", "digit", True),
    Pass("digit of numbers", "digit", False),
    Pass("bin of masses", "bin", True),
    Pass("bin of numbers", "bin", False),
    *(Pass(name, name) for name in ("words", "best_kept", "least_of_mass", "spread")),
    *(Pass(name, name) for name in ("law_tops", "law_sums", "residual")),
)

_MASS = "a mass takes 31 instructions by its definition (tpsample/MASSES.md)"
_NOISE = "noise takes 28 instructions by its definition (tpsample/NOISE.md)"
_WORD = "a word of 64 bits takes 25 instructions, and few rows come here"
_FEW = "few rows come here, and the numbers of a row are most of it"
PASS_REASONS: dict[str, tuple[int, str]] = {
    "group_first": (30, "a maximum that minds NaN, then the lowest id that has it"),
    "before": (70, "an exponential in fp32, and for each mark 7; a program begins with 340"),
    "mass": (100, _MASS),
    "mass and moment": (115, f"{_MASS}, and a moment 13"),
    "digit of masses": (178, f"{_MASS}; each program finds the digit before, too"),
    "digit of numbers": (115, "each program finds the digit before, too"),
    "bin of masses": (115, f"{_MASS}; a sum in memory takes longer than both"),
    "bin of numbers": (50, "a sum in memory takes longer than the instructions"),
    "words": (138, _WORD),
    "best_kept": (
        220,
        f"{_NOISE}; blocks without a kept token stop before, and each program finds where a search "
        "ends, even among equal logits",
    ),
    "least_of_mass": (110, f"{_MASS}; {_FEW}"),
    "spread": (80, _FEW),
    "law_tops": (64, "a maximum that minds NaN and its lowest id, a loop for each of two laws"),
    "law_sums": (240, f"{_MASS}, and there are two laws"),
    "residual": (450, f"{_MASS}, of two laws, and {_NOISE}"),
}
"""Why a pass needs more time for instructions than L2. The number is the instructions per logit
that it may have on any architecture, in a program of one block. Where there are many blocks, a
program takes several, and they share half of these instructions."""
_STEP = "before takes the difference, by what each program does once, beside memory that is fast"
FILTERED_REASONS = dict.fromkeys(("B200", "B300"), _STEP)
SCREENED_REASONS = {
    "B300": "0.15 POP/s of int8 products, a thirtieth of B200's: two of them take longer than it "
    "takes to read the weight"
}


@dataclass(frozen=True)
class Counted:
    """The results that a thread of a kernel needs.

    Attributes:
        logits: that one thread covers.
        all: results of each kind of unit, of the whole program.
        each: those of one logit more, from a program that covers twice as many.
        threads: of a program.
        spilled: bytes of stack.
        most_blocks: that one program takes, where there are many.
    """

    logits: float
    all: Counter[str]
    each: dict[str, float]
    threads: int
    spilled: int = 0
    most_blocks: int = 1

    def per_block(self, blocks: int) -> dict[str, float]:
        """Results of a block, in a program of so many."""
        added = {kind: n * self.logits for kind, n in self.each.items()}
        return {kind: n + (self.all[kind] - n) / blocks for kind, n in added.items()}

    def per_logit(self, kind: str = "issue") -> float:
        """Results per logit, with the part of the program that is done once."""
        return self.all[kind] / self.logits

    @property
    def block(self) -> float:
        """Logits of a program."""
        return self.logits * self.threads


@dataclass(frozen=True)
class Product:
    """The instructions of a kernel that multiplies, and those of one iteration over D."""

    tile: Tile
    all: Counter[str]
    loop: Counter[str]

    def busy_us(self, chip: Chip, vocab_rows: int) -> float:
        """Return the time of its busiest unit beside the matrix units, µs."""
        programs = -(-vocab_rows // self.tile.block_v)
        more = max(0, -(-D // self.tile.block_d) - 1)
        needed = Counter({kind: n + more * self.loop[kind] for kind, n in self.all.items()})
        return max(chip.issue_us(programs * 32 * self.tile.num_warps, needed).values())


@dataclass(frozen=True)
class Counts:
    """All that was counted for one architecture."""

    passes: dict[str, Counted]
    heads: dict[int, Product]  # by rows
    screen: Product


def counted(arch: int, processes: int = 1) -> Counts:
    """Compile the passes and the products for an architecture, and count."""
    found, heads, screen = launches(arch)
    double = [widened(launch) for launch in found.values()]
    chosen = (*found.values(), *double, *heads.values(), screen)
    every = compile_all([(launch, arch) for launch in chosen], processes)
    passes = {}
    for i, (name, launch) in enumerate(found.items()):
        passes[name] = compared(launch, every[i], every[len(found) + i])
    rest = iter(every[2 * len(found) :])
    of_heads = {rows: product(head, next(rest)) for rows, head in heads.items()}
    return Counts(passes, of_heads, product(screen, next(rest)))


def launches(arch: int) -> tuple[dict[str, Launch], dict[int, Launch], Launch]:
    """Return the launches of the passes by name, of the LM head by rows, and of the screen."""
    shape = (V // W, 64)
    steps = builds.launches(arch, *KINDS, each=True, shape=shape)
    for method in ("rejection", "block"):
        options: dict[str, Any] = {"drafts": True, "method": method}
        steps += builds.launches(arch, "plain", each=True, shape=shape, **options)
    found = {}
    for each in PASSES:
        own_launches = [launch for launch in steps if each.is_of(launch)]
        if not own_launches:
            raise LookupError(f"least_times: no step launches {each.name}")
        found[each.name] = aligned(own_launches[0])
    gpu = Gpu(arch=arch, num_sms=132, shared_bytes=GPUS[arch].program_bytes)
    heads = {}
    for rows in (ROWS, SCREENED_ROWS):
        tile = rule(rows, V // W, BF16, gpu)
        heads[rows] = builds.lm_head(arch, tile, BF16).launch
    screened = builds.launches(arch, "plain", rows=SCREENED_ROWS, screening="int8")
    return found, heads, next(each for each in screened if each.kernel == builds.SCREEN)


def aligned(launch: Launch) -> Launch:
    """Return the launch for a shard that begins and ends at a multiple of 16, as most do."""
    names = ("vocab_start", "lead", "width")
    return Launch(launch.kernel, tuple((n, 16 if n in names else v) for n, v in launch.arguments))


def widened(launch: Launch) -> Launch:
    """Return the launch of a program that covers twice as many logits."""
    return Launch(
        launch.kernel, tuple((n, 2 * v if n == "BLOCK" else v) for n, v in launch.arguments)
    )


def compared(launch: Launch, once: Binary, twice: Binary) -> Counted:
    """Count a kernel, and by a second one that covers twice as many logits, what each adds."""
    threads = 32 * launch.named.get("num_warps", 4)
    logits = launch.named["BLOCK"] / threads
    all_, more = results(once.opcodes), results(twice.opcodes)
    each = {kind: (more[kind] - all_[kind]) / logits for kind in LANES}
    most = MOST_BLOCKS if "blocks_each" in launch.named else 1
    return Counted(logits, all_, each, threads, once.stack_bytes, most)


def product(launch: Launch, binary: Binary) -> Product:
    names = ("BLOCK_V", "BLOCK_B", "BLOCK_D", "num_warps", "num_stages")
    tile = Tile(*(launch.named[name] for name in names))
    return Product(tile, results(binary.opcodes), results(binary.loop))


class Least(NamedTuple):
    """The least times of one pass, µs."""

    busy: float
    unit: str
    l2: float
    memory: float

    @property
    def us(self) -> float:
        return max(self.busy, self.l2)


def least(chip: Chip, counts: Counted, rows: int, width: int) -> Least:
    """Return the least times of a pass over the logits of some rows."""
    blocks = rows * -(-width // int(counts.block))
    each = max(1, min(counts.most_blocks, blocks // (PROGRAMS_PER_SM * chip.sms)))
    busy = chip.issue_us(blocks * counts.threads, counts.per_block(each))
    unit = max(busy, key=lambda kind: busy[kind])
    num_bytes = 4 * rows * width
    return Least(busy[unit], unit, chip.read_l2_us(num_bytes), chip.read_us(num_bytes))


class Steps(NamedTuple):
    """The least times of whole steps, µs."""

    plain: float
    filtered: float
    plain_16: float
    screened: float


def steps(chip: Chip, counts: Counts) -> Steps:
    """Return the least times of a plain and a top_p step of 64 rows on an eighth of the head.
    Return those of a plain and a screened step of 16 rows, too.

    A filtered step stores its logits, which then lie in L2.
    """
    width = V // W

    def plain(rows: int) -> float:
        flops = 2 * width * D * rows
        busy = counts.heads[rows].busy_us(chip, width)
        return max(chip.read_us(2 * width * D), flops / chip.bf16 / 1e6, busy)

    passes = sum(least(chip, counts.passes[name], ROWS, width).us for name in TOP_P)
    stored = chip.read_l2_us(4 * ROWS * width)
    limbs = 2 * 2 * width * D * SCREENED_ROWS
    screen = max(
        chip.read_us(width * D),
        limbs / chip.int8 / 1e6,
        counts.screen.busy_us(chip, width),
    )
    listed = chip.read_us(CANDIDATES * 2 * width * D)
    return Steps(plain(ROWS), plain(ROWS) + stored + passes, plain(SCREENED_ROWS), screen + listed)


def faults_of(counts: dict[int, Counts]) -> list[str]:
    """Return what fails: exceptions without a reason, and reasons without an exception."""
    found, needed = list[str](), set[str]()
    for chip in CHIPS:
        for name, each in counts[chip.arch].passes.items():
            times = least(chip, each, ROWS, V // W)
            if each.spilled:
                found.append(f"{chip.name}: {name} spills {each.spilled} bytes")
            if times.busy <= times.l2:
                continue
            needed.add(name)
            if name not in PASS_REASONS:
                found.append(f"{chip.name}: {name} needs {times.busy:.2f} µs, L2 {times.l2:.2f}")
            elif each.per_logit() > PASS_REASONS[name][0]:
                found.append(
                    f"{chip.name}: {name} has {each.per_logit():.1f} instructions per logit, "
                    f"at most {PASS_REASONS[name][0]}"
                )
        of = steps(chip, counts[chip.arch])
        for ratio, most, reasons, what in (
            (of.filtered / of.plain, MAX_FILTERED, FILTERED_REASONS, "filtered"),
            (of.screened / of.plain_16, MAX_SCREENED, SCREENED_REASONS, "screened"),
        ):
            if (ratio > most) != (chip.name in reasons):
                found.append(
                    f"{chip.name}: {what} ÷ plain {ratio:.2f}, at most {most}, or a reason"
                )
    return found + [f"{name}: a reason that no chip needs" for name in {*PASS_REASONS} - needed]


def measured(kernel: str) -> float | None:
    """Return the time of one launch of a kernel on the H100 of the notes, µs; None without one."""
    record = json.loads((RESULTS / MEASURED / "result.json").read_text())
    if kernel in (last := record["passes_us"]["after"][MEASURED_SHAPE]):
        return float(last[kernel])
    for call, kernels in record["kernels_us"].items():
        if call.startswith(MEASURED_SHAPE):
            times, us = kernels.get(f"{kernel}_kernel", (0, 0.0))
            if times:
                return float(us / times)
    return None


def sections(counts: dict[int, Counts]) -> list[str]:
    """Return the tables of the page."""
    return [
        f"# Least times\n\n{_intro()}",
        f"## Predicted instructions per logit\n\n{_INSTRUCTIONS}",
        _instructions(counts),
        f"## Predicted least times of a pass\n\n{_TIMES}",
        *(
            f"{ROWS} rows, {place} of {V:,} ids, µs predicted:\n\n{_times(counts, width)}"
            for place, width in WIDTHS.items()
        ),
        f"## Predicted steps on an eighth\n\n{_STEPS}",
        _ratios(counts),
        "## Reasons\n\n" + _reasons(),
        f"## Beside one H100\n\n{_BESIDE}",
        _beside(counts),
        "## Rates\n\nResults per cycle and SM, then the chips; each figure with its source.",
        _lanes(),
        _chips(),
    ]


_INSTRUCTIONS = (
    "SASS of a shard that begins and ends at a multiple of 16 ids. First those that one logit more "
    "adds to a program, then all of a program of one block by its logits. Where there are many "
    "blocks, a program of most passes takes up to eight. On sm_90 the first are shown by unit."
)
_TIMES = (
    "The longer of the busiest unit and L2, with the unit in brackets where it is the longer. The "
    "last rows are the times to read the logits."
)
_STEPS = (
    f"D = {D}, bf16. Plain: the weight from memory, the product, or the instructions, the longest. "
    "With top_p: the logits are stored, then before. Screened: 8-bit weights from "
    f"memory, two products, or the instructions; then the weights of {CANDIDATES:.2%} of the ids, "
    "the candidates, [counted](../screen_candidates-2026-11-22/README.md) on a model."
)
_BESIDE = (
    f"{ROWS} rows of {MEASURED_WIDTH:,} ids. The measured times are those of the "
    f"[notes of an H100](../{MEASURED}/README.md), of random rows, some of whose blocks "
    "end early."
)


def _intro() -> str:
    parts = str(__doc__).split("\n\n")
    return "**Every time here is predicted.** " + " ".join(parts[2].split())


def _instructions(counts: dict[int, Counts]) -> str:
    archs = [arch for arch in ARCHS if arch in counts]
    kinds = [kind for kind in LANES if kind != "issue"]
    header = ["pass", *(f"sm_{arch}" for arch in archs), *kinds]
    lines = []
    for name in counts[archs[0]].passes:
        of = [counts[arch].passes[name] for arch in archs]
        numbers = [f"{each.each['issue']:.1f} / {each.per_logit():.1f}" for each in of]
        own = counts[90].passes[name].each
        lines.append([name, *numbers, *(f"{own[kind]:.1f}" for kind in kinds)])
    return table(header, lines, right=1)


def _times(counts: dict[int, Counts], width: int) -> str:
    def shown(of: Least) -> str:
        return cell(of.us) + (f" ({of.unit})" if of.busy > of.l2 else "")

    lines = [
        [
            name,
            *(shown(least(chip, counts[chip.arch].passes[name], ROWS, width)) for chip in CHIPS),
        ]
        for name in counts[90].passes
    ]
    num_bytes = 4 * ROWS * width
    lines.append(["reading from L2", *(cell(chip.read_l2_us(num_bytes)) for chip in CHIPS)])
    lines.append(["reading from memory", *(cell(chip.read_us(num_bytes)) for chip in CHIPS)])
    return table(["pass", *(chip.name for chip in CHIPS)], lines, right=1)


def _ratios(counts: dict[int, Counts]) -> str:
    lines = []
    for chip in CHIPS:
        of = steps(chip, counts[chip.arch])
        ratios = (of.filtered / of.plain, of.screened / of.plain_16)
        lines.append([chip.name, *map(cell, (of.plain, of.filtered, ratios[0]))])
        lines[-1] += map(cell, (of.plain_16, of.screened, ratios[1]))
    header = ["chip", "plain, 64 rows, µs", "top_p, µs", "÷ plain"]
    return table([*header, "plain, 16 rows, µs", "screened, µs", "÷ plain"], lines, right=1)


def _reasons() -> str:
    lines = [
        [f"{name} needs more than L2", most, why] for name, (most, why) in PASS_REASONS.items()
    ]
    lines += [[f"{name}: filtered ÷ plain", "", why] for name, why in FILTERED_REASONS.items()]
    lines += [[f"{name}: screened ÷ plain", "", why] for name, why in SCREENED_REASONS.items()]
    return table(["exception", "instructions per logit, at most", "reason"], lines, right=3)


def _beside(counts: dict[int, Counts]) -> str:
    chip = next(chip for chip in CHIPS if chip.name == "H100")
    lines = []
    for each in PASSES:
        us = None if each.choice is False else measured(each.kernel)
        # Verifications have four positions a row there.
        if us is None or each.kernel in ("law_tops", "law_sums", "residual", "digit"):
            continue
        of = least(chip, counts[90].passes[each.name], ROWS, MEASURED_WIDTH)
        lines.append([each.name, *map(cell, (of.us, us))])
    return table(["pass", "µs, predicted", "µs, measured"], lines, right=1)


def _lanes() -> str:
    lines = [[kind, *LANES[kind], LANE_SOURCES[kind]] for kind in LANES]
    return table(["kind", *(f"sm_{arch}" for arch in ARCHS), "source"], lines, right=8)


def _chips() -> str:
    header = ["chip", "arch", "SMs", "GHz", "memory, TB/s", "L2, TB/s", "bf16, TFLOP/s"]
    lines = [
        [
            c.name,
            f"sm_{c.arch}",
            c.sms,
            c.clock,
            c.memory,
            cell(c.l2_rate),
            c.bf16,
            c.int8,
            c.sources,
        ]
        for c in CHIPS
    ]
    return table([*header, "int8, TOP/s", "sources"], lines, right=9)


def main(arguments: Iterable[str] | None = None) -> int:
    """Compile, print and judge; 1 if a requirement fails, 2 in an interpreting process."""
    parser = argparse.ArgumentParser(prog="least_times", description=__doc__.split("\n")[0])
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write a page there")
    parser.add_argument("--processes", type=int, default=2, help="compilers at once (default 2)")
    parser.add_argument("--cache", metavar="FOLDER", help="keep there what was compiled")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if triton.knobs.runtime.interpret:
        print("least_times: unset TRITON_INTERPRET; an interpreting process cannot compile")
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = options.cache or folder
        counts = {arch: counted(arch, options.processes) for arch in ARCHS}
    lines = sections(counts)
    print("\n\n".join(lines))
    faults = faults_of(counts)
    for fault in faults:
        print(f"FAULT {fault}")
    print("requirements fail" if faults else "all requirements hold")
    if options.page:
        of_chips = {c.name: steps(c, counts[c.arch])._asdict() for c in CHIPS}
        machine = "## Machine\n\nIt compiled and counted."
        write_page(options.page, [*lines, machine], steps_us=of_chips)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
