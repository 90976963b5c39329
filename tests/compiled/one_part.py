"""Runs one part on one emulated GPU, and prints what came of it: one line of JSON, the last."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

import torch

from tests.compiled.coverage import of_report
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.parts import PARTS


def run_part(arch: int, name: str, seconds: float) -> dict[str, Any]:
    """Run a part; what ends it is told, not raised."""
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
        "instructions": sum(sum(report.executed.values()) for report in reports),
        "coverage": of_report(gpu),
        "processor_s": time.process_time(),
    }


if __name__ == "__main__":
    print(json.dumps(run_part(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
