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

    def block_e(self, many_samples: bool, masks: bool = False, edits: bool = False) -> int:
        """Batch columns that the epilogue works on at a time.

        Ahead of time for sm_80, sm_90 and sm_100 no entry of the table spills with 32; with all
        columns at once 64 accumulators per thread often spill and 128 always. 64 in one go save 3
        instructions per logit, but not with a loop over samples, which keeps the logits alive.
        Penalties and biases (`edits`) load per element, by 64-bit addresses: 16 columns; so do
        masks, which only a loop over samples on top makes too much.
        """
        if edits or (masks and many_samples):
            return min(self.block_b, 16)
        return min(self.block_b, 32 if many_samples or self.block_b > 64 else 64)


MAX_BLOCK_B = 256

# One batch tile up to 256 rows, so the weights are read once, from HBM and through L2. block_v >=
# 64 with at least 4 warps keeps wgmma / tcgen05; more than 8 warps loses tcgen05. Stages fill
# shared memory so that two programs fit an SM (one for 256 rows): one computes its epilogue while
# the other loads.
_TILES = {
    16: Tile(block_v=128, block_b=16, block_d=64, num_warps=4, num_stages=5),
    32: Tile(block_v=128, block_b=32, block_d=64, num_warps=4, num_stages=5),
    64: Tile(block_v=128, block_b=64, block_d=64, num_warps=4, num_stages=4),
    128: Tile(block_v=128, block_b=128, block_d=64, num_warps=8, num_stages=3),
    256: Tile(block_v=128, block_b=256, block_d=64, num_warps=8, num_stages=3),
}
# Half the height, for shards that would not fill the SMs twice: a shard of 16032 rows is 126 tiles
# of 128, fewer than the 132 SMs of an H200, but 251 of 64.
_SHORT_TILES = {
    16: Tile(block_v=64, block_b=16, block_d=64, num_warps=4, num_stages=8),
    32: Tile(block_v=64, block_b=32, block_d=64, num_warps=4, num_stages=7),
    64: Tile(block_v=64, block_b=64, block_d=64, num_warps=4, num_stages=5),
    128: Tile(block_v=64, block_b=128, block_d=64, num_warps=8, num_stages=4),
    256: Tile(block_v=64, block_b=256, block_d=64, num_warps=8, num_stages=3),
}
# fp32 runs on the CUDA cores with full precision, which needs registers for both operands.
_FP32 = Tile(block_v=64, block_b=16, block_d=32, num_warps=4, num_stages=2)

# The interpreter pays per operation, not per element: few large tiles.
_INTERPRETER_BLOCK_V = 1024


def tile_for(
    num_rows: int, vocab_rows: int, num_sms: int, dtype: torch.dtype, *, edits: bool = False
) -> Tile:
    """The configuration for a batch of `num_rows` rows over `vocab_rows` of the vocabulary.

    Penalties and biases (`edits`) need registers that only the short tiles leave.
    """
    if dtype == torch.float32:
        return _FP32
    block_b = min(MAX_BLOCK_B, max(16, next_power_of_2(num_rows)))
    fills_twice = vocab_rows >= 2 * num_sms * _TILES[block_b].block_v
    return _TILES[block_b] if fills_twice and not edits else _SHORT_TILES[block_b]


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
    tiles = [*_TILES.values(), *_SHORT_TILES.values()]
    halves = [(tile, dtype) for tile in tiles for dtype in (torch.bfloat16, torch.float16)]
    return [*halves, (_FP32, torch.float32)]


def is_short(tile: Tile) -> bool:
    """Whether batches with penalties or biases use the tile."""
    return tile in (*_SHORT_TILES.values(), _FP32)


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
