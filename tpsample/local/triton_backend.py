"""The local step as Triton launches, on a GPU or in the interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tpsample.core.score import Head
from tpsample.core.vocab_shard import VocabShard
from tpsample.kernels.lm_head import lm_head_kernel
from tpsample.local.backend import Backend
from tpsample.local.control_arguments import control_arguments, make_mask
from tpsample.local.tile_table import MAX_BLOCK_B, interpreter_tile, tile_for
from tpsample.local.tiles import Gpu, Tile
from tpsample.request.controls.apply import StepControls
from tpsample.request.controls.rows import ControlRows
from tpsample.request.step import Push, Step

INTERPRET: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class _Launch:
    """What of a launch does not change from step to step."""

    grid: tuple[int]
    arguments: dict[str, Any]


class TritonBackend(Backend):
    """The words as Triton launches, one per part. Twin: `tpsample.local.torch_backend`.

    All buffers are made here, so that a step allocates nothing.

    Args:
        max_rows: most rows × samples of a step.

    Attributes:
        tile: overrides the tile table where it is not None. It never changes a token.
    """

    tile: Tile | None = None

    def __init__(
        self,
        weight: Tensor,
        shard: VocabShard,
        bias: Tensor | None,
        head: Head,
        *,
        rounds: int,
        max_rows: int,
    ) -> None:
        super().__init__(weight, shard, bias, head, rounds=rounds)
        self._gpu = Gpu.of(weight.device)
        # A batch tile may reach past the last row, by less than its own size.
        padded = max_rows + MAX_BLOCK_B
        self._streams = torch.zeros(4, padded, dtype=torch.int32, device=weight.device)
        self._scale = torch.ones(padded, dtype=torch.float32, device=weight.device)
        self._launches: dict[tuple[Any, ...], _Launch | None] = {}

    def controls_of(self, rows: ControlRows) -> StepControls:
        return StepControls.of(rows, self._shard, make_mask)

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        hidden_states, batch, logits = step.hidden_states, step.batch, step.logits
        num_samples, stores = step.noise.num_samples, logits is not None
        num_rows = hidden_states.shape[0]
        controls = control_arguments(step.controls)
        edits = controls["BIASES"] or controls["PENALTIES"]
        tile = self._tile_of(num_rows, edits)
        block_e = tile.block_e(num_samples != 1, controls["MASKS"], edits)
        key = (part, parts, push is not None, num_rows, num_samples, stores, tile, block_e)
        if key not in self._launches:
            self._launches[key] = self._launch(part, parts, push, *key[3:])
        launch = self._launches[key]
        if launch is None:
            return
        lm_head_kernel[launch.grid](
            hidden_ptr=hidden_states,
            stride_hidden_b=hidden_states.stride(0),
            seed_ptr=batch.seed,
            position_ptr=step.noise.positions,
            temperature_ptr=batch.temperature,
            slot_ptr=batch.plan.stored_slot if stores else self._streams,
            logits_ptr=self._scale if logits is None else logits,
            stride_logits_b=0 if logits is None else logits.stride(0),
            num_stored=len(batch.plan.host_stored),
            words_ptr=words,
            **controls,
            **launch.arguments,
        )

    def _tile_of(self, num_rows: int, edits: bool) -> Tile:
        """What the table says, or what overrides it."""
        if self.tile is not None:
            return self.tile
        hidden_size, dtype = self._weight.shape[1], self._weight.dtype
        if INTERPRET:
            return interpreter_tile(num_rows, hidden_size)
        return tile_for(num_rows, len(self._shard), hidden_size, dtype, self._gpu, edits)

    def _launch(
        self,
        part: int,
        parts: int,
        push: Push | None,
        num_rows: int,
        num_samples: int,
        stores: bool,
        tile: Tile,
        block_e: int,
    ) -> _Launch | None:
        """Grid and arguments that stay the same from step to step; None if the part is empty."""
        start, stop = self._shard.start, self._shard.stop
        num_tiles = -(-(stop - start // 4 * 4) // tile.block_v) if stop > start else 0
        if push is not None:
            num_tiles = max(num_tiles, push.num_chunks)
        first, last = (num_tiles * p // parts for p in (part, part + 1))
        if first == last:
            return None
        weight = self._weight
        arguments = {
            "weight_ptr": weight,
            "stride_weight_v": weight.stride(0),
            "bias_ptr": weight if self._bias is None else self._bias,
            "stream_ptr": self._streams,
            "stride_stream": self._streams.stride(0),
            "scale_ptr": self._scale,
            "num_rows": num_rows,
            "num_samples": num_samples,
            "vocab_start": start,
            "vocab_stop": stop,
            "first_tile": first,
            "num_tiles": num_tiles,
            "logit_scale": float(self._head.logit_scale),
            "logit_softcap": float(self._head.logit_softcap or 1.0),
            "HAS_SCALE": self._head.logit_scale != 1.0,
            "HAS_SOFTCAP": self._head.logit_softcap is not None,
            "HAS_BIAS": self._bias is not None,
            "STORE_LOGITS": stores,
            "MANY_SAMPLES": num_samples != 1,
            "ROUNDS": self._rounds,
            "INTERPRET": INTERPRET,
            "HIDDEN_SIZE": weight.shape[1],
            "BLOCK_V": tile.block_v,
            "BLOCK_B": tile.block_b,
            "BLOCK_D": tile.block_d,
            "BLOCK_E": block_e,
            **push_arguments(push, weight),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": False,
        }
        return _Launch(((last - first) * -(-num_rows // tile.block_b),), arguments)


def push_arguments(push: Push | None, weight: Tensor) -> dict[str, Any]:
    """What `lm_head_kernel` takes of an exchange in the kernel; stand-ins where there is none."""
    if push is None:
        push = Push(weight, weight, weight, weight, num_chunks=1, rank=0, world_size=1, max_rows=1)
        return _push_arguments(push, False)
    return _push_arguments(push, True)


def _push_arguments(push: Push, used: bool) -> dict[str, Any]:
    return {
        "arrive_ptr": push.arrive,
        "epoch_ptr": push.epoch,
        "lost_ptr": push.lost,
        "inboxes_ptr": push.inboxes,
        "num_chunks": push.num_chunks,
        "rank": push.rank,
        "world_size": push.world_size,
        "max_rows": push.max_rows,
        "PUSH": used,
        "BLOCK_W": triton.next_power_of_2(push.world_size) if used else 1,
    }
