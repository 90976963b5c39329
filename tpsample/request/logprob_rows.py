"""The rows of a batch that ask for logprobs, and the tokens that each asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tpsample.core.tensors import integers
from tpsample.request.filters import RowFilters, lists_all, repeated_rows


@dataclass(frozen=True)
class LogprobRows:
    """The R rows of a batch that may ask for logprobs, with what each asks for.

    Attributes:
        row_list, row_index: a list and int64 [R], the rows' indices in the batch.
        top: the largest N that a row asks for.
        top_of: int64 [R], N of each row.
        chosen: int64 [R, C], the ids asked for, -1 where a row has fewer.
        processed_list, processed: a list and bool [R], whether a row's mode is a processed one.
        as_logits: bool [R], whether its mode is of logits.
        asks: bool [R], whether a row asks at all; None if every one does. If the host does not
            know the rows, every row is listed.
    """

    row_list: list[int]
    row_index: Tensor
    top: int
    top_of: Tensor
    chosen: Tensor
    processed_list: list[bool]
    processed: Tensor
    as_logits: Tensor
    asks: Tensor | None = None

    def repeated(self, times: int) -> LogprobRows:
        """Return the rows of a batch in which each row stands `times` times in a row."""
        rows, index = repeated_rows(self.row_list, self.row_index, times)
        its: dict[str, Any] = {
            name: value.repeat_interleave(times, dim=0)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        modes = [processed for processed in self.processed_list for _ in range(times)]
        its |= {"row_list": rows, "row_index": index, "processed_list": modes}
        return replace(self, **its)


@dataclass(frozen=True)
class AskingRows:
    """Where the asking rows are among the stored ones. It is made with the batch, so that a step
    takes no index from the host.

    Attributes:
        places: int64 [R], or a slice if they are all of the stored rows, in order.
        filters: of the rows that have filters and ask for a processed mode.
        filtered: int64, the positions of these rows among the asking rows, or a slice if they are
            all asking rows. Both are None if there are none.
    """

    places: Tensor | slice
    filters: RowFilters | None
    filtered: Tensor | slice | None

    @staticmethod
    def of(asked: LogprobRows, filters: RowFilters | None, stored: list[int]) -> AskingRows:
        """Find the asking rows of a batch whose stored rows are `stored`."""
        place = {row: i for i, row in enumerate(stored)}
        of_row = {row: i for i, row in enumerate(filters.row_list)} if filters else {}
        asking = enumerate(zip(asked.row_list, asked.processed_list, strict=True))
        filtered = [i for i, (row, processed) in asking if processed and row in of_row]
        own = [of_row[asked.row_list[i]] for i in filtered]

        def index(listed: list[int], count: int) -> Tensor | slice:
            if lists_all(listed, count):
                return slice(0, count)
            return integers(listed, device=asked.row_index.device)[0]

        return AskingRows(
            index([place[row] for row in asked.row_list], len(stored)),
            filters.select(own) if filters and own else None,
            index(filtered, len(asked.row_list)) if own else None,
        )
