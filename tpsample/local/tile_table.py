"""Block sizes of the LM-head kernel, and why.

The choice can change the speed and nothing else: every entry gives the same tokens. A shape that
was measured on this GPU takes what was fastest there (`measured_tiles`); any other takes a rule.
The rules are argued from bytes, waves and static counts (`benchmarks.static.report`): nothing here
has been measured yet.
"""

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from tpsample.local.measured_tiles import FILE, measured_tiles
from tpsample.local.tiles import Gpu, Tile

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
BATCH_TILES = tuple(_TILES)
# Half the height, for small batches on shards whose tiles then all run at once: a shard of 16032
# rows is 126 tiles of 128, fewer than the 132 SMs of an H200, but 251 of 64. One tile more than run
# at once would cost a second wave. At 64 rows and more a short tile reads the hidden states too
# often: 64 × 256 takes 5 bytes through L2 per byte of weights. Penalties and biases always take
# these, because they leave registers.
_SHORT_TILES = {
    16: Tile(block_v=64, block_b=16, block_d=64, num_warps=4, num_stages=8),
    32: Tile(block_v=64, block_b=32, block_d=64, num_warps=4, num_stages=7),
    64: Tile(block_v=64, block_b=64, block_d=64, num_warps=4, num_stages=5),
    128: Tile(block_v=64, block_b=128, block_d=64, num_warps=8, num_stages=4),
    256: Tile(block_v=64, block_b=256, block_d=64, num_warps=8, num_stages=3),
}
# Of sm_80, where the short tile of 64 rows spills with penalties for a list of ids.
_EIGHT_WARPS = replace(_SHORT_TILES[64], num_warps=8)
# For the few ids that a screen has listed: about as many tiles as SMs, so each has an SM to itself
# and needs all of its shared memory to keep enough bytes under way.
_LIST_TILES = {
    16: Tile(block_v=64, block_b=16, block_d=128, num_warps=4, num_stages=8),
    32: Tile(block_v=64, block_b=32, block_d=128, num_warps=4, num_stages=6),
    64: Tile(block_v=64, block_b=64, block_d=128, num_warps=4, num_stages=5),
}
# fp32 runs on the CUDA cores with full precision, which needs registers for both operands.
_FP32 = Tile(block_v=64, block_b=16, block_d=32, num_warps=4, num_stages=2)

# The interpreter pays per operation, not per element: few large tiles.
_INTERPRETER_BLOCK_V = 1024


@cache
def tile_for(
    num_rows: int,
    vocab_rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    gpu: Gpu,
    edits: bool = False,
) -> Tile:
    """The configuration for a batch of `num_rows` rows over `vocab_rows` of the vocabulary.

    Penalties and biases (`edits`) need registers that only the short tiles leave.
    """
    if edits:
        return short_tile(num_rows, dtype, gpu)
    measured = measured_tiles().get((gpu, vocab_rows, hidden_size, batch_tile(num_rows)))
    if measured is None or dtype == torch.float32:
        return rule(num_rows, vocab_rows, dtype, gpu)
    return measured


def short_tile(num_rows: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """The configuration for penalties and biases."""
    return _FP32 if dtype == torch.float32 else fitted(_SHORT_TILES[batch_tile(num_rows)], gpu)


def list_tile(num_rows: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """The configuration for a list of few ids, of up to 64 rows."""
    return _FP32 if dtype == torch.float32 else fitted(_LIST_TILES[batch_tile(num_rows)], gpu)


def fitted(tile: Tile, gpu: Gpu) -> Tile:
    """Return a tile of 16-bit weights with no more stages than fit this GPU.

    Before sm_90, and where a program has 99 KB, half the largest batch tile is taken: with masks,
    samples and stored rows the largest one spills on sm_80, sm_86 and sm_89.
    """
    small = 0 < gpu.arch < 90 or 0 < gpu.shared_bytes < 100 * 1024
    if small and tile == _TILES[MAX_BLOCK_B]:
        tile = _TILES[MAX_BLOCK_B // 2]
    if gpu.arch == 80 and tile == _SHORT_TILES[64]:
        tile = _EIGHT_WARPS
    return tile.fitting(gpu, 2 * (tile.block_v + tile.block_b) * tile.block_d)


def rule(num_rows: int, vocab_rows: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """The configuration of a shape that was not measured."""
    if dtype == torch.float32:
        return _FP32
    block_b = batch_tile(num_rows)
    run_at_once = -(-vocab_rows // _SHORT_TILES[block_b].block_v) <= 2 * gpu.num_sms
    short = block_b <= 32 and run_at_once
    return fitted((_SHORT_TILES if short else _TILES)[block_b], gpu)


def batch_tile(num_rows: int) -> int:
    """Rows of one batch tile: all of the batch, padded, up to MAX_BLOCK_B."""
    return min(MAX_BLOCK_B, max(16, next_power_of_2(num_rows)))


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
    tiles = [*_TILES.values(), *_SHORT_TILES.values(), *_LIST_TILES.values()]
    halves = [(tile, dtype) for tile in tiles for dtype in (torch.bfloat16, torch.float16)]
    return [*halves, (_FP32, torch.float32)]


def is_short(tile: Tile) -> bool:
    """Return whether batches with penalties or biases use the tile."""
    return tile in (*_SHORT_TILES.values(), _EIGHT_WARPS, _FP32)


def fingerprint() -> str:
    """Short hash of the rules and of the measured tiles: what ranks compare when they are built."""
    return hashlib.sha256(Path(__file__).read_bytes() + FILE.read_bytes()).hexdigest()[:16]


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
