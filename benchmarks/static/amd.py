"""Do the kernels compile for AMD's GPUs? Registers, spills, local memory, matrix instruction.

    python -m benchmarks.static.amd [--arch N …] [--few] [--json FILE] [--cache FOLDER]

Compiles the subjects of `benchmarks.static.report` for gfx942 and gfx950, ahead of time, without a
GPU. Exits with 1 if a requirement fails:

- no vector register is spilled, and there is no scratch memory. Scalar registers may go to lanes of
  vector registers (`sgpr_spills`);
- a program's local memory is at most 64 KB, which is what tiles are chosen for;
- weights of 16 and of 8 bits use a matrix instruction (MFMA);
- float64 instructions are those of a row's numbers, as on other GPUs.

That they run, and that their tokens are right, it cannot show.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.lab import text
from benchmarks.lab.absent import AMD_ARCHS, AbsentGpu
from benchmarks.lab.problem import tile_text
from benchmarks.static.builds import Subject, launches, lm_head, subjects
from benchmarks.static.report import DTYPE_NAMES, MAX_FLOAT64, MAX_FLOAT64_OF_ROWS, Row
from tpsample.backends.triton_.tile_table import AMD_SHARED_BYTES, Gpu, all_tiles, rule
from tpsample.core.weight_format import BF16

METADATA = {
    "vgprs": "vgpr_count",
    "agprs": "agpr_count",
    "sgprs": "sgpr_count",
    "vgpr_spills": "vgpr_spill_count",
    "sgpr_spills": "sgpr_spill_count",
    "scratch": "private_segment_fixed_size",
    "local": "group_segment_fixed_size",
}
"""Columns of the table, by their names in a kernel's metadata."""


def few(archs: Sequence[int]) -> list[Subject]:
    """Return a plain LM head per architecture, and for the first a step with peers."""
    gpu = Gpu(arch=94, shared_bytes=AMD_SHARED_BYTES, amd=True)
    tile = rule(64, 2**20, BF16, gpu)
    steps = (Subject("push", archs[0], each) for each in launches(archs[0], "plain", world_size=8))
    return [*(lm_head(arch, tile, BF16) for arch in archs), *steps]


def compile_subject(subject: Subject) -> tuple[str, int]:
    """Return the assembly of a subject, and the local memory that its launch asks for."""
    AbsentGpu(subject.arch).take()
    compiled = subject.launch.compile()
    return compiled.asm["amdgcn"], compiled.metadata.shared


def judge(subject: Subject, assembly: str, local: int) -> Row:
    """Return the row of a compiled subject, with its faults."""
    launch, tile, faults = subject.launch, subject.tile, list[str]()
    weight: Any = launch.named.get("weight_ptr") or launch.named.get("copy_ptr")
    numbers = {
        column: max(map(int, re.findall(rf"\.{name}:\s+(\d+)", assembly)))
        for column, name in METADATA.items()
    }
    numbers["local"] = max(numbers["local"], local)
    products = set(re.findall(r"^\s+v_(mfma_\w+)", assembly, re.M))
    wide = len(re.findall(r"^\s+v_\w+_f64\b", assembly, re.M))
    row: Row = {
        "kernel": launch.kernel.split(":")[1],
        "variant": subject.variant,
        "arch": f"gfx{subject.arch}",
        "dtype": DTYPE_NAMES[weight.dtype] if weight else "",
        "tile": tile_text(tile) if tile else "",
        **numbers,
        "float64": wide,
        "matrix": "+".join(sorted(products)) or "-",
        "faults": faults,
    }
    spilled = [name for name in ("vgpr_spills", "scratch") if row[name]]
    faults += [f"spills: {row[name]} {name}" for name in spilled]
    if row["local"] > AMD_SHARED_BYTES:
        faults.append(f"local memory: {row['local']} of {AMD_SHARED_BYTES} bytes")
    if wide > MAX_FLOAT64_OF_ROWS.get(row["kernel"], MAX_FLOAT64):
        faults.append(f"float64: {wide} instructions, more than those of a row")
    if weight and tile and weight.dtype != torch.float32 and not products:
        faults.append("no matrix instruction: expected v_mfma")
    return row


def main(arguments: list[str] | None = None) -> int:
    """Compile, print and judge; 1 if a requirement fails, 2 in an interpreting process."""
    parser = argparse.ArgumentParser(prog="static_amd", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=AMD_ARCHS, default=AMD_ARCHS)
    parser.add_argument("--few", action="store_true", help="a plain LM head, and a step with peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument("--cache", metavar="FOLDER", help="keep there what was compiled")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        print("static_amd: unset TRITON_INTERPRET; an interpreting process cannot compile")
        return 2
    torch.set_num_threads(1)
    chosen = few(options.arch) if options.few else subjects(options.arch, all_tiles())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = options.cache or folder
        with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
            found = list(pool.map(compile_subject, chosen))
    rows = [judge(each, *of) for each, of in zip(chosen, found, strict=True)]
    names = [name for name in rows[0] if name != "faults"]
    print(text.table(names, ([text.cell(row[name]) for name in names] for row in rows), right=5))
    for row in rows:
        for fault in row["faults"]:
            print("FAULT {kernel} {variant} {arch} {dtype} {tile}".format(**row) + f": {fault}")
    failed = any(row["faults"] for row in rows)
    print("requirements fail" if failed else "all requirements hold")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
