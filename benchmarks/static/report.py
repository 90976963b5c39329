"""What do the kernels need? Registers, spills, matrix instruction, occupancy, cost of the epilogue.

    python -m benchmarks.static.report [--arch N …] [--tile V,B,D,WARPS,STAGES] [--few]

Compiles every kernel of the package with every entry of the tile table, ahead of time, without a
GPU; `--few` takes one tile per architecture and each other kernel once. `--json FILE` writes the
rows to a file. Exits with 1 if a requirement fails:

- no spills anywhere;
- a program's shared memory fits the architecture's limit;
- 16-bit weights use the architecture's own matrix instruction: HMMA up to sm_89, HGMMA (wgmma) on
  sm_90, UTCHMMA (tcgen05) on sm_100; the 8-bit product takes IGMMA on sm_90 and IMMA elsewhere;
- at batch tile 64 on sm_90 the epilogue costs at most 30 instructions per logit more than a plain
  greedy one (`benchmarks.lab.kernels`); the cost of each request control is printed beside it, and
  a control that is off cannot cost any: its arguments are None, and its use would not compile;
- kernels that write to peers keep the memory order of `sass.push_order_faults`;
- kernels that overlap, on sm_90 and up, wait and let go as in `sass.overlap_faults`;
- kernels that leave out rows that are done read nothing but a row's flag before they exit.

Instructions are counted in SASS, both sides of a branch: they compare kernels and predict no
microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

from benchmarks.lab import text
from benchmarks.lab.problem import DTYPES, tile_text
from benchmarks.static.aot import GPUS, Binary, compile_all, jitted, programs_per_sm
from benchmarks.static.builds import (
    GREEDY,
    LM_HEAD,
    ROW_NOISE,
    Subject,
    few,
    lm_head,
    subjects,
)
from benchmarks.static.sass import (
    PIPES,
    early_exit_faults,
    matrix_instruction,
    matrix_instructions,
    overlap_faults,
    pipe_counts,
    push_order_faults,
    spills,
)
from tpsample.local.tile_table import Tile, all_tiles

DTYPE_NAMES = {dtype: name for name, dtype in {**DTYPES, "i8": torch.int8}.items()}
MAX_EPILOGUE = 30.0
FLASHSAMPLING_EPILOGUE = 104.8
"""The epilogue of FlashSampling (arXiv 2603.15854: `tl.rand` and two software logarithms) copied
into a matmul of ours, batch tile 64, sm_90, counted the same way over the same greedy epilogue."""


@dataclass
class Row:
    """One line of the table.

    Attributes:
        weight_bytes_in_flight: per SM with the pipeline full: at the wait, when the stage that is
            multiplied next must have come, and behind it, when the next one has been asked for.
        instructions: of the whole kernel, each counted once.
        loop_per_product: of the inner loop, per matrix instruction in it.
        epilogue: instructions per logit over the greedy kernel, in all and by pipe.
        faults: requirements that fail.
    """

    kernel: str
    variant: str
    arch: int
    dtype: str
    tile: str
    registers: int
    stack_bytes: int
    spills: int
    matrix: str
    shared_bytes: int
    programs_per_sm: int
    instructions: int
    loop_per_product: float | None = None
    weight_bytes_in_flight: tuple[int, int] | None = None
    epilogue: float | None = None
    epilogue_by_pipe: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def report(
    chosen: list[Subject], processes: int = 2, on_done: Callable[[], None] = lambda: None
) -> list[Row]:
    """Compile the subjects, and the greedy kernels they are counted against, and judge them."""
    shapes = {(s.arch, s.dtype, s.tile): s for s in chosen if s.epilogue}
    builds = [s.build() for s in chosen] + [s.build(GREEDY) for s in shapes.values()]
    binaries = compile_all(builds, processes, on_done)
    greedy = dict(zip(shapes, binaries[len(chosen) :], strict=True))
    return [
        judge(subject, binary, greedy.get((subject.arch, subject.dtype, subject.tile)))
        for subject, binary in zip(chosen, binaries[: len(chosen)], strict=True)
    ]


def judge(subject: Subject, binary: Binary, greedy: Binary | None) -> Row:
    """The row of a compiled subject, with its faults."""
    gpu, tile = GPUS[subject.arch], subject.tile
    products = matrix_instructions(binary.loop)
    row = Row(
        kernel=subject.kernel.split(":")[1],
        variant=subject.variant,
        arch=subject.arch,
        dtype=DTYPE_NAMES[subject.dtype] if subject.dtype else "",
        tile=tile_text(tile) if tile else "",
        registers=binary.registers,
        stack_bytes=binary.stack_bytes,
        spills=spills(binary.opcodes),
        matrix=matrix_instruction(binary.opcodes),
        shared_bytes=binary.shared_bytes,
        programs_per_sm=programs_per_sm(binary, subject.num_warps, gpu),
        instructions=len(binary.opcodes),
        loop_per_product=len(binary.loop) / products if products else None,
    )
    if row.spills or row.stack_bytes:
        row.faults.append(f"spills: {row.spills} instructions, {row.stack_bytes} bytes of stack")
    if row.shared_bytes > gpu.program_bytes:
        row.faults.append(f"shared memory: {row.shared_bytes} of {gpu.program_bytes} bytes")
    if subject.overlap:
        row.faults += overlap_faults(binary.opcodes, first=tile is not None, ahead=subject.product)
    if "row_done_ptr" in jitted(subject.kernel).arg_names:
        row.faults += early_exit_faults(binary.opcodes)
    if tile is None or subject.dtype is None:
        return row

    stage_bytes = tile.block_v * tile.block_d * subject.dtype.itemsize
    if subject.product:
        per_stage = row.programs_per_sm * stage_bytes
        row.weight_bytes_in_flight = (
            per_stage * (tile.num_stages - 2),
            per_stage * (tile.num_stages - 1),
        )
    integers = subject.dtype == torch.int8
    expected = gpu.integer_instruction if integers else gpu.matrix_instruction
    if subject.dtype != torch.float32 and row.matrix != expected:
        row.faults.append(f"expected {expected} on {gpu.name}, got {row.matrix}")
    if "inboxes_ptr" in subject.uses:
        row.faults += push_order_faults(binary.opcodes)
    if subject.epilogue and greedy is not None:
        logits_per_thread = tile.block_v * tile.block_b / (32 * tile.num_warps)
        ours, base = pipe_counts(binary.opcodes), pipe_counts(greedy.opcodes)
        row.epilogue_by_pipe = {p: (ours[p] - base[p]) / logits_per_thread for p in PIPES}
        row.epilogue = sum(row.epilogue_by_pipe.values())
        promised = row.arch == 90 and tile.block_b == 64 and row.variant == "plain"
        if promised and row.epilogue > MAX_EPILOGUE:
            row.faults.append(
                f"epilogue: {row.epilogue:.1f} instructions per logit, at most {MAX_EPILOGUE:.0f}"
            )
    return row


HEADERS = [
    "kernel", "variant", "sm", "dtype", "V×B×D tile", "regs", "stack", "spills", "matrix", "shared",
    "/SM", "in flight", "loop", "+instr", *PIPES,
]  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row as text, one cell per header."""
    flight, epilogue = row.weight_bytes_in_flight, row.epilogue
    pipes = [f"{row.epilogue_by_pipe[p]:.1f}" if row.epilogue_by_pipe else "" for p in PIPES]
    return [
        row.kernel.removesuffix("_kernel"),
        row.variant,
        str(row.arch),
        row.dtype,
        row.tile,
        str(row.registers),
        str(row.stack_bytes),
        str(row.spills),
        row.matrix,
        f"{row.shared_bytes / 1024:.0f}K",
        str(row.programs_per_sm),
        "" if flight is None else f"{flight[0] / 1024:.0f}–{flight[1] / 1024:.0f}K",
        "" if row.loop_per_product is None else f"{row.loop_per_product:.0f}",
        "" if epilogue is None else f"{epilogue:.1f}",
        *pipes,
    ]


