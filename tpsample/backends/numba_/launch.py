"""The local step of a CPU in native kernels: the words of `TorchBackend`.

A step has up to five kinds of rows (`.row_kinds`). The weights are read once for each kind:

    plain      no filters, no logprobs         `draw`
    bounded    few logits decide               `list_kept`, `store_first`
    rough      bounds of logits decide         `draw`, which stores upper bounds of the logits
    whole      all logits are needed           `store`
    given      the caller computed the logits  `draw_given`, `store_given`

The threads of PyTorch (`torch.get_num_threads`) share the ids of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsample.backends.backend import Backend
from tpsample.backends.numba_.kernels import head as native
from tpsample.backends.numba_.kernels.arrays import NONE, array_of
from tpsample.backends.numba_.kernels.byte_dots import HAS_VNNI
from tpsample.backends.numba_.kernels.compiled_ahead import load_all
from tpsample.backends.numba_.kernels.draw import BOUNDED_ENDS, ENDS, draw, draw_given
from tpsample.backends.numba_.kernels.first_logits import store_first
from tpsample.backends.numba_.kernels.inputs import Memory, Weight, weight_of
from tpsample.backends.numba_.kernels.int8 import Copy
from tpsample.backends.numba_.kernels.noise import draws_of
from tpsample.backends.numba_.kernels.store import PAIR, list_kept, store, store_given
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.backends.numba_.row_kinds import kinds_of
from tpsample.backends.screening.int8_copy import BLOCK, GROUP, Int8Copy
from tpsample.core.word import KEY_MINUS_INF, TOKEN_BITS, TOKEN_MASK
from tpsample.request.controls.apply import StepControls
from tpsample.request.plan import BatchPlan
from tpsample.request.step import Found, Push, Step, raw_and_processed
from tpsample.settings import Settings

COPY_ROWS = 2
"""Most rows for which a processor without 8-bit products (`byte_dots`) reads the 8-bit copy first.
So few rows wait for memory."""
HEAPED = 64
"""Largest top_k whose tokens are kept in a heap while the weights are read."""
NOTHING_STORED = NONE, NONE, NONE.astype(np.float64)
"""The arguments with which `draw` finds words alone."""


class NativeBackend(Backend):
    """The words in native kernels."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.screening is not None:
            self.copy = Int8Copy(self._weight[: self._num_ids], lane=self._shard.start % BLOCK)
        self._numbers: Weight | None = None
        self._address = 0

    def memory_of_found(self, plan: BatchPlan, num_samples: int) -> Found | None:
        kinds = kinds_of(plan)
        if not kinds.bounded and not kinds.rough:
            return None
        listed = (k for k in kinds.most.tolist() if k <= HEAPED)
        count = max([1, *listed, *(demand.first for demand in kinds.rough.values())])
        shape = torch.get_num_threads(), len(plan.stored_list)
        first = self._scratch.take("first words", torch.int64, *shape, count).zero_()
        of_rough = *shape, num_samples, kinds.num_best
        best = self._scratch.take("best words", torch.int64, *of_rough).zero_()
        error_bound = self._scratch.take("error_bound", torch.float32, shape[1]).zero_()
        assert plan.stored_index is not None
        store = self._store_logits if kinds.rough else None
        return Found(first, best, error_bound, plan.stored_index, store)

    def compile_ahead(self) -> None:
        load_all(self._weight, screened=self.copy is not None)

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        assert push is None, "native kernels write to no peer"
        num_ids, plan, first_id = self._num_ids, step.batch.plan, self._shard.start
        start, stop = num_ids * part // parts, num_ids * (part + 1) // parts
        given, num_rows = step.local_logits is not None, len(step.batch.seed)
        if start == stop or not num_rows:
            return
        best = array_of(words.view(step.noise.num_samples, num_rows))
        if step.local_logits is None:
            source = self._source(start, stop)
        else:
            source = weight_of(step.local_logits, first_id, start, stop)
        head = self._head_of(step.controls, given=given)
        if plan.stored_index is None:
            plain = np.arange(num_rows)
            self._draw(step, source, plain, plain if given else None, head, best)
            return
        kinds = kinds_of(plan)
        assert step.logits is not None
        kept = raw_and_processed(step.logits, len(plan.stored_list))
        raw, processed = map(array_of, kept)
        self._draw(step, source, kinds.plain, kinds.plain if given else None, head, best)
        for which, (index, places) in (
            (self._list, kinds.bounded_rows),
            (self._draw_roughly, kinds.rough_rows),
            (self._store, kinds.whole_rows),
        ):
            if not len(index):
                continue
            memory = Memory(places, raw, processed)
            if given:
                self._run(store_given, source, len(index), index, index, head, memory)
            else:
                which(step, source, index, head, memory)
        if len(kinds.drawn_rows.rows):
            stored = weight_of(kept[1] if len(processed) else kept[0], first_id, start, stop)
            self._draw(step, stored, *kinds.drawn_rows, native.NativeHead(), best)

    def _store_logits(
        self, step: Step, rows: Tensor, stored_rows: Tensor, raw: Tensor, processed: Tensor
    ) -> None:
        """Replace upper bounds by exact logits; see `Found.store`."""
        plan, index, source = step.batch.plan, array_of(rows), self._source(0, self._num_ids)
        head = self._head_of(step.controls, given=False)
        memory = Memory(array_of(stored_rows), array_of(raw), array_of(processed))
        rough = kinds_of(plan).rough
        demands = [rough[plan.stored_list.index(row)] for row in index.tolist()]
        most = np.array([demand.most for demand in demands], np.int64)
        least = np.array([demand.least for demand in demands])
        no_words = np.zeros((self._threads(source, len(index)), len(raw), 1), np.int64)
        self._list_or_store(step, source, index, head, memory, most, least, no_words)

    def _source(self, start: int, stop: int) -> Weight:
        """Return a range of the weight at its present address."""
        if self._numbers is None or self._address != self._weight.data_ptr():
            weight = self._weight[: self._num_ids]
            self._numbers = weight_of(weight, self._shard.start, start, stop)
            self._address = weight.data_ptr()
        if (self._numbers.start, self._numbers.stop) != (start, stop):
            self._numbers = self._numbers._replace(start=start, stop=stop)
        return self._numbers

    def _draw(
        self,
        step: Step,
        source: Weight,
        index: np.ndarray,
        sources: np.ndarray | None,
        head: native.NativeHead,
        best: np.ndarray,
    ) -> None:
        """Merge the best words of some rows into `best`, int64 [samples, B].

        Args:
            sources: the rows of `source` if these are logits; None for a weight.
        """
        samples, num_rows = len(best), len(index)
        if not samples or not num_rows:
            return
        threads = self._threads(source, num_rows)
        # The word of a range whose ids are all masked is that of its first id.
        empty = KEY_MINUS_INF << TOKEN_BITS | TOKEN_MASK - (source.first_id + source.start)
        words_of_threads = np.full((threads, num_rows, samples, 1), empty)
        if sources is None:
            nothing = np.empty((threads, 0, 1), np.int64), np.empty((threads, 0), np.float32)
            copy = None
            if self.copy is not None and (HAS_VNNI or num_rows <= COPY_ROWS):
                copy = copy_of(self.copy, self._shard.start)
            memory = Memory(np.arange(num_rows))
            outputs = words_of_threads, *nothing
            self._run_draw(step, source, index, head, memory, NOTHING_STORED, outputs, copy)
        else:
            rows = index, sources, draws_of(step.noise), head, NONE, False
            self._run(draw_given, source, num_rows, *rows, outputs=(words_of_threads,))
        words = words_of_threads[0] if threads == 1 else words_of_threads.max(axis=0)
        batch_rows = index if step.batch.plan.stored_index is not None else slice(None)
        best[:, batch_rows] = np.maximum(best[:, batch_rows], words[:, :, 0].T)

    def _draw_roughly(
        self, step: Step, source: Weight, index: np.ndarray, head: native.NativeHead, memory: Memory
    ) -> None:
        """Store upper bounds of the logits of rough rows, and find their best words."""
        assert step.found is not None
        threads = self._threads(source, len(index))
        first, best, error_bound = map(array_of, step.found[:3])
        of_threads = error_bound[None]
        if threads > 1:
            of_threads = np.zeros((threads, len(error_bound)), np.float32)
        plan = step.batch.plan
        counted, demands = plan.kept_cap is not None, kinds_of(plan).rough.values()
        listed = np.array([max(1, demand.first) for demand in demands])
        storing = [BOUNDED_ENDS * demand.weighed or ENDS * counted for demand in demands]
        least = np.array([demand.least for demand in demands])
        of_rows = listed, np.array(storing), least
        outputs = best[:threads], first[:threads], of_threads
        self._run_draw(step, source, index, head, memory, of_rows, outputs)
        if threads > 1:
            np.maximum(error_bound, of_threads.max(axis=0), out=error_bound)

    def _run_draw(
        self,
        step: Step,
        source: Weight,
        index: np.ndarray,
        head: native.NativeHead,
        memory: Memory,
        of_rows: tuple[np.ndarray, np.ndarray, np.ndarray],
        outputs: tuple[np.ndarray, ...],
        copy: Copy | None = None,
    ) -> None:
        computed = np.zeros((len(outputs[0]), 2, len(index)), np.int64)
        rows = hidden_of(step), index, copy, draws_of(step.noise), head, memory, *of_rows
        self._run(draw, source, len(index), *rows, outputs=(*outputs, computed))

    def _list(
        self, step: Step, source: Weight, index: np.ndarray, head: native.NativeHead, memory: Memory
    ) -> None:
        """Store the logits that the filters of bounded rows can keep.

        A row may be greedy only because a temperature was written. It then reports logprobs of all
        ids, so all of its logits are stored.
        """
        kinds, threads = kinds_of(step.batch.plan), self._threads(source, len(index))
        most, least = kinds.most, kinds.least
        logprob_rows = step.batch.plan.logprobs
        if logprob_rows is not None:
            is_greedy = ~array_of(step.noise.random)[index, 0]
            whole = is_greedy & np.isin(index, logprob_rows.row_list)
            most, least = np.where(whole, 0, most), np.where(whole, -np.inf, least)
        assert step.found is not None
        first = array_of(step.found.first)[:threads]
        self._list_or_store(step, source, index, head, memory, most, least, first)

    def _list_or_store(
        self,
        step: Step,
        source: Weight,
        index: np.ndarray,
        head: native.NativeHead,
        memory: Memory,
        most: np.ndarray,
        least: np.ndarray,
        first: np.ndarray,
    ) -> None:
        """Store the logits that a top_k or a min_p of these rows can keep, and -inf for the others.

        All logits are stored where that is cheaper. For a top_k above HEAPED upper bounds of all
        logits are stored first.

        Args:
            most: int64 [R], the top_k, 0 without.
            least: float64 [R], the y of `Demand.least`.
            first: int64 [threads, stored rows, count], takes the first `most` order words up to
                HEAPED.
        """
        work = PAIR * self._threads(source, len(index)) * most
        most = np.where((most > HEAPED) & (work > source.stop - source.start), 0, most)
        whole, many = (most == 0) & (least == -np.inf), most > HEAPED
        temperature = array_of(step.noise.temperature.contiguous())
        for kernel, rows in ((list_kept, ~whole & ~many), (store_first, many), (store, whole)):
            if not rows.any():
                continue
            part, of_rows = memory._replace(stored_rows=memory.stored_rows[rows]), index[rows]
            if kernel is store:
                self._store(step, source, of_rows, head, part)
                continue
            outputs = (first,) if kernel is list_kept else ()
            threads = len(first) if outputs else self._threads(source, len(of_rows))
            computed = np.zeros((threads, 2, len(of_rows)), np.int64)
            given = hidden_of(step), of_rows, head, part, most[rows], temperature, least[rows]
            self._run(kernel, source, len(of_rows), *given, outputs=(*outputs, computed))

    def _store(
        self, step: Step, source: Weight, index: np.ndarray, head: native.NativeHead, memory: Memory
    ) -> None:
        """Store all logits of some rows."""
        self._run(store, source, len(index), hidden_of(step), index, head, memory)

    def _threads(self, source: Weight, num_rows: int) -> int:
        """Return among how many threads the ids are worth sharing."""
        num_ids = source.stop - source.start
        return threads_for(num_ids * num_rows * max(16, self._weight.shape[1]))

    def _run(
        self,
        kernel: Callable[..., Any],
        source: Weight,
        num_rows: int,
        *arguments: Any,
        outputs: tuple[np.ndarray, ...] = (),
    ) -> None:
        """Call a kernel once per thread, for a part of the ids and with a part of each output.

        `num_rows` is at least 1, because a kernel's memory has room for at least one row.
        """
        parts = len(outputs[0]) if outputs else self._threads(source, num_rows)
        in_ranges(kernel, source.start, source.stop, parts, source, *arguments, *outputs)

    def _head_of(self, controls: StepControls | None, *, given: bool) -> native.NativeHead:
        """Return how products become logits; of given logits only the controls are left."""
        fields: dict[str, Any] = {}
        if not given:
            fields["logit_scale"] = np.float32(self._head.logit_scale)
            fields["logit_softcap"] = np.float32(self._head.logit_softcap or 0.0)
            if self._bias is not None:
                fields["bias"] = array_of(self._bias.float().contiguous())
        if controls is not None:
            rows, state = controls.rows, controls.state
            fields["first_column"] = self._shard.start - state.first_id
            tensors = {
                "slots": rows.slots,
                "wants": rows.tables.wants,
                "mask": controls.mask,
                "token_bias": state.bias if rows.tables.has_bias else None,
                "history": state.history if rows.tables.has_penalties else None,
                "touched": state.touched,
                "penalties": rows.tables.penalties,
                "drafts": rows.drafts,
                "num_drafts": rows.num_drafts,
            }
            fields |= {name: array_of(of) for name, of in tensors.items() if of is not None}
        return native.NativeHead(**fields)


def hidden_of(step: Step) -> np.ndarray:
    """Return the hidden states of a step, [B, D], as kernels read their dtype."""
    return array_of(step.hidden_states.contiguous())


def copy_of(copy: Int8Copy, first_id: int) -> Copy:
    """Return what kernels take of an 8-bit copy in blocks, of a shard that starts at an id."""
    assert copy.lane is not None
    numbers, width = array_of(copy.quantised.view(-1)), copy.quantised.shape[1] * GROUP
    scale, norm, residual = map(array_of, (copy.scale, copy.norm, copy.residual_norm))
    return Copy(numbers, scale, norm, residual, first_id - copy.lane, width)
