"""The local step as Triton launches, on a GPU or in the interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tpsample.core.score import Head, RowNoise
from tpsample.core.step_buffer import StepBuffer
from tpsample.core.vocab_shard import VocabShard
from tpsample.exchange.base import Exchange
from tpsample.kernels.decode import finish_kernel
from tpsample.kernels.lm_head import lm_head_kernel
from tpsample.local.control_arguments import control_arguments, make_mask
from tpsample.local.descriptors import describe, fits_descriptor
from tpsample.local.tile_table import MAX_BLOCK_B, interpreter_tile, tile_for
from tpsample.local.tiles import Gpu, Tile
from tpsample.logits.shard_logits_triton import TritonStoredRows
from tpsample.output import SampleOutput
from tpsample.request.plan import BatchView
from tpsample.request.step import LocalStep

INTERPRET: bool = triton.knobs.runtime.interpret
ROW_BLOCK = 64


@dataclass(frozen=True)
class _Launch:
    """What of a launch does not change from step to step."""

    grid: tuple[int]
    arguments: dict[str, Any]


class TritonBackend:
    """Best word per row over this rank's vocabulary rows. Twin: `tpsample.local.torch_backend`.

    All buffers are made here. A step launches one `lm_head_kernel` per part, then `finish_kernel`
    or what the exchange has in its place: two launches, but for `chunks` of host-side exchanges.

    Args:
        weight: [V_local, D]; rows behind the shard are never seen.
        bias: [V_local] or None.
        exchange: owner of the words the kernels write; says if they write to peers too.
        tile: overrides the tile table. Never changes a token.
    """

    name = "triton"

    def __init__(
        self,
        weight: Tensor,
        shard: VocabShard,
        bias: Tensor | None,
        head: Head,
        *,
        rounds: int,
        exchange: Exchange,
        tile: Tile | None = None,
    ) -> None:
        self._weight, self._bias, self._shard, self._head = weight, bias, shard, head
        self._rounds, self._exchange, self._tile = rounds, exchange, tile
        self._logits = StepBuffer(len(shard), torch.float32, weight.device)
        self._gpu = Gpu.of(weight.device)
        self._describable = len(shard) > 0 and fits_descriptor(weight)
        # A batch tile may reach past the last row, by less than its own size.
        padded = exchange.max_rows + MAX_BLOCK_B
        self._streams = torch.zeros(4, padded, dtype=torch.int32, device=weight.device)
        self._scale = torch.ones(padded, dtype=torch.float32, device=weight.device)
        self._launches: dict[tuple[Any, ...], _Launch | None] = {}

    def begin(
        self, hidden_states: Tensor, batch: BatchView, positions: Tensor, num_samples: int
    ) -> LocalStep:
        """The step of these inputs; without samples it only stores logits."""
        controls = logits = None
        if batch.controls is not None:
            controls = batch.controls.step(self._shard, make_mask)
        if batch.plan.stored is not None:
            raw_and_processed = 1 if controls is None else 2
            logits = self._logits.take(raw_and_processed * len(batch.plan.host_stored))
        noise = RowNoise.of(batch, positions, num_samples, self._rounds)
        return LocalStep(hidden_states, batch, noise, controls, logits)

    def run(self, step: LocalStep, part: int, words: Tensor) -> None:
        """Leave the part's best words in `words` [num_samples · B], sample-major.

        A part is a chunk; or all chunks at once, `words` being those of the first, if the
        exchange works in the kernel.
        """
        hidden_states, batch, logits = step.hidden_states, step.batch, step.logits
        num_samples, stores = step.noise.num_samples, logits is not None
        num_rows = hidden_states.shape[0]
        controls = control_arguments(step.controls)
        edits = controls["BIASES"] or controls["PENALTIES"]
        tile = self._tile_of(num_rows, edits)
        described = tile.descriptors and self._describable and fits_descriptor(hidden_states)
        block_e = tile.block_e(num_samples != 1, controls["MASKS"], edits)
        key = (part, num_rows, num_samples, stores, tile, described, block_e)
        if key not in self._launches:
            self._launches[key] = self._prepare(*key)
        launch = self._launches[key]
        if launch is None:
            return
        lm_head_kernel[launch.grid](
            hidden_ptr=describe(hidden_states, tile.block_b, tile) if described else hidden_states,
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
        if self._tile is not None:
            return self._tile
        hidden_size, dtype = self._weight.shape[1], self._weight.dtype
        if INTERPRET:
            return interpreter_tile(num_rows, hidden_size)
        return tile_for(num_rows, len(self._shard), hidden_size, dtype, self._gpu, edits)

    def _prepare(
        self,
        part: int,
        num_rows: int,
        num_samples: int,
        stores: bool,
        tile: Tile,
        described: bool,
        block_e: int,
    ) -> _Launch | None:
        """Grid and arguments that stay the same from step to step; None if the part is empty."""
        start, stop = self._shard.start, self._shard.stop
        num_tiles = -(-(stop - start // 4 * 4) // tile.block_v) if stop > start else 0
        if self._exchange.in_kernel:
            num_tiles = max(num_tiles, self._exchange.chunks)
        parts = self._exchange.parts
        first, last = (num_tiles * p // parts for p in (part, part + 1))
        if first == last:
            return None
        weight = self._weight
        arguments = {
            "weight_ptr": describe(weight[: stop - start], tile.block_v, tile)
            if described
            else weight,
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
            "DESCRIPTORS": described,
            "WARP_SPECIALIZE": described and tile.warp_specialize,
            "HIDDEN_SIZE": weight.shape[1],
            "BLOCK_V": tile.block_v,
            "BLOCK_B": tile.block_b,
            "BLOCK_D": tile.block_d,
            "BLOCK_E": block_e,
            **self._exchange.kernel_arguments(),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": False,
        }
        return _Launch(((last - first) * -(-num_rows // tile.block_b),), arguments)

    def stored_rows(self, step: LocalStep) -> TritonStoredRows:
        """The logits of `batch.plan.stored`, after the last `run` of a step."""
        assert step.logits is not None
        first_id = self._shard.start
        return TritonStoredRows.of(step.logits, step.batch, step.noise, first_id=first_id)

    def decode(self, words: Tensor, seeds: Tensor, out: SampleOutput) -> None:
        """Write tokens, status and seeds of the winners of `words` [sources, num_samples · B], and
        zero those."""
        num_rows = out.status.shape[0]
        finish_kernel[(-(-num_rows // ROW_BLOCK),)](
            words_ptr=words,
            stride_words_s=words.stride(0),
            seed_ptr=seeds,
            token_ptr=out.token_ids,
            status_ptr=out.status,
            out_seed_ptr=out.seeds,
            num_rows=num_rows,
            num_samples=words.shape[1] // num_rows,
            num_sources=words.shape[0],
            BLOCK=ROW_BLOCK,
        )
