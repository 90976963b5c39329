"""What screening did in the steps of a run, for the table of `tpsample generate`."""

from __future__ import annotations

import torch

from tpsample.cli import report
from tpsample.output import SampleOutput, Screened


class ScreenedSteps:
    """Collects the counts of steps, and reads them once the run is over."""

    def __init__(self) -> None:
        self._steps: list[Screened] = []

    def add(self, out: SampleOutput) -> None:
        """Keep what a step counted; the device is not waited for."""
        if out.screened is not None:
            self._steps.append(out.screened)

    def line(self) -> str:
        """Return candidates per row, bytes per step, and the share computed whole, of this rank."""
        if not self._steps or not self._steps[0].num_ids:
            return "nothing: this rank has no tokens"
        candidates = torch.cat([step.candidates for step in self._steps]).double()
        whole = torch.cat([step.whole for step in self._steps]).double()
        read = torch.stack([step.num_bytes for step in self._steps]).double().mean().item()
        share = 100 * (whole / self._steps[0].num_ids).mean().item()
        return (
            f"{candidates.mean().item():.1f} candidates per row (p99 "
            f"{candidates.quantile(0.99).item():.0f}), {report.size(read)} of weights read per "
            f"step, {share:.1f} % of the scores without a bound"
        )
