"""The local step of a CPU in native kernels (`tpsample.native`): the words of `TorchBackend`.

A step has up to four kinds of rows, each of which takes one reading of the weights:

    plain      no filters, no logprobs         `draw`
    bounded    top_k up to 256 or min_p        `list_kept`    see `RowFilter.is_bounded`
    whole      they need all of their logits   `store`
    given      the caller computed the logits  `draw_given`, `store_given`

The threads of PyTorch (`torch.get_num_threads`) share the ids of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsample.core.row_noise import safe_temperature
from tpsample.core.score import Head
from tpsample.core.vocab_shard import VocabShard
from tpsample.local.backend import Backend
from tpsample.native import head as native_head
from tpsample.native.compiling import call
from tpsample.native.lm_head import (
    Rows,
    Weight,
    draw,
    draw_given,
    list_kept,
    merge,
    store,
    store_given,
    take_rows,
)
from tpsample.native.noise import row_noise
from tpsample.native.products import Copy, quantise_rows
from tpsample.native.threads import in_ranges, threads_for
from tpsample.request.controls.apply import StepControls
from tpsample.request.filters import row_bounds
from tpsample.request.step import Push, Step
from tpsample.screening.int8_copy import BLOCKS, Int8Copy

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}
"""How a native kernel reads a dtype; see `as_fp32`."""

COPY_ROWS = 2
"""Most rows of a step for which reading the 8-bit copy first is faster than reading the weights."""


def _empty(dtype: type, *shape: int) -> np.ndarray:
    return np.empty((0, *shape), dtype)


NO_CONTROLS = (
    0,
    _empty(np.int64),
    _empty(np.int32, 1),
    _empty(np.float32, 1),
    _empty(np.int32, 1),
    _empty(np.float32, 3),
    _empty(np.int32, 1),
    _empty(np.int32),
)
NO_HEAD = native_head.Head(np.float32(1), np.float32(0), _empty(np.float32), *NO_CONTROLS)
NO_COPY = Copy(
    _empty(np.int8),
    _empty(np.float32),
    _empty(np.float32),
    _empty(np.float32, BLOCKS),
    _empty(np.int16, 1),
    _empty(np.float64),
    _empty(np.float64, BLOCKS),
    _empty(np.float64),
)


class NativeBackend(Backend):
    """The words in native kernels.

    Args:
        max_rows: most rows × samples of a step.
        copy: the 8-bit copy of the weight, with screening.
    """

    def __init__(
        self,
        weight: Tensor,
        shard: VocabShard,
        bias: Tensor | None,
        head: Head,
        *,
        rounds: int,
        max_rows: int,
        copy: Int8Copy | None = None,
    ) -> None:
        super().__init__(weight, shard, bias, head, rounds=rounds)
        self.copy = copy
        hidden_size = weight.shape[1]
        self._numbers: tuple[np.ndarray, int] | None = None
        self._factors = np.float32(head.logit_scale), np.float32(head.logit_softcap or 0.0)
        self._index = np.arange(max_rows)
        self._hidden = np.empty((max_rows + 3, hidden_size), np.float32)
        self._norms = np.empty(max_rows, np.float64)
        self._scale, self._random = np.empty((2, max_rows), np.float32)
        self._streams = np.empty(3 * max_rows, np.uint32)
        self._memory_of_threads = np.zeros(0, np.int64)
        if copy is not None:
            self._quantised = (
                np.empty((COPY_ROWS, hidden_size), np.int16),
                np.empty(COPY_ROWS),
                np.empty((COPY_ROWS, BLOCKS)),
                np.empty(COPY_ROWS),
            )

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        assert push is None, "native kernels write to no peer"
        num_ids, plan, samples = len(self._shard), step.batch.plan, step.noise.num_samples
        start, stop = num_ids * part // parts, num_ids * (part + 1) // parts
        num_rows, given = step.batch.rows, step.local_logits
        if start == stop or not num_rows:
            return
        best = words.numpy().reshape(samples, num_rows)
        head = self._head_of(step.controls, given=given is not None)
        numbers = self._weights() if given is None else _flat(given)
        source = Weight(*numbers, self._shard.start, start, stop)
        draw_plain = self._draw if given is None else self._draw_given
        if plan.stored_index is None:
            every = self._index[:num_rows]
            draw_plain(step, source, every, every, head, best)
            return
        plain, bounded, bounded_places, whole, whole_places, drawn, drawn_places = (
            rows.numpy() for rows in plan.kinds
        )
        raw, processed = self._memory(step)
        if len(plain) and samples:
            draw_plain(step, source, plain, plain, head, best)
        if given is not None:
            for index, places in ((bounded, bounded_places), (whole, whole_places)):
                rows = self._rows(step, index, 0)
                sources = index, places, head, raw, processed
                self._in_ranges(store_given, source, len(index), (rows, *sources))
        else:
            if len(whole):
                rows = self._rows(step, whole, 0, hidden_states=step.hidden_states)
                memory = whole_places, head, raw, processed
                self._in_ranges(store, source, len(whole), (rows, *memory))
            if len(bounded):
                self._list(step, source, bounded, bounded_places, head)
        if len(drawn) and samples:
            logits = processed if len(processed) else raw
            stored = Weight(logits.reshape(-1), num_ids, self._shard.start, start, stop)
            self._draw_given(step, stored, drawn, drawn_places, NO_HEAD, best)

    def _draw(
        self,
        step: Step,
        source: Weight,
        index: np.ndarray,
        _: np.ndarray,
        head: native_head.Head,
        best: np.ndarray,
    ) -> None:
        """Draw rows of which nothing is stored."""
        rows = self._rows(step, index, len(best), hidden_states=step.hidden_states)
        threads = self._threads(source, len(index))
        found, computed = self._found(threads, len(best), len(index))
        arguments = self._copy_of(rows), rows, head
        self._in_ranges(draw, source, len(index), arguments, found, computed)
        call(merge, None, found, index, best)

    def _draw_given(
        self,
        step: Step,
        source: Weight,
        index: np.ndarray,
        sources: np.ndarray,
        head: native_head.Head,
        best: np.ndarray,
    ) -> None:
        """Draw rows whose logits are there already, in these rows of the source."""
        rows = self._rows(step, index, len(best))
        threads = self._threads(source, len(index))
        found, _ = self._found(threads, len(best), len(index))
        self._in_ranges(draw_given, source, len(index), (rows, sources, head), found)
        call(merge, None, found, index, best)

    def _list(
        self,
        step: Step,
        source: Weight,
        index: np.ndarray,
        places: np.ndarray,
        head: native_head.Head,
    ) -> None:
        """Store what the filters of bounded rows can keep."""
        filters = step.batch.plan.filters
        assert filters is not None
        # The stored rows begin with the filtered ones, in the same order.
        top_k, log_min_p = (
            each[torch.from_numpy(places)] for each in row_bounds(filters, step.batch.vocab_size)
        )
        heat = safe_temperature(step.batch.temperature[torch.from_numpy(index)])[0]
        bounds = top_k.numpy(), (heat.double() * log_min_p).numpy()
        rows = self._rows(step, index, 0, hidden_states=step.hidden_states)
        computed = self._found(self._threads(source, len(index)), 0, len(index))[1]
        arguments = rows, places, head, *bounds, *self._memory(step)
        self._in_ranges(list_kept, source, len(index), arguments, computed)

    def _threads(self, source: Weight, num_rows: int) -> int:
        """Return among how many threads the ids are worth sharing."""
        num_ids = source.stop - source.start
        return threads_for(num_ids * num_rows * max(16, self._weight.shape[1]))

    def _found(self, threads: int, samples: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return zeros: int64 [threads, samples, R] best words and [threads, 2, R] counts."""
        size = threads * num_rows
        if len(self._memory_of_threads) < size * (samples + 2):
            self._memory_of_threads = np.zeros(size * (samples + 2), np.int64)
        memory = self._memory_of_threads[: size * (samples + 2)]
        memory[:] = 0
        found, computed = memory[: size * samples], memory[size * samples :]
        return found.reshape(threads, samples, num_rows), computed.reshape(threads, 2, num_rows)

    def _in_ranges(
        self, kernel: Any, source: Weight, num_rows: int, arguments: tuple, *outputs: np.ndarray
    ) -> None:
        """Call a kernel for one range of ids per thread, with the thread's part of each output."""

        def of_range(first: int, last: int, thread: int) -> tuple:
            part = source._replace(start=first, stop=last)
            return (part, *arguments, *(each[thread] for each in outputs))

        threads, kind = self._threads(source, num_rows), source.numbers.dtype.num
        in_ranges(kernel, kind, source.start, source.stop, threads, of_range)

    def _rows(
        self, step: Step, index: np.ndarray, samples: int, *, hidden_states: Tensor | None = None
    ) -> Rows:
        """Return what the kernels need of some rows; without hidden states what draws need."""
        num_rows = len(index)
        streams = self._streams[: 3 * samples * num_rows].reshape(samples, num_rows, 3)
        scale, random = self._scale[:num_rows], self._random[:num_rows]
        if samples:
            noise = step.noise
            row_noise(
                noise.temperature.numpy(), noise.seed.numpy(), noise.positions.numpy(), index,
                samples, scale, random, streams,
            )  # fmt: skip
        padded = 1 if num_rows == 1 else num_rows + -num_rows % 4
        hidden, norms = self._hidden[:padded], self._norms[:num_rows]
        if hidden_states is not None:
            take_rows(hidden_states.float().contiguous().numpy(), index, hidden, norms)
        return Rows(index, hidden, norms, scale, random, streams, samples, self._rounds)

    def _copy_of(self, rows: Rows) -> Copy:
        """Return the 8-bit copy, if it is worth reading first."""
        copy, num_rows = self.copy, len(rows.index)
        if copy is None or num_rows > COPY_ROWS:
            return NO_COPY
        of_rows = [each[:num_rows] for each in self._quantised]
        quantise_rows(rows.hidden, num_rows, *of_rows)
        tensors = copy.quantised.view(-1), copy.scale, copy.norm, copy.residual
        return Copy(*(tensor.numpy() for tensor in tensors), *of_rows)

    def follow(self) -> None:
        super().follow()
        self._numbers = None

    def _weights(self) -> tuple[np.ndarray, int]:
        """Return the shard's weights, as `_flat` does."""
        if self._numbers is None:
            self._numbers = _flat(self._weight[: len(self._shard)])
        return self._numbers

    def _memory(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Return where raw and processed logits are stored; the latter only with controls."""
        assert step.logits is not None
        memory, count = step.logits.numpy(), len(step.batch.plan.stored_list)
        return memory[:count], memory[count:]

    def _head_of(self, controls: StepControls | None, *, given: bool) -> native_head.Head:
        """Return how products become logits; of given logits only the controls are left."""
        scale, cap, bias = NO_HEAD[:3]
        if not given:
            (scale, cap), added = self._factors, self._bias
            bias = NO_HEAD.bias if added is None else added.float().contiguous().numpy()
        if controls is None:
            return native_head.Head(scale, cap, bias, *NO_CONTROLS)
        rows, state, none = controls.rows, controls.state, NO_HEAD
        tables, drafts = rows.tables, rows.drafts
        return native_head.Head(
            scale,
            cap,
            bias,
            self._shard.start - state.first_id,
            rows.slots.numpy(),
            none.mask if controls.mask is None else controls.mask.numpy(),
            state.bias.numpy() if tables.has_bias else none.token_bias,
            state.history.numpy() if tables.has_penalties else none.history,
            tables.penalties.numpy(),
            none.drafts if drafts is None else drafts.numpy(),
            none.num_drafts if rows.num_drafts is None else rows.num_drafts.numpy(),
        )


def _flat(numbers: Tensor) -> tuple[np.ndarray, int]:
    """Return [n, m] numbers in flat memory, as `as_fp32` reads them, and the step between rows."""
    num_rows, num_columns = numbers.shape
    stride = numbers.stride(0) if num_rows > 1 else num_columns
    length = (num_rows - 1) * stride + num_columns if num_rows else 0
    return numbers.as_strided((length,), (1,)).view(BITS[numbers.dtype]).numpy(), stride
