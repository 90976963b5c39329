"""The interface of the local step: hidden states in, this rank's best word per row out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tpsample.backends.screening.int8_copy import Int8Copy
from tpsample.core.row_noise import RowNoise
from tpsample.core.tensors import Scratch
from tpsample.output import SampleOutput
from tpsample.request.controls.apply import ControlRows, StepControls
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step import Found, Push, Step, rows_of_memory
from tpsample.request.step_batch import StepBatch
from tpsample.settings import Settings


class Backend(ABC):
    """Computes the words of a rank's shard. Only the logits of stored rows are written to memory.

    Args:
        settings: the settings of the sampler. Rows of the weight after the shard are never read.

    Attributes:
        copy: the 8-bit copy of the weight that screened steps read; None if there is none.
    """

    copy: Int8Copy | None = None

    def __init__(self, settings: Settings) -> None:
        self._weight, self._shard, self._bias = settings.weight, settings.shard, settings.bias
        self._head = settings.head
        self._num_ids = len(self._shard)
        self._scratch = Scratch(settings.device)

    def rebind_weight(self, weight: Tensor | None) -> None:
        """Follow weight and bias, which have moved in memory with equal shapes, dtypes and strides.

        A backend drops what depends on their addresses. The 8-bit copy waits for `refresh`.

        Args:
            weight: the caller's tensor, whose changes torch counts; None if only the bias moved.
        """
        if self.copy is not None and weight is not None:
            self.copy.rebind_weight(weight[: self._num_ids])

    def compile_ahead(self) -> None:  # noqa: B027 (most backends compile where they step)
        """Compile the kernels of steps, as far as they are known before a step is taken."""

    def refresh(self) -> None:
        """Make the copy anew, of the weight as it is now."""
        if self.copy is not None:
            self.copy.refresh()

    def prepare(
        self,
        hidden_states: Tensor,
        batch: BatchView,
        positions: Tensor,
        num_samples: int,
        out: SampleOutput | None = None,
        local_logits: Tensor | None = None,
    ) -> Step:
        """Make the step of these inputs.

        A step without samples only stores logits. It has its own memory, because another step may
        be between its start and its finish.
        """
        controls = logits = found = None
        if batch.controls is not None and batch.rows:
            controls = self.controls_of(batch.controls)
        if batch.plan.stored_index is not None:
            num_rows = rows_of_memory(len(batch.plan.stored_list), controls is not None)
            name = "logits" if num_samples else "logits of a step that only stores"
            logits = self._scratch.take(name, torch.float32, num_rows, self._num_ids)
            if local_logits is None:
                found = self.memory_of_found(batch.plan, num_samples)
        noise = RowNoise(batch.temperature, batch.seed, positions, num_samples)
        return Step(hidden_states, batch, noise, controls, logits, out, local_logits, found)

    def memory_of_found(self, plan: BatchPlan, num_samples: int) -> Found | None:
        """Return memory of zeros for `Step.found`, if the backend finds more than logits."""
        return None

    def read_slots(self, batch: StepBatch) -> None:
        """Let a batch read the slots that its rows name, for a step that begins now."""
        batch._read_slots()

    def controls_of(self, rows: ControlRows) -> StepControls:
        """Return the controls of a step's rows over the shard."""
        return StepControls.of(rows, self._shard)

    @abstractmethod
    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        """Write the best words of one of `parts` parts of the shard into `words`.

        Args:
            words: int64 [num_samples · B], zeros, sample-major.
            push: arguments by which the kernel writes every chunk to the peers itself. There is one
                part then, and `words` are those of the first chunk.
        """
