"""Compile a Triton kernel for a GPU that is not there, and read back what it needs.

Triton's wheel brings ptxas, cuobjdump and nvdisasm, so this runs on any machine; the process
must not have TRITON_INTERPRET set.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.runtime.cache import get_cache_manager

from benchmarks.lab.absent import AbsentGpu
from benchmarks.lab.launches import Launch
from benchmarks.static.sass import main_loop, opcodes

_TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


@dataclass(frozen=True)
class Gpu:
    """Limits of one SM (CUDA C++ Programming Guide, technical specifications)."""

    name: str
    matrix_instruction: str
    integer_instruction: str
    shared_bytes: int
    tensor_columns: int = 0
    registers: int = 65536
    warps: int = 64
    programs: int = 32
    reserved_shared_bytes: int = 1024
    """Per program, kept by the system."""

    @property
    def program_bytes(self) -> int:
        """The shared memory that one program may have."""
        return self.shared_bytes - self.reserved_shared_bytes


GPUS = {
    80: Gpu("A100", "HMMA", "IMMA", 164 * 1024),
    86: Gpu("A10", "HMMA", "IMMA", 100 * 1024, warps=48, programs=16),
    89: Gpu("L4/L40S", "HMMA", "IMMA", 100 * 1024, warps=48, programs=24),
    90: Gpu("H100/H200", "HGMMA", "IGMMA", 228 * 1024),
    100: Gpu("B200", "UTCHMMA", "IMMA", 228 * 1024, tensor_columns=512),
    103: Gpu("B300", "UTCHMMA", "IMMA", 228 * 1024, tensor_columns=512),
    120: Gpu("RTX of Blackwell", "HMMA", "IMMA", 100 * 1024, warps=48, programs=24),
}


@dataclass(frozen=True)
class Binary:
    """The result of compiling a launch."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_columns: int
    opcodes: tuple[str, ...]
    loop: tuple[str, ...] = ()
    """Those of the product's inner loop."""


def compile_build(launch: Launch, arch: int) -> Binary:
    """Compile and disassemble a launch for an architecture of `GPUS`."""
    AbsentGpu(arch).take()
    compiled = launch.compile()
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        # Beside Triton's own, because reading a kernel takes a third of a second.
        cache = get_cache_manager(sha256(cubin + triton.__version__.encode()).hexdigest())
        path = cache.get_file("sass") or cache.put(_tool("nvdisasm", "-c", file.name), "sass")
    sass = Path(path).read_text()
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Binary(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
        opcodes=tuple(opcodes(sass)),
        loop=tuple(main_loop(sass)),
    )


def compile_all(
    builds: Sequence[tuple[Launch, int]],
    processes: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Binary]:
    """`compile_build` of each, in order, on a few processes."""
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        futures = [pool.submit(compile_build, *build) for build in builds]
        for future in futures:
            future.add_done_callback(lambda _: on_done())
        return [future.result() for future in futures]


def programs_per_sm(binary: Binary, num_warps: int, gpu: Gpu) -> int:
    """Programs that fit on one SM at once.

    Registers are handed out in units of 256 per warp from the SM's four equal parts.
    """
    per_warp = -(-binary.registers * 32 // 256) * 256
    limits = [
        gpu.programs,
        gpu.warps // num_warps,
        gpu.registers // 4 // per_warp * 4 // num_warps,
        gpu.shared_bytes // (binary.shared_bytes + gpu.reserved_shared_bytes),
    ]
    if binary.tensor_columns:
        limits.append(gpu.tensor_columns // binary.tensor_columns)
    return min(limits)


def _tool(name: str, *arguments: str) -> str:
    command = [os.path.join(_TOOLS, name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
