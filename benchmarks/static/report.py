"""What do the kernels need? Registers, spills, matrix instruction, occupancy, cost of the epilogue.

    python -m benchmarks.static.report [--arch N …] [--tile V,B,D,WARPS,STAGES] [--few]

Compiles every kernel of the package with every entry of the tile table, ahead of time, without a
GPU; `--few` takes one tile per architecture and each other kernel once. `--json FILE` writes the
rows to a file. `--cache FOLDER` keeps what was compiled, and the next run compiles what has changed
since. Exits with 1 if a requirement fails:

- no spills, but for few registers where a GPU has shown the tile to be faster; before sm_90 also
  where a head has every feature at once (`MAX_STACK`, `MAX_STACK_BEFORE_90`);
- a program's shared memory fits the architecture's limit;
- 16-bit weights use the architecture's own matrix instruction: HMMA up to sm_89 and on sm_120,
  HGMMA (wgmma) on sm_90, UTCHMMA (tcgen05) on sm_100 and sm_103; the 8-bit product takes IGMMA on
  sm_90 and IMMA elsewhere;
- at batch tile 64 on sm_90 the epilogue costs at most 31 instructions per logit more than a plain
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
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.lab import text
from benchmarks.lab.problem import DTYPES, tile_text
from benchmarks.static.aot import GPUS, Binary, compile_all, programs_per_sm
from benchmarks.static.builds import (
    ROW_NOISE,
    STORED_ROWS,
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
from tpsample.backends.triton_.tile_table import Tile, all_tiles
from tpsample.core.weight_format import BF16

DTYPE_NAMES = {dtype: name for name, dtype in {**DTYPES, "i8": torch.int8}.items()}
MAX_EPILOGUE = 31.0
MAX_STACK = {STORED_ROWS: 240}
"""Bytes of 256 rows with 16 warps: without them 1118 µs, with 152 of them 826 (`tile_table`). Words
of tiles made 232 of these, which no GPU has timed."""
MAX_STACK_BEFORE_90 = {"everything": 48, "drafts, everything": 16}
"""Bytes of 64 rows: few steps have filters, masks, biases, samples and peers at once."""
MAX_FLOAT64 = 16
"""The numbers of a row take some, once per program: on many GPUs float64 is 64 times as slow."""
MAX_FLOAT64_OF_ROWS = {
    "accept_kernel": 80,
    "told_logprobs_kernel": 176,
    "listed_sets_kernel": 40,
    "pair_products_kernel": 64,
    "weighted_rows_kernel": 64,
}
"""Of kernels that have one program of one warp per row, or that look at listed tokens alone, as a
trainer's do. A thread of the second one has eight of 256 tokens."""
FLOAT64 = ("DFMA", "DMUL", "DADD", "DSETP")
FLASHSAMPLING_EPILOGUE = 104.8
"""The epilogue of FlashSampling (arXiv 2603.15854: `tl.rand` and two software logarithms) copied
into a matmul of ours, batch tile 64, sm_90, counted the same way over the same greedy epilogue."""


Row = dict[str, Any]
"""One line of the table by column, with `faults`: requirements that fail."""


def report(
    chosen: list[Subject], processes: int = 2, on_done: Callable[[], None] = lambda: None
) -> list[Row]:
    """Compile the subjects, and the greedy kernels they are counted against, and judge them."""
    greedy = {(s.arch, s.greedy): s for s in chosen if s.epilogue}
    builds = [(s.launch, s.arch) for s in chosen] + [(launch, arch) for arch, launch in greedy]
    binaries = dict(zip([*chosen, *greedy], compile_all(builds, processes, on_done), strict=True))
    return [
        judge(each, binaries[each], binaries[each.arch, each.greedy] if each.epilogue else None)
        for each in chosen
    ]


