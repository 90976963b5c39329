"""Runs one part on one emulated GPU."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict
from typing import Any

import torch

from tests.compiled.coverage import of_report
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.parts import PARTS


def run_part(work: tuple[int, str, float]) -> dict[str, Any]:
    """Run a part; what ends it is told, not raised."""
    arch, name, seconds = work
    torch.set_num_threads(1)
    gpu = EmulatedGpu.install(arch)
    try:
        found = asdict(PARTS[name](gpu, seconds))
    except Exception:
        found = {"fault": traceback.format_exc()}
    reports = [*gpu.earlier, gpu.report]
    return {
        "arch": arch,
        "part": name,
        **found,
        "doubts": {text: n for report in reports for text, n in report.doubts.items()},
        "launches": dict(gpu.report.launches),
        "instructions": sum(report.instructions for report in reports),
        "coverage": of_report(gpu),
        "processor_s": time.process_time(),
    }
