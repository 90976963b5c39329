"""The local step as Triton launches, on a GPU or in the interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tpsample.batch import SamplingBatch
from tpsample.exchange.base import Exchange
from tpsample.kernels.finish import finish_kernel
from tpsample.kernels.lm_head import lm_head_kernel
from tpsample.kernels.tile_table import MAX_BLOCK_B, Tile, interpreter_tile, tile_for
from tpsample.output import SampleOutput
from tpsample.score import Head, RowNoise
from tpsample.stored_rows import LogitsBuffer, StoredRows
from tpsample.vocab_shard import VocabShard

INTERPRET: bool = triton.knobs.runtime.interpret
ROW_BLOCK = 64


class TritonBackend:
    """Best word per row over this rank's vocabulary rows. Twin: `tpsample.torch_backend`.

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
        self._logits = LogitsBuffer(len(shard), weight.device)
        slots, device = exchange.max_rows, weight.device
        self._num_sms = 0
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        # A batch tile may reach past the last row, by less than its own size.
        padded = slots + MAX_BLOCK_B
        self._streams = torch.zeros(4, padded, dtype=torch.int32, device=device)
        self._scale = torch.ones(padded, dtype=torch.float32, device=device)

    def begin(
        self, hidden_states: Tensor, batch: SamplingBatch, positions: Tensor, num_samples: int
    ) -> None:
        """Take the inputs of a step."""
        self._hidden_states, self._num_samples = hidden_states, num_samples
        self._batch, self._positions = batch, positions
        self._stored = self._logits.take(len(batch.host_stored))
        self._exchange.begin()

    def run(self, part: int, words: Tensor) -> None:
        """Leave the part's best words in `words` [num_samples · B], sample-major.

        A part is a chunk; or all chunks at once, `words` being those of the first, if the
        exchange works in the kernel.
        """
        num_rows, hidden_size = self._hidden_states.shape
        tile = self._tile or (
            interpreter_tile(num_rows, hidden_size)
            if INTERPRET
            else tile_for(num_rows, len(self._shard), self._num_sms, self._weight.dtype)
        )
        start, stop = self._shard.start, self._shard.stop
        num_tiles = triton.cdiv(stop - start // 4 * 4, tile.block_v) if stop > start else 0
        if self._exchange.in_kernel:
            num_tiles = max(num_tiles, self._exchange.chunks)
        parts = self._exchange.parts
        first, last = (num_tiles * p // parts for p in (part, part + 1))
        if first == last:
            return
        stores = self._batch.stored is not None
        lm_head_kernel[((last - first) * triton.cdiv(num_rows, tile.block_b),)](
            hidden_ptr=self._hidden_states,
            stride_hidden_b=self._hidden_states.stride(0),
            weight_ptr=self._weight,
            stride_weight_v=self._weight.stride(0),
            bias_ptr=self._weight if self._bias is None else self._bias,
            seed_ptr=self._batch.seed,
            position_ptr=self._positions,
            temperature_ptr=self._batch.temperature,
            stream_ptr=self._streams,
            stride_stream=self._streams.stride(0),
            scale_ptr=self._scale,
            slot_ptr=self._batch.stored_slot if stores else self._streams,
            logits_ptr=self._stored if stores else self._scale,
            stride_logits_b=self._stored.stride(0),
            words_ptr=words,
            num_rows=num_rows,
            num_samples=self._num_samples,
            vocab_start=start,
            vocab_stop=stop,
            first_tile=first,
            num_tiles=num_tiles,
            logit_scale=float(self._head.logit_scale),
            logit_softcap=float(self._head.logit_softcap or 1.0),
            HAS_SCALE=self._head.logit_scale != 1.0,
            HAS_SOFTCAP=self._head.logit_softcap is not None,
            HAS_BIAS=self._bias is not None,
            STORE_LOGITS=stores,
            MANY_SAMPLES=self._num_samples > 1,
            ROUNDS=self._rounds,
            INTERPRET=INTERPRET,
            HIDDEN_SIZE=hidden_size,
            BLOCK_V=tile.block_v,
            BLOCK_B=tile.block_b,
            BLOCK_D=tile.block_d,
            BLOCK_E=tile.block_e(self._num_samples > 1),
            **self._exchange.kernel_arguments(),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
        )

    def stored_rows(self) -> StoredRows:
        """The logits of `batch.stored`, after the last `run` of a step."""
        noise = RowNoise.of(self._batch, self._positions, self._num_samples, self._rounds)
        return StoredRows.of(self._stored, self._batch, noise, first_id=self._shard.start)

    def decode(self, words: Tensor, out: SampleOutput) -> None:
        """Write tokens and status of the winners of `words` [sources, num_samples · B], and zero
        those."""
        num_rows = out.status.shape[0]
        finish_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
            words_ptr=words,
            stride_words_s=words.stride(0),
            token_ptr=out.token_ids,
            status_ptr=out.status,
            num_rows=num_rows,
            num_samples=self._num_samples,
            num_sources=words.shape[0],
            BLOCK=ROW_BLOCK,
        )
