"""The rows of a batch in a step inside torch.compile, with the tensors that its graph passes."""

from __future__ import annotations

from torch import Tensor

from tpsample.core.tensors import readable
from tpsample.request.batch import SamplingBatch
from tpsample.request.moving_on import Mask
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step_batch import StepBatch


class GraphRows(StepBatch):
    """All rows of a batch, whose numbers and masks a graph may have computed before the step.

    Args:
        batch: whose rows they are.
        temperature, seed: as of the batch.
        masks: those that bind the rows, by name.
    """

    def __init__(
        self, batch: SamplingBatch, temperature: Tensor, seed: Tensor, masks: dict[str, Tensor]
    ) -> None:
        super().__init__(batch._table, batch._options, batch._moving)
        self._batch, self.rows = batch, batch.rows
        self._numbers = temperature, seed
        version = batch._table.version
        self._assigned = {name: Mask(mask, version) for name, mask in masks.items()}

    @property
    def temperature(self) -> Tensor:
        """fp32 [B]."""
        return self._numbers[0]

    @property
    def seed(self) -> Tensor:
        """int64 [B], 64 bits."""
        return self._numbers[1]

    @property
    def plan(self) -> BatchPlan:
        """The plan of the batch, on a GPU for fixed rounds. A step in fixed rounds never waits for
        the GPU, as a captured step may not."""
        plan = self._batch.plan
        return plan if readable(self.device) else plan.in_fixed_rounds

    def _for_rows(self, num_rows: int, masked_rows: int | None = None) -> GraphRows:
        self._batch._for_rows(num_rows)
        if masked_rows is not None:
            self._check_masks(masked_rows)
        return self

    def _read(self, times: int = 1) -> BatchView:
        assert times == 1  # a verification is no operator
        return BatchView(self.temperature, self.seed, self.plan, self._controls())

    def _state_slots(self) -> Tensor:
        return self._batch._state_slots()
