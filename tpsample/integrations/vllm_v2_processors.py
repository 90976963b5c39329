"""Custom logits processors of vLLM's runner V2, on the columns of a shard.

A processor changes logits [rows, V] by absolute ids, after penalties and masks. A rank has its own
columns alone, so it shows every row twice: once with the smallest number in the columns of other
ranks, and once with a very large one. A logit that depends on itself and on its id comes out the
same both times. If one depends on others, as with a softmax or a maximum, its processor is refused
by name. One rank has all columns, and shows each row once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.request.controls.apply import StepControls
from tpsample.request.plan import BatchView
from tpsample.request.step_batch import StepBatch
from tpsample.sampler import LMHeadSampler

_FILLS = (-torch.inf, 1e30)
"""In the columns of other ranks."""
_OF_VLLM = "vllm.v1.worker.gpu.sample."


def custom_processors(own: Any) -> list[Any]:
    """Return the processors of vLLM's `Sampler` that are not vLLM's."""
    return [
        processor
        for processor in own.logits_processors
        if not type(processor).__module__.startswith(_OF_VLLM)
    ]


class V2Processors(Sealed):
    """The custom processors of one runner on one rank.

    Args:
        own: vLLM's `Sampler`, which lets requests into its processors.
        context: vLLM's `LogitsContext`.
        sampler: of this rank.
    """

    def __init__(self, own: Any, context: Callable[..., Any], sampler: LMHeadSampler) -> None:
        self._own, self._context, self._sampler = own, context, sampler
        self._processors = custom_processors(own)

    def apply(
        self, local_logits: Tensor, batch: StepBatch, input_batch: Any
    ) -> tuple[Tensor, StepBatch | BatchView]:
        """Return logits after controls and processors, and the rows without their controls.

        Collective, because requests without a seed get theirs.

        Args:
            local_logits: [B, n], whose first columns are those of the shard.
        """
        if not np.any(self._own.needs_logits_processing[input_batch.idx_mapping_np]):
            return local_logits, batch
        self._sampler.draw_seeds(batch)
        view, shard = batch._view_of(len(local_logits)), self._sampler.shard
        logits = local_logits[:, : len(shard)].float()
        if view.controls is not None:
            logits = StepControls.of(view.controls, shard).apply(logits, shard.start)
        return self._processed(logits, input_batch), view._replace(controls=None)

    def _processed(self, logits: Tensor, input_batch: Any) -> Tensor:
        """Return the shard's columns after every processor.

        Raises:
            RuntimeError: a processor looks at the logits of other ranks.
        """
        indices, shard, size = (
            input_batch.logits_indices,
            self._sampler.shard,
            self._sampler.vocab_size,
        )
        columns, fills = slice(shard.start, shard.stop), _FILLS[: 1 + (len(shard) < size)]
        rows = {
            "expanded_idx_mapping": input_batch.expanded_idx_mapping,
            "idx_mapping": input_batch.idx_mapping,
            "idx_mapping_np": input_batch.idx_mapping_np,
            "expanded_local_pos": input_batch.expanded_local_pos,
            "input_ids": input_batch.input_ids[indices],
            "pos": input_batch.positions[indices],
            "seq_lens_upper_bound_np": input_batch.seq_lens_cpu_upper_bound.numpy(),
        }
        repeated = {
            name: np.concatenate([values] * len(fills))
            if isinstance(values, np.ndarray)
            else torch.cat([values] * len(fills))
            for name, values in rows.items()
        }
        shown = torch.cat([logits.new_full((len(logits), size), fill) for fill in fills])
        shown[:, columns] = logits.repeat(len(fills), 1)
        for processor in self._processors:
            shown = processor.apply(shown, self._context(**repeated))
            one, *others = shown[:, columns].chunk(len(fills))
            if any(((one != other) & ~(one.isnan() & other.isnan())).any() for other in others):
                raise RuntimeError(
                    f"--logits-processors: {type(processor).__qualname__} computes a logit from "
                    "those of other ids, and those of other ranks are not here; serve it with "
                    "--tensor-parallel-size 1, or without tpsample"
                )
        return one.contiguous()
