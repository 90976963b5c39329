"""The controls of the rows of one step: which slots they have, and what the step itself adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpsample.request.controls.tables import ControlTables


@dataclass(frozen=True)
class ControlRows:
    """The controls of the rows of a step.

    Attributes:
        tables: the tables.
        slots: int64 [B], each row's slot.
        grammar_bitmask: int32 [B, ceil(V / 32)], bit v % 32 of word v // 32 allows id v; or None.
        forced: int64 [B], the only id allowed, -1 for any; or None.
        drafts: int32 [B, K], tokens to count as output beside the state's; or None.
        num_drafts: int32 [B], how many of each row's; None if drafts is.
    """

    tables: ControlTables
    slots: Tensor
    grammar_bitmask: Tensor | None = None
    forced: Tensor | None = None
    drafts: Tensor | None = None
    num_drafts: Tensor | None = None

    @property
    def masked(self) -> bool:
        """Whether some ids may be forbidden."""
        return self.tables.has_masks or self.grammar_bitmask is not None or self.forced is not None

    def after_drafts(self, drafts: Tensor) -> ControlRows:
        """Return the controls of each row after 0 … K of its drafts, int32 [B, K].

        The masks have the B · (K + 1) rows of the result already.
        """
        times = drafts.shape[1] + 1
        if times == 1:
            return self
        slots = self.slots.repeat_interleave(times)
        counts = torch.arange(times, dtype=torch.int32, device=drafts.device)
        return replace(
            self,
            slots=slots,
            drafts=drafts.repeat_interleave(times, dim=0),
            num_drafts=counts.repeat(len(drafts)),
        )
