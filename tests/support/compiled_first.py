"""Is what a section launches in Triton's cache, once its rehearsal has been compiled?

    python -m tests.support.compiled_first compile PART …    compiles what the parts list
    python -m tests.support.compiled_first launch PART …     launches it, and compiles no more

Both load each kernel as well, for which Triton 3.6 needs a C compiler and libcuda.so.1, and print
what Triton's cache holds then. Two processes, because one remembers what it compiled.
A part is as `benchmarks.gpu.sections.rehearsals` has it; the GPU is absent.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import triton

from benchmarks.gpu import precompile, sections
from benchmarks.gpu.precompile import compiled
from benchmarks.lab import baselines
from benchmarks.lab.launches import Launch
from tests.support.jit_launches import CPU, only_compile


def main(action: str, parts: list[str]) -> None:
    launches, rehearsals = only_compile(), sections.rehearsals(True)
    # Kernels on a CPU, though nothing interprets them.
    patch.object(baselines, "interpreted", lambda: True).start()
    if action == "launch":
        # Triton's own way from real arguments to the cache; nothing is listed.
        with patch.object(precompile, "listed", _unlisted):
            for part in parts:
                print(part, precompile.rehearse(rehearsals[part], CPU)[1])
        for kernel, _ in launches:
            kernel._init_handles()
    else:
        found: dict[Launch, None] = {}
        for part in parts:
            listed, problem = precompile.rehearse(rehearsals[part], CPU)
            print(part, problem)
            found |= dict.fromkeys(listed)
        for launch in found:
            print(launch.kernel, compiled(launch, load=True))
    print(len(launches), "launches")
    cache = Path(triton.knobs.cache.dir)
    for kind, pattern in (("cubins", "*.cubin"), ("launchers", "__triton_launcher*.so")):
        print(kind, sorted(path.parent.name for path in cache.glob(f"*/{pattern}")))


@contextlib.contextmanager
def _unlisted() -> Iterator[dict[Launch, int]]:
    yield {}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
