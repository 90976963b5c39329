"""Holds the tile model against published times of FlashSampling, the nearest kernel there is.

    python -m benchmarks.calibration      a minute; no GPU needed

The times are read off the plots of memory throughput that its authors published in February 2026
(128256 × 8192, one GPU): 2.10 GB ÷ GB/s. They are of the kernel before it was made persistent, one
program per tile, in tiles of 128 × 16 or 128 × 64. Its epilogue is counted in SASS like ours.
"""

from __future__ import annotations

from benchmarks import text
from benchmarks.shapes import shape_named
from benchmarks.tile_model import CHIPS, predict
from tpsample.local.tiles import Tile

SHAPE = "128256x8192"
PUBLISHED_US = {
    "NVIDIA H100": {1: 709.0, 16: 730.0, 64: 781.0, 128: 959.0, 256: 1539.0},
    "NVIDIA H200": {1: 480.0, 16: 500.0, 64: 574.0, 128: 881.0, 256: 1604.0},
}
INSTRUCTIONS_PER_LOGIT = 104.8

BAND = (0.89, 1.13)
"""The model's times over the published ones: the least and the most of the ten."""


def tile(batch: int) -> Tile:
    """Return the tile that FlashSampling takes."""
    return Tile(
        block_v=128, block_b=16 if batch <= 16 else 64, block_d=64, num_warps=8, num_stages=4
    )


def over_published(chip_name: str, batch: int) -> float:
    """Return the model's time of FlashSampling's kernel over the published one."""
    (chip,) = (chip for chip in CHIPS if chip.name == chip_name)
    shape = shape_named(SHAPE)
    found = predict(chip, shape, 1, batch, tile(batch), INSTRUCTIONS_PER_LOGIT)
    return found.step_us / PUBLISHED_US[chip_name][batch]


def main() -> None:
    """Print the ten ratios."""
    rows = [
        (name, batch, text.three(us), text.three(over_published(name, batch)))
        for name, times in PUBLISHED_US.items()
        for batch, us in times.items()
    ]
    print(text.table(("GPU", "B", "published µs", "model ÷ published"), rows, right=1))


if __name__ == "__main__":
    main()
