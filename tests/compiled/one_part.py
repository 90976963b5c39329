"""Runs one part on one emulated GPU."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict
from typing import Any

import torch

from tests.compiled.coverage import of_report
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.steps.parts import PARTS


def run_part(work: tuple[int, str, int]) -> dict[str, Any]:
    """Run a part; what ends it is told, not raised."""
    arch, name, seeds = work
    torch.set_num_threads(1)
    gpu = EmulatedGpu.install(arch)
    try:
        found = asdict(PARTS[name](gpu, seeds))
    except Exception:
        found = {"fault": traceback.format_exc()}
    return {
        "arch": arch,
        "part": name,
        **found,
        "doubts": dict(gpu.report.doubts),
        "launches": dict(gpu.report.launches),
        "instructions": gpu.report.instructions,
        "coverage": of_report(gpu),
        "processor_s": time.process_time(),
    }
