"""Lines and branches of the kernels' PTX that ran, and lines of their source that never did."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from tests.compiled.emulator.gpu import EmulatedGpu

Covered = dict[str, Any]
"""Of a kernel: counts of lines and branches by PTX text, and instructions that ran by source."""


def of_report(gpu: EmulatedGpu) -> dict[str, Covered]:
    """Return the coverage of each kernel, over all texts that it was compiled to.

    A branch is an instruction with a predicate, and each of its two outcomes counts once.
    """
    found: dict[str, Covered] = {}
    for digest, covered in gpu.report.coverage.items():
        kernel = gpu.translation(digest).kernel
        own = found.setdefault(
            kernel.name,
            {"texts": {}, "sources": Counter()},
        )
        instructions = kernel.instructions
        guarded = [at for at, i in enumerate(instructions) if i.guard is not None]
        own["texts"][digest] = {
            "lines": len(instructions),
            "lines_ran": int(covered.ran.sum()),
            "branches": 2 * len(guarded),
            "branches_ran": sum(int(covered.ways[at]).bit_count() for at in guarded),
        }
        for at, i in enumerate(instructions):
            own["sources"][i.source] += int(covered.ran[at])
    return found


def merged(parts: Iterable[dict[str, Covered]]) -> dict[str, Covered]:
    """Add up the coverage of several processes; of a text that several ran, the most of one."""
    found: dict[str, Covered] = defaultdict(lambda: {"texts": {}, "sources": Counter()})
    for part in parts:
        for kernel, own in part.items():
            found[kernel]["sources"].update(own["sources"])
            texts = found[kernel]["texts"]
            for digest, text in own["texts"].items():
                before = texts.get(digest, text)
                texts[digest] = {name: max(text[name], before[name]) for name in text}
    return dict(found)


def never_ran(covered: Covered) -> list[str]:
    """Return the source lines of the package that no text of a kernel ran, as file:line."""
    lines = (source for source, ran in covered["sources"].items() if not ran)
    return sorted(lines, key=lambda source: (source.split(":")[0], int(source.split(":")[1])))