def print_table(rows: list[Row]) -> None:
    """Print one line per row, in columns."""
    print(
        "Compiled kernels; loop: SASS of the inner loop per matrix instruction; "
        "+instr: SASS per logit over a greedy epilogue, then by pipe\n"
    )
    print(text.table(HEADERS, map(cells, rows), right=5))


def print_verdict(rows: list[Row]) -> None:
    """The cost of the epilogue beside the published one and that of the rows, then every fault."""
    for row in rows:
        if row.arch == 90 and row.kernel == LM_HEAD.split(":")[1] and row.epilogue is not None:
            print(
                f"epilogue on sm_90, {row.dtype}, tile {row.tile}, {row.variant}: "
                f"{row.epilogue:.1f} instructions per logit over greedy"
            )
        if row.arch == 90 and row.kernel == ROW_NOISE.split(":")[1]:
            print(f"streams and scales of 64 rows: {row.instructions} instructions per program")
    print(
        f"published rival at batch tile 64: {FLASHSAMPLING_EPILOGUE} (arXiv 2603.15854, our count)"
    )
    for row in rows:
        for fault in row.faults:
            print(f"FAULT {row.kernel} {row.variant} sm_{row.arch} {row.dtype} {row.tile}: {fault}")
    print("all requirements hold" if not any(row.faults for row in rows) else "requirements fail")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="static_report", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(GPUS), default=sorted(GPUS))
    parser.add_argument(
        "--tile",
        action="append",
        metavar="V,B,D,WARPS,STAGES",
        help="only the plain LM head with bf16 weights and this tile; may be repeated",
    )
    parser.add_argument("--few", action="store_true", help="one tile, the other kernels on sm_90")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument("--processes", type=int, default=2, help="compilers at once (default 2)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if triton.knobs.runtime.interpret:
        print("static_report: unset TRITON_INTERPRET; an interpreting process cannot compile")
        return 2
    if options.tile:
        tiles = [Tile(*map(int, each.split(","))) for each in options.tile]
        chosen = [lm_head(arch, tile, torch.bfloat16) for arch in options.arch for tile in tiles]
    elif options.few:
        chosen = few(options.arch)
    else:
        chosen = subjects(options.arch, all_tiles())

    def tick() -> None:
        print(".", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        rows = report(chosen, options.processes, tick)
    print(file=sys.stderr)
    print_table(rows)
    print_verdict(rows)
    if options.json:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        record = {"versions": versions, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(row.faults for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
