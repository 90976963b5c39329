"""Lines of the kernels' PTX that ran, and outcomes of predicates that never came.

An outcome is that of a line of the source, an opcode, and whether the predicate held. It came if it
came in one text of the kernel. Predicates that the compiler sets to a constant are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.static.builds import package_kernels
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.report import FAILED, HELD, RAN

PACKAGE = {name.split(":")[1] for name in package_kernels()}
"""The kernels of the package."""
OUTCOMES = {"runs": RAN, "holds": HELD, "fails": FAILED}
Covered = dict[str, dict[str, Any]]
"""Of a kernel: by PTX text the instructions and those that ran, and counts of outcomes."""


def of_report(gpu: EmulatedGpu) -> dict[str, Covered]:
    """Return the coverage of each kernel, over all texts that it was compiled to."""
    found: dict[str, Covered] = {}
    for digest, seen in gpu.report.coverage.items():
        kernel = gpu.translations[digest].kernel
        if kernel.name not in PACKAGE:
            continue
        own = found.setdefault(kernel.name, {"texts": {}, "outcomes": Counter()})
        own["texts"][digest] = [len(kernel.instructions), int((seen & RAN > 0).sum())]
        moved = (i.operands for i in kernel.instructions if i.name == "mov.pred")
        constant = {to for to, of in moved if of.lstrip("-").isdigit()}
        for i, bits in zip(kernel.instructions, seen.tolist(), strict=True):
            depends = i.guard and i.guard[0] not in constant
            for outcome, bit in OUTCOMES.items() if depends else [("runs", RAN)]:
                own["outcomes"][f"{i.source}, {i.name}, {outcome}"] += bool(bits & bit)
    return found


def merged(parts: Iterable[dict[str, Covered]]) -> dict[str, Covered]:
    """Add up the coverage of several processes; of a text that several ran, the most of one."""
    found: dict[str, Covered] = {}
    for part in parts:
        for kernel, own in part.items():
            all_of = found.setdefault(kernel, {"texts": {}, "outcomes": Counter()})
            all_of["outcomes"].update(own["outcomes"])
            for digest, text in own["texts"].items():
                all_of["texts"][digest] = max(text, all_of["texts"].get(digest, text))
    return found
