"""The weights read tile by tile, with no product: the limit of the sampler's own access pattern.

A read of the same bytes in a row can be faster. Where a step stays behind both, its kernel is at
fault; where it stays behind the plain read alone, the shape of its tiles is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.baselines import check_read, has_triton
from tpsample.local.tile_table import interpreter_tile, tile_for
from tpsample.local.tiles import Gpu

TILE_READ = "tile-shaped read"
_SMALLEST_BATCH = 16


def tile_reads(weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The read by its name, checked to have read it all; nothing where Triton does not run.

    Its tiles are those of the smallest batch: as high, as wide and as deep.
    """
    if not has_triton(weight.device):
        return {}
    from benchmarks.baseline_kernels import tile_read_kernel

    words = weight.view(torch.int32)
    (num_rows, width), hidden_size = words.shape, weight.shape[1]
    tile = interpreter_tile(_SMALLEST_BATCH, hidden_size)
    if weight.device.type == "cuda":
        gpu = Gpu.of(weight.device)
        tile = tile_for(_SMALLEST_BATCH, num_rows, hidden_size, weight.dtype, gpu)
    sums = torch.zeros(-(-num_rows // tile.block_v), dtype=torch.int64, device=weight.device)

    def read() -> Tensor:
        tile_read_kernel[(len(sums),)](
            x_ptr=words,
            stride_x=words.stride(0),
            sums_ptr=sums,
            num_rows=num_rows,
            WIDTH=width,
            BLOCK_V=tile.block_v,
            BLOCK_D=tile.block_d * weight.element_size() // 4,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        return sums

    check_read(TILE_READ, read, words)
    return {TILE_READ: read}
