"""Compiles the noise as it is written for AMD's GPUs, but for sm_80, and compares it with the twin.

There `tl.log2` is a function of libdevice, which is an ulp or two off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tests.compiled.emulator.gpu import EmulatedGpu
from tpsample import noise
from tpsample.backends.triton_.kernels import noise as kernels
from tpsample.backends.triton_.kernels.noise import noise_tile

ROWS, QUADS = 16, 32


@triton.jit
def noise_kernel(stream_ptr, noise_ptr, first, QUADS: tl.constexpr, ROWS: tl.constexpr):
    offs_b = tl.arange(0, ROWS)
    r0 = tl.load(stream_ptr + offs_b).to(tl.uint32)
    r1 = tl.load(stream_ptr + ROWS + offs_b).to(tl.uint32)
    r2 = tl.load(stream_ptr + 2 * ROWS + offs_b).to(tl.uint32)
    tile = noise_tile(first + tl.arange(0, QUADS), r0, r1, r2)
    offs_v = tl.arange(0, 4 * QUADS)
    tl.store(noise_ptr + offs_b[None, :] * 4 * QUADS + offs_v[:, None], tile)


@constexpr_function
def as_on_amd():
    return True


def main() -> None:
    EmulatedGpu.install(80)
    vars(kernels)["is_hip"] = as_on_amd
    rows = torch.arange(ROWS)
    stream = noise.row_stream(rows * 7919, rows)
    given = torch.stack(stream[:3]).contiguous()
    for first in (0, 24000):
        found = torch.zeros(ROWS, 4 * QUADS)
        noise_kernel[(1,)](given, found, first, QUADS, ROWS, enable_fp_fusion=False)
        wanted = noise.tile_noise(tuple(word[:, None] for word in stream), 4 * first, 4 * QUADS)
        torch.testing.assert_close(found, wanted.view(ROWS, -1), rtol=3e-7, atol=1e-6)


if __name__ == "__main__":
    main()
