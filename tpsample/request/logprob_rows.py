"""Which rows of a batch ask for logprobs, and of which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.host_tensors import integers
from tpsample.request.filters import RowFilters, lists_all
from tpsample.request.params import SamplingParams


@dataclass(frozen=True)
class LogprobRows:
    """What the R rows of a batch that want logprobs ask for.

    Attributes:
        row_list, row_index: a list and int64 [R], the rows' indices in the batch.
        top: the largest N that a row asks for.
        top_of: int64 [R], N of each row.
        chosen: int64 [R, C], the ids asked for, -1 where a row has fewer.
        processed_list, processed: a list and bool [R], whether a row's mode is a processed one.
        as_logits: bool [R], whether its mode is of logits.
        asks: bool [R], whether a row asks at all; None if every one does. Where the host does not
            know the rows, all are listed that may ask.
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

    @staticmethod
    def of(
        requests: Sequence[SamplingParams],
        asks: bytes,
        vocab_size: int,
        device: torch.device | str | None,
    ) -> LogprobRows | None:
        """Return what a batch asks for, None if no row asks. Chosen ids are below V already.

        Args:
            requests: of all rows.
            asks: 1 or 0 for each, whether it asks.
        """
        if 1 not in asks:
            return None
        rows, asking = list(compress(range(len(requests)), asks)), list(compress(requests, asks))
        top_of = [request.logprobs or 0 for request in asking]
        top_of = [vocab_size if top == -1 else min(top, vocab_size) for top in top_of]
        chosen = [list(request.logprob_token_ids or ()) for request in asking]
        width = max(len(ids) for ids in chosen)
        padded = (each for ids in chosen for each in (*ids, *[word.NO_TOKEN] * (width - len(ids))))
        processed = [request.logprobs_mode.startswith("processed") for request in asking]
        as_logits = [request.logprobs_mode.endswith("logits") for request in asking]
        row_index, its_top, its_chosen = integers(rows, top_of, padded, device=device)
        bits = integers(processed, as_logits, device=device, dtype=torch.bool)
        return LogprobRows(
            row_list=rows,
            row_index=row_index,
            top=max(top_of),
            top_of=its_top,
            chosen=its_chosen.view(len(rows), width),
            processed_list=processed,
            processed=bits[0],
            as_logits=bits[1],
        )


@dataclass(frozen=True)
class AskingRows:
    """Where the asking rows are among the stored ones. It is made with the batch, so that a step
    takes no index from the host.

    Attributes:
        places: int64 [R], or a slice if they are all of the stored rows, in order.
        filters: of the rows that have filters and ask for a processed mode.
        filtered: int64, the positions of those rows among the asking rows, or a slice if they are
            all of them. Both are None if there are none.
    """

    places: Tensor | slice
    filters: RowFilters | None
    filtered: Tensor | slice | None

    @staticmethod
    def of(asked: LogprobRows, filters: RowFilters | None, stored: list[int]) -> AskingRows:
        """Find the asking rows of a batch whose stored rows are `stored`."""
        device = asked.row_index.device
        place = {row: i for i, row in enumerate(stored)}
        places = [place[row] for row in asked.row_list]
        all_rows = lists_all(places, len(stored))
        of_row = {row: i for i, row in enumerate(filters.row_list)} if filters else {}
        asking = enumerate(zip(asked.row_list, asked.processed_list, strict=True))
        filtered = [i for i, (row, processed) in asking if processed and row in of_row]
        own = [of_row[asked.row_list[i]] for i in filtered]
        index: Tensor | slice | None = None
        if filtered:
            every = lists_all(filtered, len(asked.row_list))
            index = slice(None) if every else integers(filtered, device=device)[0]
        return AskingRows(
            places=slice(0, len(places)) if all_rows else integers(places, device=device)[0],
            filters=filters.select(own) if filters and own else None,
            filtered=index,
        )


def stored_order(
    filters: RowFilters | None,
    logprobs: LogprobRows | None,
    num_rows: int,
    device: torch.device,
    *,
    stores_all: bool = False,
) -> tuple[list[int], Tensor | None, Tensor | None]:
    """Find the rows whose logits a step keeps: those that need it, or all.

    Returns three things: the kept rows as a list, filtered rows first; the same list as a tensor;
    and for each row of the batch its index in that list, or -1. Without any: [], None, None.
    """
    stored_index, in_order = None, False
    if filters is not None and logprobs is None and not stores_all:
        stored_list, stored_index = filters.row_list, filters.row_index
        in_order = True
    else:
        rows = list(range(num_rows)) if stores_all else []
        rows += [*(filters.row_list if filters else ()), *(logprobs.row_list if logprobs else ())]
        stored_list = list(dict.fromkeys(rows))
        in_order = lists_all(stored_list, num_rows)
    if not stored_list:
        return stored_list, None, None
    if stored_index is None:
        (stored_index,) = integers(stored_list, device=device)
    places = torch.arange(len(stored_list), dtype=torch.int32, device=device)
    if in_order and len(stored_list) == num_rows:
        return stored_list, stored_index, places
    stored_place = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    return stored_list, stored_index, stored_place.index_copy_(0, stored_index, places)
