"""In place of Triton's CUDA driver: kernels are compiled for a GPU and executed on the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.static.aot import GPUS
from tests.compiled.emulator.global_memory import GlobalMemory
from tests.compiled.emulator.machine import Machine
from tests.compiled.emulator.ptx import parse
from tests.compiled.emulator.report import Options, Report
from tests.compiled.emulator.store_buffers import StoreBuffers
from tests.compiled.emulator.threads import Launch
from tests.compiled.emulator.translation import Translation
from tpsample.agreement import construction
from tpsample.backends.triton_ import tile_table
from tpsample.core.machine import OVERLAP_ARCH

_AT_ONCE = 16384
"""Threads that run together, if no number of programs is given."""


def _packed(kind: str, value: Any) -> bytes:
    """Return an argument of a launch as a GPU has it."""
    bits = max(8, int(kind.lstrip("iufp")))
    if kind[0] == "f":
        return np.array(value, f"f{bits // 8}").tobytes()
    return (int(value) & ((1 << bits) - 1)).to_bytes(bits // 8, "little")


class EmulatedGpu:
    """A driver of Triton for which a launch is an emulation.

    Attributes:
        options: how the next launches are executed.
        report: what launches did.
        translations: of PTX texts, by their digests.
        edit, change: planted defects: another text of a kernel, another value of an argument by its
            name.
    """

    def __init__(self, arch: int) -> None:
        self.arch, self.options, self.report = arch, Options(), Report()
        self.edit: Callable[[str], str] = lambda text: text
        self.change: Callable[[str, Any], Any] = lambda name, value: value
        self.translations: dict[str, Translation] = {}
        self._running: list[tuple[str, GlobalMemory]] = []
        self._serial = 0
        properties = {"max_shared_mem": GPUS[arch].program_bytes, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: properties
        )

    @staticmethod
    def install(arch: int) -> EmulatedGpu:
        """Have every launch of this process emulated, and CPU tensors pass for those of a GPU."""
        if triton.knobs.runtime.interpret:
            raise RuntimeError("unset TRITON_INTERPRET: interpreted kernels are not compiled")
        gpu = EmulatedGpu(arch)
        # Texts take the place of binaries, so a cache of binaries is no place for them.
        triton.knobs.cache.dir = f"{triton.knobs.cache.dir}-emulated"
        driver.set_active(gpu)
        CUDABackend.make_cubin = lambda self, source, *others: source.encode()
        # A launch that is watched hands on its tensors, whose ends an address does not tell.
        run = JITFunction.run
        JITFunction.run = lambda *its, **named: run(*its, **named)
        of = tile_table.Gpu(f"emulated sm_{arch}", arch, 132, GPUS[arch].program_bytes)
        tile_table.Gpu.of = staticmethod(lambda device: of)
        names = vars(construction)
        names["interpreted"] = lambda: True  # which allows "triton" on a CPU, and no more
        names["kernels_overlap"] = lambda device: arch >= OVERLAP_ARCH
        return gpu

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return what Triton calls for a launch."""
        kinds = list(source.signature.items())
        early = bool(getattr(metadata, "launch_pdl", False))
        assert not getattr(metadata, "global_scratch_size", 0), "global scratch memory"

        def launch(x, y, z, stream, function, packed, meta, enter, leave, *given) -> None:
            named = [(*kind, value) for kind, value in zip(kinds, given, strict=True)]
            self._launch((x, y, z), function, named, early)

        return launch

    def _load(self, name: str, ptx: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return 1, SimpleNamespace(ptx=ptx.decode(), shared=shared), 32, 0, 1024

    def _launch(self, grid: tuple[int, int, int], function: Any, named: list, early: bool) -> None:
        text = self.edit(function.ptx)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self.translations:
            self.translations[digest] = Translation(parse(text))
        translation = self.translations[digest]
        kernel, options, report = translation.kernel, self.options, self.report
        memory, values = GlobalMemory(), list[bytes]()
        for name, kind, value in named:
            if kind.startswith("*"):
                memory.add(value, name)
                values.append(_packed("u64", value.data_ptr()))
            elif kind != "constexpr":
                values.append(_packed(kind, self.change(name, value)))
        values += [bytes(8)] * 2  # addresses of scratch memory that there is not
        names = zip(kernel.params, values, strict=True)
        params = {name: value.ljust(size, b"\0") for (name, size), value in names}
        coverage = report.coverage.setdefault(digest, np.zeros(len(kernel.instructions), np.uint8))
        report.launches[kernel.name] += 1
        self._serial += 1
        programs, seed = np.arange(np.prod(grid)), (options.order or 0, self._serial)
        if options.order is not None:
            programs = np.random.default_rng(seed).permutation(programs)
        buffers = StoreBuffers(seed) if options.weak else None
        launch = Launch(
            translation, params, grid, function.shared, memory, buffers, options, report, coverage,
            early,
        )  # fmt: skip
        at_once = options.programs or max(1, _AT_ONCE // kernel.threads)
        for first in range(0, len(programs), at_once):
            Machine(launch, programs[first : first + at_once]).run()
        if buffers is not None:
            buffers.show_all()
        for region in memory.regions if options.count else ():
            times = memory.reads[memory.cells_of(region)]
            report.reads[kernel.name, region.name] = int(times.min()), int(times.max())
        if self.arch >= OVERLAP_ARCH:
            self._compare(kernel.name, memory, early, launch.next_started)

    def _compare(self, name: str, memory: GlobalMemory, early: bool, chained: bool) -> None:
        """Look for what a launch touched although one before it may still run.

        Args:
            early: whether it may begin before the launch before it has ended.
            chained: whether a launch behind it may begin although those before it still run.
        """
        for other, before in self._running if early else ():
            for tensor in memory.overlaps(before):
                text = f"overlap: {name} touches {tensor} before it waits for {other}"
                self.report.doubts[text] += 1
        if not (early and chained):
            self._running.clear()
        self._running.append((name, memory))

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
