"""Which rows of a batch ask for logprobs, and of which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.request.filters import RowFilters, lists_all
from tpsample.request.params import SamplingParams


@dataclass(frozen=True)
class LogprobRows:
    """What the rows of a batch that want logprobs ask for. Fixed when the batch is built.

    Attributes:
        row_list, row_index: their indices in the batch, on the host and as int64 [R].
        top: the largest N asked for.
        top_of: int64 [R], N of each row.
        chosen: int64 [R, C], the ids asked for, -1 where a row has fewer.
        processed, as_logits: bool [R], the mode.
        processed_list: the same as `processed`, for the host's plan.
    """

    row_list: list[int]
    row_index: Tensor
    top: int
    top_of: Tensor
    chosen: Tensor
    processed: Tensor
    as_logits: Tensor
    processed_list: list[bool]

    @staticmethod
    def of(
        requests: Sequence[SamplingParams], vocab_size: int, device: torch.device | str | None
    ) -> LogprobRows | None:
        """The requests for logprobs in a batch, None if there are none.

        Raises:
            ValueError: a chosen id >= V.
        """
        rows = [row for row, request in enumerate(requests) if wants_logprobs(request)]
        if not rows:
            return None
        asking = [requests[row] for row in rows]
        top_of = [_limit(request.logprobs or 0, vocab_size) for request in asking]
        chosen = [list(request.logprob_token_ids or ()) for request in asking]
        for row, ids in zip(rows, chosen, strict=True):
            if any(token_id >= vocab_size for token_id in ids):
                raise ValueError(
                    f"logprob_token_ids of row {row}: expected ids in [0, {vocab_size}), got {ids}"
                )
        width = max(len(ids) for ids in chosen)
        processed = [request.logprobs_mode.startswith("processed") for request in asking]
        as_logits = [request.logprobs_mode.endswith("logits") for request in asking]
        padded = [ids + [word.NO_TOKEN] * (width - len(ids)) for ids in chosen]
        return LogprobRows(
            row_list=rows,
            row_index=torch.tensor(rows, device=device),
            top=max(top_of),
            top_of=torch.tensor(top_of, device=device),
            chosen=torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), width),
            processed=torch.tensor(processed, device=device),
            as_logits=torch.tensor(as_logits, device=device),
            processed_list=processed,
        )


@dataclass(frozen=True)
class AskingRows:
    """Where the asking rows are among the stored ones. Fixed when the batch is built, so that a
    step takes no index from the host.

    Attributes:
        places: int64 [R], or a slice if they are all of the stored rows, in order.
        filters, filtered: of those in a processed mode with filters, these, and int64, which of
            the asking rows they are; None if there are none.
    """

    places: Tensor | slice
    filters: RowFilters | None
    filtered: Tensor | None

    @staticmethod
    def of(asked: LogprobRows, filters: RowFilters | None, stored: list[int]) -> AskingRows:
        """Of a batch whose stored rows are `stored`."""
        device = asked.row_index.device
        place = {row: i for i, row in enumerate(stored)}
        places = [place[row] for row in asked.row_list]
        its_filters = {row: i for i, row in enumerate(filters.row_list)} if filters else {}
        cut = [i for i, row in enumerate(asked.row_list) if asked.processed_list[i]]
        cut = [i for i in cut if asked.row_list[i] in its_filters]
        of_cut = [its_filters[asked.row_list[i]] for i in cut]
        return AskingRows(
            places=slice(0, len(places))
            if lists_all(places, len(stored))
            else torch.tensor(places, device=device),
            filters=filters.select(of_cut) if filters and cut else None,
            filtered=torch.tensor(cut, device=device) if cut else None,
        )


def stored_order(
    filters: RowFilters | None,
    logprobs: LogprobRows | None,
    num_rows: int,
    device: torch.device,
) -> tuple[list[int], Tensor | None, Tensor | None]:
    """The rows whose logits a step keeps, the filtered ones first; the same on the device; and
    int32 [B], the place of each row among them or -1. (`[], None, None` if there are none.)"""
    rows = [*(filters.row_list if filters else ()), *(logprobs.row_list if logprobs else ())]
    host = list(dict.fromkeys(rows))
    if not host:
        return host, None, None
    stored = torch.tensor(host, dtype=torch.int64, device=device)
    slot = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    slot[stored] = torch.arange(len(host), dtype=torch.int32, device=device)
    return host, stored, slot


def wants_logprobs(request: SamplingParams) -> bool:
    """Whether a request asks for logprobs of any token."""
    return request.logprobs is not None or bool(request.logprob_token_ids)


def _limit(top: int, vocab_size: int) -> int:
    return vocab_size if top == -1 else min(top, vocab_size)
