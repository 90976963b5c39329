"""Grammar bitmask and forced ids of a batch: the caller's own tensors, kept by reference.

Their rows are those of the batch at the time they are assigned, so they are stale once rows have
joined, left, moved or changed, and a step is refused until they are assigned anew.
"""

from __future__ import annotations

from torch import Tensor

NAMES = ("grammar_bitmask", "forced_token_ids")


class RowMasks:
    """The masks by name; None where there is none."""

    def __init__(self) -> None:
        self._masks: dict[str, Tensor | None] = dict.fromkeys(NAMES)
        self._stale: set[str] = set()

    def __getitem__(self, name: str) -> Tensor | None:
        return self._masks[name]

    def assign(self, name: str, mask: Tensor | None) -> None:
        """Take a mask of the rows of now."""
        self._masks[name] = mask
        self._stale.discard(name)

    def rows_changed(self) -> None:
        """No mask is of the rows of now any more."""
        self._stale = set(NAMES)

    def check(self, rows: int) -> None:
        """Whether the masks are of so many rows, and of those of now.

        Raises:
            ValueError: they are not.
        """
        for name, mask in self._masks.items():
            if mask is not None and name in self._stale:
                raise ValueError(
                    f"batch.{name}: rows of the batch joined, left, moved or changed since it was "
                    "assigned; assign it anew, or None"
                )
            if mask is not None and mask.shape[0] != rows:
                raise ValueError(
                    f"batch.{name}: expected a row for each of the {rows} rows of the step, got "
                    f"{mask.shape[0]}; assign another"
                )

    def for_each(self, name: str, rows: int) -> Tensor | None:
        """The mask of one request for each of so many rows; one of several rows as it is."""
        mask = self._masks[name]
        if mask is None or mask.shape[0] != 1:
            return mask
        return mask.expand(rows, *mask.shape[1:]).contiguous()
