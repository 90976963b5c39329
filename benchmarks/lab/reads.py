"""Reads of the weight without a product: the limits that a step is held against.

A read in the shape of the sampler's tiles can be slower than one of the same bytes in a row. Where
a step stays behind both, its kernel is at fault; where it stays behind the plain read alone, the
shape of its tiles is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from benchmarks.lab import kernels
from benchmarks.lab.baselines import has_triton
from benchmarks.lab.timing import Timing
from tpsample.backends.triton_.tile_table import Gpu, Tile, interpreter_tile, tile_for
from tpsample.core.weight_format import FORMATS

READ_PROGRAMS_PER_SM = (4, 8, 16)
"""Grids of the read kernel that are tried; the fastest one is the limit."""
TILE_READ = "tile-shaped read"
_SMALLEST_BATCH, _BLOCK = 16, 2048
_L2_BYTES, _L2_PASSES, _TINY_L2_PASSES = 16 * 2**20, 200, 3

Read = Callable[[], Tensor]
"""Returns parts of the sum of all 32-bit words that it reads."""


def fastest(times: dict[str, Timing], names: Iterable[str]) -> Timing:
    """Return the fastest of the candidates `names` that were measured."""
    measured = (times[name] for name in names if name in times)
    return min(measured, key=lambda timing: timing.median_us)


def weight_reads(weight: Tensor) -> dict[str, Read]:
    """Return ways to read the whole weight and do nothing with it, each checked to read it all."""
    words = weight.view(torch.int32).flatten()
    if not has_triton(weight.device):
        reads: dict[str, Read] = {"read": lambda: words.sum()}
    else:
        reads = {f"read, {n} programs/SM": read_words(words, n) for n in READ_PROGRAMS_PER_SM}
    for name, read in reads.items():
        check_read(name, read, words)
    return reads


def tile_reads(weight: Tensor) -> dict[str, Read]:
    """Return a read by tiles by its name, checked to read all; none where Triton does not run.

    Its tiles are those of the smallest batch: as high, as wide and as deep.
    """
    if not has_triton(weight.device):
        return {}
    words = weight.view(torch.int32)
    (num_rows, width), tile = words.shape, default_tile(weight, _SMALLEST_BATCH)
    sums = torch.zeros(-(-num_rows // tile.block_v), dtype=torch.int64, device=weight.device)

    def read() -> Tensor:
        kernels.tile_read_kernel[(len(sums),)](
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


def l2_read(source: Tensor, tiny: bool) -> tuple[Read, int]:
    """Return a launch that reads a part of `source`, which fits L2, many times; and its bytes.

    Raises:
        AssertionError: it did not read every byte in every pass.
    """
    words, programs = source.view(torch.int32), 4 * multiprocessors(source.device)
    blocks = max(1, round(_L2_BYTES / 4 / (_BLOCK * programs)))  # of a program, in one pass
    words = words[: (1 if tiny else blocks) * programs * _BLOCK]
    passes = _TINY_L2_PASSES if tiny else _L2_PASSES
    sums = torch.zeros(programs, dtype=torch.int64, device=source.device)

    def read() -> Tensor:
        kernels.reread_kernel[(programs,)](
            words, sums, words.numel(), passes, BLOCK=_BLOCK, num_warps=8
        )
        return sums

    check_read("l2", read, passes * words.long())
    return read, passes * 4 * words.numel()


def check_read(name: str, read: Read, words: Tensor) -> None:
    """Raise AssertionError unless `read` returns parts of the sum of all words."""
    if int(read().sum()) % 2**32 != int(words.sum()) % 2**32:
        raise AssertionError(f"{name}: did not read every byte of the weight")


def read_words(words: Tensor, programs_per_sm: int) -> Read:
    """Return a launch that reads all words once."""
    programs = programs_per_sm * multiprocessors(words.device)
    sums = torch.zeros(programs, dtype=torch.int64, device=words.device)

    def read() -> Tensor:
        kernels.read_kernel[(programs,)](words, sums, words.numel(), BLOCK=_BLOCK, num_warps=8)
        return sums

    return read


def default_tile(weight: Tensor, rows: int) -> Tile:
    """Return the tile that a step of so many rows takes over this weight."""
    (vocab_rows, hidden_size), device = weight.shape, weight.device
    if device.type != "cuda":
        return interpreter_tile(rows, hidden_size)
    return tile_for(rows, vocab_rows, hidden_size, FORMATS[weight.dtype], Gpu.of(device))


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, and 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