def judge(subject: Subject, binary: Binary, greedy: Binary | None) -> Row:
    """Return the row of a compiled subject, with its faults.

    `loop` is of the inner loop, per matrix instruction in it. `epilogue` is instructions per logit
    over the greedy kernel, in all and then by pipe.
    """
    gpu, tile, launch = GPUS[subject.arch], subject.tile, subject.launch
    given, faults, products = launch.named, list[str](), matrix_instructions(binary.loop)
    weight: Any = given.get("weight_ptr") or given.get("copy_ptr")  # or there is no product
    row: Row = {
        "kernel": launch.kernel.split(":")[1],
        "variant": subject.variant,
        "arch": subject.arch,
        "dtype": DTYPE_NAMES[weight.dtype] if weight else "",
        "tile": tile_text(tile) if tile else "",
        "registers": binary.registers,
        "stack": binary.stack_bytes,
        "spills": spills(binary.opcodes),
        "matrix": matrix_instruction(binary.opcodes),
        "shared": binary.shared_bytes,
        "programs_per_sm": programs_per_sm(binary, given.get("num_warps", 4), gpu),
        "instructions": len(binary.opcodes),
        "loop": len(binary.loop) / products if products else "",
        "epilogue": "",
        **dict.fromkeys(PIPES, ""),
        "faults": faults,
    }
    limits = MAX_STACK | (MAX_STACK_BEFORE_90 if subject.arch < 90 else {})
    if row["stack"] > limits.get(subject.variant, 0) or (row["spills"] and not row["stack"]):
        faults.append(f"spills: {row['spills']} instructions, {row['stack']} bytes of stack")
    if row["shared"] > gpu.program_bytes:
        faults.append(f"shared memory: {row['shared']} of {gpu.program_bytes} bytes")
    wide = sum(op.startswith(FLOAT64) for op in binary.opcodes)
    if wide > MAX_FLOAT64_OF_ROWS.get(row["kernel"], MAX_FLOAT64):
        faults.append(f"float64: {wide} instructions, more than those of a row")
    if given.get("OVERLAP"):
        faults += overlap_faults(binary.opcodes, first=tile is not None, ahead=bool(weight))
    if "row_done_ptr" in given:
        faults += early_exit_faults(binary.opcodes)
    if given.get("inboxes_ptr") and tile:
        faults += push_order_faults(binary.opcodes)
    if tile and weight:
        integers = weight.dtype == torch.int8
        expected = gpu.integer_instruction if integers else gpu.matrix_instruction
        if weight.dtype != torch.float32 and row["matrix"] != expected:
            faults.append(f"expected {expected} on {gpu.name}, got {row['matrix']}")
    if tile and greedy is not None:
        logits_per_thread = tile.block_v * tile.block_b / (32 * tile.num_warps)
        ours, base = pipe_counts(binary.opcodes), pipe_counts(greedy.opcodes)
        row |= {pipe: (ours[pipe] - base[pipe]) / logits_per_thread for pipe in PIPES}
        row["epilogue"] = sum(row[pipe] for pipe in PIPES)
        promised = row["arch"] == 90 and tile.block_b == 64 and row["variant"] == "plain"
        if promised and row["epilogue"] > MAX_EPILOGUE:
            faults.append(
                f"epilogue: {row['epilogue']:.1f} instructions per logit, "
                f"at most {MAX_EPILOGUE:.0f}"
            )
    return row


def print_table(rows: list[Row]) -> None:
    """Print one line per row, in columns."""
    print(
        "Compiled kernels; loop: SASS of the inner loop per matrix instruction; epilogue: SASS per "
        "logit over a greedy one, then by pipe\n"
    )
    names = [name for name in rows[0] if name not in ("instructions", "faults")]
    lines = ([text.cell(row[name]) for name in names] for row in rows)
    print(text.table(names, lines, right=5))


def print_verdict(rows: list[Row]) -> None:
    """The cost of the epilogue beside the published one and that of the rows, then every fault."""
    for row in rows:
        if row["arch"] == 90 and row["epilogue"] != "":
            print(
                f"epilogue on sm_90, {row['dtype']}, tile {row['tile']}, {row['variant']}: "
                f"{row['epilogue']:.1f} instructions per logit over greedy"
            )
        if row["arch"] == 90 and row["kernel"] == ROW_NOISE.split(":")[1]:
            print(f"streams and scales of 64 rows: {row['instructions']} instructions per program")
    print(
        f"published rival at batch tile 64: {FLASHSAMPLING_EPILOGUE} (arXiv 2603.15854, our count)"
    )
    for row in rows:
        where = "{kernel} {variant} sm_{arch} {dtype} {tile}".format(**row)
        for fault in row["faults"]:
            print(f"FAULT {where}: {fault}")
    failed = any(row["faults"] for row in rows)
    print("requirements fail" if failed else "all requirements hold")


def main(arguments: list[str] | None = None) -> int:
    """Compile, print and judge; 1 if a requirement fails, 2 in an interpreting process."""
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
    parser.add_argument("--cache", metavar="FOLDER", help="keep there what was compiled")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        print("static_report: unset TRITON_INTERPRET; an interpreting process cannot compile")
        return 2
    torch.set_num_threads(1)  # which suits small tensors; compilers have the cores
    if options.tile:
        tiles = [Tile(*map(int, each.split(","))) for each in options.tile]
        chosen = [lm_head(arch, tile, BF16) for arch in options.arch for tile in tiles]
    elif options.few:
        chosen = few(options.arch)
    else:
        chosen = subjects(options.arch, all_tiles())

    def tick() -> None:
        print(".", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = options.cache or folder
        rows = report(chosen, options.processes, tick)
    print(file=sys.stderr)
    print_table(rows)
    print_verdict(rows)
    if options.json:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        record = {"versions": versions, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(row["faults"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
