"""The local step as Triton launches, on a GPU or in the interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tpsample.backends.backend import Backend
from tpsample.backends.triton_.arguments import (
    append_tokens,
    control_arguments,
    early_launch,
    has_edits,
    head_arguments,
    make_mask,
)
from tpsample.backends.triton_.kernels.lm_head import lm_head_kernel
from tpsample.backends.triton_.launcher import PreparedLaunch
from tpsample.backends.triton_.screen_launches import Screen
from tpsample.backends.triton_.slots import read_slots
from tpsample.backends.triton_.tile_table import (
    MAX_BLOCK_B,
    Gpu,
    Tile,
    interpreter_tile,
    list_tile,
    tile_for,
)
from tpsample.core.machine import interpreted
from tpsample.core.score import Head
from tpsample.core.weight_format import FORMATS, FP32
from tpsample.request.controls.apply import ControlRows, StepControls
from tpsample.request.step import Push, Step, TileWords
from tpsample.request.step_batch import StepBatch
from tpsample.settings import Settings

_OFF = control_arguments(None)
"""The arguments of a step without request controls."""
_NOTHING_STORED = dict.fromkeys(
    (
        *("logits_ptr", "stride_logits_b", "slot_ptr", "num_stored"),
        *("tile_first_ptr", "tile_best_ptr", "stride_words"),
    )
)
"""The arguments of a step that stores no logits."""


class TritonBackend(Backend):
    """The words as Triton launches, one per part. Twin: `tpsample.backends.torch_.launch`.

    All buffers are made here, so that a step allocates nothing.

    Attributes:
        tile: overrides the tile table where it is not None. It never changes a token.
        screen: goes before the steps that it takes; None without screening.
    """

    tile: Tile | None = None

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        device = settings.device
        self._gpu = Gpu.of(device)
        self._overlap = settings.overlap
        self.screen = None if settings.screening is None else Screen(settings)
        self.copy = None if self.screen is None else self.screen.copy
        # A batch tile may reach past the last row, by less than its own size.
        padded = settings.max_rows + MAX_BLOCK_B
        self._streams = torch.zeros(4, padded, dtype=torch.int32, device=device)
        self._scale = torch.ones(padded, dtype=torch.float32, device=device)
        self._launches: dict[tuple[Any, ...], PreparedLaunch | None] = {}

    def rebind_weight(self, weight: Tensor | None) -> None:
        super().rebind_weight(weight)
        self._launches.clear()  # which know where weight and bias lie

    def read_slots(self, batch: StepBatch) -> None:
        batch._read_slots(read_slots)

    def controls_of(self, rows: ControlRows) -> StepControls:
        rows.tables.append_by = append_tokens
        return StepControls.of(rows, self._shard, make_mask)

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        given, batch, logits = step.local_logits is not None, step.batch, step.logits
        inputs = step.hidden_states if step.local_logits is None else step.local_logits
        controls = None if step.controls is None else control_arguments(step.controls)
        controlled = controls is not None
        masks = controls is not None and controls["mask_ptr"] is not None
        edits = controls is not None and has_edits(controls)
        screen = self.screen if self.screen is not None and self.screen.takes(step) else None
        if screen is not None and part == 0:
            screen.launch(step, controls or _OFF, self._streams, self._scale)
        num_samples, stores = step.noise.num_samples, logits is not None
        screened = screen is not None
        kind = inputs.shape[0], num_samples, given, controlled, masks, edits, stores, screened
        key = part, parts, push is not None, self.tile, kind
        try:
            launch = self._launches[key]
        except KeyError:
            launch = self._launches[key] = self._launch(part, parts, push, *kind)
        if launch is None:
            return
        others = {
            "hidden_ptr": inputs,
            "stride_hidden_b": inputs.stride(0),
            "seed_ptr": batch.seed,
            "position_ptr": step.noise.positions,
            "temperature_ptr": batch.temperature,
            "words_ptr": words,
        }
        if controls is not None:
            others |= controls
        if logits is not None:
            others |= self._storing(step, logits, launch.fixed["BLOCK_V"])
        launch(**others)

    def _storing(self, step: Step, logits: Tensor, size: int) -> dict[str, Any]:
        """Return the arguments of a step that stores logits, in tiles of so many ids."""
        samples, tile_words = step.noise.num_samples, step.tile_words
        if samples and (tile_words is None or tile_words.size != size):
            count = len(step.batch.plan.stored_list)
            tiles = -(-(self._shard.start % 4 + self._num_ids) // size)
            first = self._scratch.take("first words of tiles", torch.int64, count, tiles)
            best = self._scratch.take("best words of tiles", torch.int64, count, samples, tiles)
            tile_words = step.tile_words = TileWords(first, best, size)
        return {
            "logits_ptr": logits,
            "stride_logits_b": logits.stride(0),
            "slot_ptr": step.batch.plan.stored_place,
            "num_stored": logits.shape[0] // 2,
            "tile_first_ptr": tile_words and tile_words.first,
            "tile_best_ptr": tile_words and tile_words.best,
            "stride_words": tile_words and tile_words.first.stride(0),
        }

    def _tile_of(self, num_rows: int, edits: bool, stores: bool, given: bool, listed: bool) -> Tile:
        """Return the tile that overrides the table, or the table's.

        Args:
            stores: whether logits of some rows are stored.
            given: whether the step takes logits that the caller computed.
            listed: whether the step computes a list of few ids.
        """
        if self.tile is not None:
            return self.tile
        hidden_size, weights = self._weight.shape[1], FORMATS[self._weight.dtype]
        if given:  # without a product; the tile of fp32 has room for every epilogue
            hidden_size, weights = 1, FP32
        if interpreted():
            return interpreter_tile(num_rows, hidden_size)
        if listed and not edits:
            return list_tile(num_rows, weights, self._gpu)
        return tile_for(num_rows, self._num_ids, hidden_size, weights, self._gpu, edits, stores)

    def _launch(
        self,
        part: int,
        parts: int,
        push: Push | None,
        num_rows: int,
        num_samples: int,
        given: bool,
        controlled: bool,
        masks: bool,
        edits: bool,
        stores: bool,
        listed: bool,
    ) -> PreparedLaunch | None:
        """Return the launch of all steps of a kind, or None if the part is empty."""
        start, stop = self._shard.start, self._shard.stop
        tile = self._tile_of(num_rows, edits, stores, given, listed)
        num_tiles = -(-(stop - start // 4 * 4) // tile.block_v) if stop > start else 0
        if push is not None:
            num_tiles = max(num_tiles, push.num_chunks)
        first, last = (num_tiles * p // parts for p in (part, part + 1))
        if first == last:
            return None
        weight, head = self._weight, Head() if given else self._head
        screen = self.screen if listed else None
        fixed = {
            "weight_ptr": None if given else weight,
            "stride_weight_v": None if given else weight.stride(0),
            "stream_ptr": self._streams,
            "stride_stream": self._streams.stride(0),
            "scale_ptr": self._scale,
            "num_rows": num_rows,
            "num_samples": None if num_samples == 1 else num_samples,
            "vocab_start": start,
            "vocab_stop": stop,
            "first_tile": first,
            "num_tiles": num_tiles,
            **head_arguments(head, None if given else self._bias),
            "HIDDEN_SIZE": 0 if given else weight.shape[1],
            "BLOCK_V": tile.block_v,
            "BLOCK_B": tile.block_b,
            "BLOCK_D": tile.block_d,
            "BLOCK_E": tile.block_e(num_samples != 1, masks, edits),
            "OVERLAP": self._overlap,
            "PREFETCH": 0 if given else self._prefetch(tile),
            **(dict.fromkeys(Push._fields) if push is None else push._asdict()),
            "BLOCK_W": push and triton.next_power_of_2(push.world_size),
            **({} if controlled else _OFF),
            **({} if stores else _NOTHING_STORED),
            "listed_ptr": screen and screen.listed_ptr,
            "num_listed_ptr": screen and screen.num_listed_ptr,
            **early_launch(listed and self._overlap),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        grid = ((last - first) * -(-num_rows // tile.block_b),)
        return PreparedLaunch(lm_head_kernel, grid, **fixed)

    def _prefetch(self, tile: Tile) -> int:
        """Return how many bytes of each row a program asks for before it has made its noise.

        They are those of the first loads. A bulk prefetch takes multiples of 16 at multiples of 16.
        """
        weight = self._weight
        aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.itemsize % 16 == 0
        if not self._overlap or not aligned:
            return 0
        columns = min(tile.num_stages * tile.block_d, weight.shape[1])
        return columns * weight.itemsize // 16 * 16
