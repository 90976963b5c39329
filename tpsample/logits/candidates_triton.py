"""`Candidates` on a GPU, or in the interpreter; kernels: `tpsample.kernels.digits`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.core.order import DIGIT_BITS, DIGITS
from tpsample.kernels.digits import digit_kernel, next_digit_kernel
from tpsample.logits.candidates import Candidates, Search
from tpsample.logits.launches import LaunchedLogits


@dataclass(frozen=True)
class TritonCandidates(Candidates):
    """`Candidates` whose words and masses each launch makes again from the logits, because reading
    two words of 64 bits per token would take longer."""

    rows: LaunchedLogits

    def digits(self, prefix: Tensor, shift: int, *, mass: bool) -> Tensor:
        dtype = torch.int64 if mass else torch.int32
        bins = torch.zeros(len(prefix), DIGITS, dtype=dtype, device=prefix.device)
        self.rows.launch(
            digit_kernel,
            temperature_ptr=self.rows.temperature,
            top_ptr=self.top,
            prefix_ptr=prefix,
            row_done_ptr=self.rows.done,
            bins_ptr=bins,
            shift=shift,
            MASS=mass,
            DIGIT_BITS=DIGIT_BITS,
        )
        return bins

    def next_digit(self, search: Search, bins: Tensor) -> Search:
        found = Search(*(torch.empty_like(search.limit) for _ in range(3)))
        next_digit_kernel[(len(bins),)](
            bins_ptr=bins.contiguous(),
            prefix_ptr=search.prefix,
            reached_ptr=search.reached,
            limit_ptr=search.limit,
            next_prefix_ptr=found.prefix,
            next_reached_ptr=found.reached,
            next_limit_ptr=found.limit,
            DIGIT_BITS=DIGIT_BITS,
        )
        return found

    def mass_from(self, cut: Tensor) -> Tensor:
        sums = cut.new_zeros(len(cut), 2)
        self.rows.weigh(self.top, cut, sums, moment=False)
        return sums[:, 0]
