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
    gpu, told = EmulatedGpu.install(arch), {"arch": arch, "part": name}
    try:
        found = asdict(PARTS[name](gpu, seconds))
    except Exception as error:
        found = {"fault": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    reports = [*gpu.earlier, gpu.report]
    doubts = {text: n for report in reports for text, n in report.doubts.items()}
    report = gpu.report
    return {
        **told,
        **found,
        "doubts": doubts,
        "launches": dict(report.launches),
        "instructions": sum(sum(each.executed.values()) for each in reports),
        "coverage": of_report(gpu),
        "processor_s": time.process_time(),
    }


if __name__ == "__main__":
    print(json.dumps(run_part(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
