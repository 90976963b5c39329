"""How long does `warm_up()` take? Kernels per GPU architecture, and seconds on this CPU.

    python -m benchmarks.static.warm_up [--arch N …]

A GPU compiles each kernel once per specialisation; none is needed to count them. On this CPU a
process with an empty cache of kernels warms a sampler up, and then one that finds them there.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import numba
import torch
import triton

from benchmarks.lab.launches import Launch, filled, listed, searched
from benchmarks.static.builds import samplers_of
from tpsample import LMHeadSampler
from tpsample.backends.triton_.tile_table import tile_ends

SHAPE = (8192, 2048)
"""Of the weight, in bf16; a larger vocabulary has the same kernels."""
_CHILD = """
import time, torch, tpsample
sampler = tpsample.LMHeadSampler(torch.zeros(1000, 64), backend="numba")
start = time.perf_counter(), time.process_time()
sampler.warm_up()
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""


def specialisations(sampler: LMHeadSampler, rows: Sequence[int]) -> set[Launch]:
    """Return what a warm-up with steps of so many rows compiles on a GPU. No kernel runs."""
    unread = patch("tpsample.core.tensors.READ_ON", ())  # the host reads nothing, as on a GPU
    with unread, searched(), filled(), listed() as launches:
        sampler.warm_up(rows=rows)
    return set(launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    for arch in parser.parse_args().arch:
        _, (sampler,) = samplers_of(arch, shape=SHAPE, chunks=1, backend="triton")
        found = specialisations(sampler, tile_ends(sampler.max_rows))
        kernels = Counter(launch.kernel.split(":")[1] for launch in found)
        its = ", ".join(f"{name} {count}" for name, count in kernels.most_common(2))
        print(f"sm_{arch}: {len(found)} specialisations of {len(kernels)} kernels; {its}, …")
    with tempfile.TemporaryDirectory() as cache:
        for state in ("an empty", "a warm"):
            command, env = (sys.executable, "-c", _CHILD), {**os.environ, "NUMBA_CACHE_DIR": cache}
            done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
            took, busy = map(float, done.stdout.split())
            print(f"CPU, {state} cache: {took:.2f} s, {busy:.2f} s of processor time")
    versions = (f"{each.__name__} {each.__version__}" for each in (torch, triton, numba))
    print(f"{platform.machine()}, {os.cpu_count()} cores, {', '.join(versions)}")


if __name__ == "__main__":
    main()
