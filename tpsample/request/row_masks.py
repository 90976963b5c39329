"""The grammar bitmask and the forced ids of a batch: the caller's own tensors, kept by reference.

Their rows are those that the batch had when they were assigned. They are stale once rows have
joined, left, moved or changed, and then a step is refused until they are assigned anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.request.batch_checks import check_per_row
from tpsample.request.controls.bits import num_words

NAMES = ("grammar_bitmask", "forced_token_ids")


class RowMasks:
    """The masks by name; None where there is none."""

    def __init__(self) -> None:
        self._masks: dict[str, Tensor | None] = dict.fromkeys(NAMES)
        self._stale: set[str] = set()

    def __getitem__(self, name: str) -> Tensor | None:
        return self._masks[name]

    def assign(self, name: str, mask: Tensor | None, seed: Tensor, vocab_size: int) -> None:
        """Take a mask of the rows that the batch has now, whose seeds these are.

        Raises:
            ValueError: another shape, dtype or device.
        """
        if mask is not None and name == "grammar_bitmask":
            check_per_row(name, mask, torch.int32, seed, num_words(vocab_size))
        elif mask is not None:
            check_per_row(name, mask, torch.int64, seed)
        self._masks[name] = mask
        self._stale.discard(name)

    def rows_changed(self) -> None:
        """Every mask is of rows that the batch no longer has."""
        self._stale = set(NAMES)

    def check(self, num_rows: int) -> None:
        """Check that the masks are of so many rows, and of those the batch has now.

        Raises:
            ValueError: they are not.
        """
        for name, mask in self._masks.items():
            if mask is not None and name in self._stale:
                raise ValueError(
                    f"batch.{name}: rows of the batch joined, left, moved or changed since it was "
                    "assigned; assign it anew, or None"
                )
            if mask is not None and mask.shape[0] != num_rows:
                raise ValueError(
                    f"batch.{name}: expected a row for each of the {num_rows} rows of the step, "
                    f"got {mask.shape[0]}; assign another"
                )

    def for_each(self, name: str, num_rows: int) -> Tensor | None:
        """Repeat the mask of one request for so many rows; return one of several rows as it is."""
        mask = self._masks[name]
        if mask is None or mask.shape[0] != 1:
            return mask
        return mask.expand(num_rows, *mask.shape[1:]).contiguous()
