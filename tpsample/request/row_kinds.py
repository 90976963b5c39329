"""The rows of a step, sorted by how many of their logits a rank needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from tpsample.core.host_tensors import integers


class RowKinds(NamedTuple):
    """Indices of rows in the batch, and of the stored ones among the stored rows; int64 each.

    Attributes:
        plain: rows that store no logits.
        bounded: filtered rows that need few of their logits.
        whole: rows that need all of them.
        drawn: those of the whole rows that no filter replaces.
    """

    plain: Tensor
    bounded: Tensor
    bounded_places: Tensor
    whole: Tensor
    whole_places: Tensor
    drawn: Tensor
    drawn_places: Tensor

    @staticmethod
    def of(
        num_rows: int, stored: Sequence[int], bounded: Collection[int], replaced: Collection[int]
    ) -> RowKinds:
        """Sort the rows of a batch.

        Args:
            stored: the rows that store logits, in the order of the memory.
            bounded: places, in `stored`, of the rows that need few.
            replaced: rows whose words a filter replaces.
        """
        plain = sorted(set(range(num_rows)).difference(stored))
        few = [place for place in range(len(stored)) if place in bounded]
        whole = [place for place in range(len(stored)) if place not in bounded]
        drawn = [place for place in whole if stored[place] not in replaced]
        lists = [plain]
        for places in (few, whole, drawn):
            lists += [[stored[place] for place in places], places]
        return RowKinds(*integers(*lists, device="cpu"))
