"""How the kernels over stored logits are launched: a program per block of a row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpsample.core.interpreted import interpreted
from tpsample.kernels.sums import mass_kernel
from tpsample.logits.stored_logits import StoredLogits

BLOCK = 1024 if interpreted() else 2048
NUM_WARPS = 8
"""Logits and warps of a program: 8 logits a thread, so that words and float64 find registers."""


class LaunchedLogits(StoredLogits):
    """Stored logits on a GPU, or in the interpreter."""

    def count_of(self, size: int) -> int:
        """Return how many blocks or groups of a size the shard has; the first one begins where the
        group of four ids of its first id does."""
        return -(-(self.first_id % 4 + self.logits.shape[1]) // size)

    def launch(self, kernel: Any, **arguments: Any) -> None:
        """Launch one program per block and row; none of an empty shard."""
        if not self.logits.shape[1]:
            return
        kernel[(self.count_of(BLOCK), len(self.logits))](
            **self.shard_arguments(),
            **arguments,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # the twin rounds every product
        )

    def weigh(self, top: Tensor, cut: Tensor, sums: Tensor, *, moment: bool) -> None:
        """Add the mass of the tokens down to a word to sums [F, 2], and with `moment` that of their
        entropy; see `mass_kernel`."""
        self.launch(
            mass_kernel,
            temperature_ptr=self.temperature,
            top_ptr=top,
            cut_ptr=cut,
            sums_ptr=sums,
            MOMENT=moment,
        )

    def shard_arguments(self) -> dict[str, Any]:
        """Return the arguments by which a kernel finds the logits."""
        return {
            "logits_ptr": self.logits,
            "stride_logits": self.logits.stride(0),
            "vocab_start": self.first_id,
            "lead": self.first_id % 4,
            "width": self.logits.shape[1],
        }

    def noise_arguments(self) -> dict[str, Any]:
        """Return the arguments by which a kernel scores."""
        return {
            "seed_ptr": self.noise.seed,
            "position_ptr": self.noise.positions,
            "temperature_ptr": self.noise.temperature,
            "num_samples": self.noise.num_samples,
            "ROUNDS": self.noise.rounds,
        }
