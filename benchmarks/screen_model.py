"""Predicts a screened step beside a plain one, without a GPU; `tile_model --screened` prints it.

    rows       limbs and streams of the rows: latency alone
    screen     8-bit tiles, as the grid of `launch_model`; both halves of the limbs come through L2
    list       groups that can win: latency alone
    LM head    CANDIDATES groups per row, no two alike, in tiles of 64 ids

Every kernel after the first costs what the second one of a plain step does. Nothing of this has
been measured.
"""

from __future__ import annotations

import torch

from benchmarks.launch_model import Chip, duration_us, grid_of
from benchmarks.shapes import Shape, shape_named
from benchmarks.tile_model import SHAPES, WORLD_SIZES, predict
from tpsample import VocabShard
from tpsample.local.screen_launches import GROUP, SCREEN_TILES
from tpsample.local.tile_table import batch_tile, list_tile, rule
from tpsample.local.tiles import Gpu

BATCHES = (1, 16, 32, 64)
CANDIDATES = 5.0
"""Ids of a row that can win: 4.6 on average over real rows of a head of 49152 × 576; more where
‖w‖ ‖h‖ is larger."""
INSTRUCTIONS_PER_LOGIT = 65
"""Of `screen_kernel`, counted in SASS for sm_90."""
LISTED_PER_LOGIT = 38
"""Of the LM head, as in `tile_model`."""
PROGRAMS_PER_SM = {16: 2, 32: 2, 64: 1}
"""By block_b, from the static report for sm_90."""
ROWS_US, LIST_US = 2.5, 1.5
"""Assumed: two dependent passes over a row, and one load and an atomic."""


def screened_us(chip: Chip, shape: Shape, world_size: int, batch: int) -> float:
    """Return the predicted time of a screened step of rank 0's shard."""
    vocab_rows = len(VocabShard.even(shape.vocab_size, 0, world_size))
    tile, few = SCREEN_TILES[batch_tile(batch)], list_tile(batch, torch.bfloat16, Gpu())
    screen = grid_of(
        chip,
        tile,
        -(-vocab_rows // tile.block_v),
        PROGRAMS_PER_SM[tile.block_b],
        shape.hidden_size,
        INSTRUCTIONS_PER_LOGIT,
        itemsize=1,
        limbs=2,
    )
    ids = min(vocab_rows, int(batch * CANDIDATES * GROUP))
    listed_tiles = -(-ids // few.block_v)
    refined = grid_of(chip, few, listed_tiles, 1, shape.hidden_size, LISTED_PER_LOGIT)
    kernels = ROWS_US + duration_us(chip, screen) + LIST_US + duration_us(chip, refined)
    return kernels + chip.graph_us + 4 * chip.second_kernel_us


def table(chip: Chip) -> list[str]:
    """Return a Markdown table: plain → screened, each over the time to read the weights once."""
    gpu = Gpu(chip.name, 90, chip.sms)
    lines = [f"{chip.name}, predicted: plain → screened ÷ reading the bf16 weights once", ""]
    lines += [
        "| part | shape | limit, µs | " + " | ".join(f"B={batch}" for batch in BATCHES) + " |",
        "| --- | --- | ---: |" + " ---: |" * len(BATCHES),
    ]
    for world_size in WORLD_SIZES:
        for name in SHAPES:
            shape = shape_named(name)
            rows = len(VocabShard.even(shape.vocab_size, 0, world_size))
            cells, limit_us = [], 0.0
            for batch in BATCHES:
                chosen = rule(batch, rows, torch.bfloat16, gpu)
                plain = predict(chip, shape, world_size, batch, chosen)
                limit_us = plain.limit_us
                screened = screened_us(chip, shape, world_size, batch) / limit_us
                cells.append(f"{plain.over_limit:.2f} → {screened:.2f}")
            lines.append(f"| 1/{world_size} | {name} | {limit_us:.1f} | {' | '.join(cells)} |")
    return lines
