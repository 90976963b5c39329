"""Block sizes of the LM-head kernel, and why.

The choice can change the speed and nothing else: every entry gives the same tokens.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """One launch configuration of `lm_head_kernel`."""

    block_v: int
    block_b: int
    block_d: int
    num_warps: int
    num_stages: int


# Ahead of time for sm_80, sm_90 and sm_100 up to 32 accumulators per thread
# (block_v · block_b / 32 / num_warps) never spill and 64 often do. block_v >= 64 with at least 4
# warps keeps wgmma / tcgen05; more than 8 warps loses tcgen05.
_BY_BATCH = {
    16: Tile(block_v=128, block_b=16, block_d=64, num_warps=4, num_stages=4),
    32: Tile(block_v=128, block_b=32, block_d=64, num_warps=4, num_stages=4),
    64: Tile(block_v=128, block_b=64, block_d=64, num_warps=8, num_stages=3),
}
# fp32 runs on the CUDA cores with full precision, which needs registers for both operands.
_FP32 = Tile(block_v=64, block_b=16, block_d=32, num_warps=4, num_stages=2)

# The interpreter pays per operation, not per element: few large tiles.
_INTERPRETER_BLOCK_V = 1024


def tile_for(num_rows: int, dtype: torch.dtype) -> Tile:
    """The configuration for a batch of `num_rows` rows on a GPU."""
    if dtype == torch.float32:
        return _FP32
    return _BY_BATCH[min(64, max(16, next_power_of_2(num_rows)))]


def interpreter_tile(num_rows: int, hidden_size: int) -> Tile:
    """The configuration for the interpreter."""
    return Tile(
        block_v=_INTERPRETER_BLOCK_V,
        block_b=min(64, max(4, next_power_of_2(num_rows))),
        block_d=min(1024, max(16, next_power_of_2(hidden_size))),
        num_warps=1,
        num_stages=1,
    )


def all_tiles() -> list[tuple[Tile, torch.dtype]]:
    """Every GPU configuration with the weight dtypes it serves."""
    halves = [
        (tile, dtype) for tile in _BY_BATCH.values() for dtype in (torch.bfloat16, torch.float16)
    ]
    return [*halves, (_FP32, torch.float32)]


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
