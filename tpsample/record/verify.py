"""Sample the rows of a record again, and say whether its tokens are those of the definition."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsample import reference
from tpsample.core.checks import kind_and_text, text_of
from tpsample.record.format import LoadHead, Record, read

LOGITS = 2**24
"""How many logits are computed at a time; or D rows, which are no more values than the head."""
SAMPLED_LOGITS = 2**20
"""How many logits are sampled at a time, which takes about 200 bytes for each."""


@dataclass(frozen=True)
class RowVerdict:
    """The tokens of a row as recorded, and as sampled again.

    Attributes:
        recorded, expected: token ids, one per sample, and the status behind them.
        gap: how far the recorded token's score is below the best, where near_tie is true.
        near_tie: every token that differs is in the kept set, and so near to the best that devices
            may differ.
    """

    recorded: tuple[list[int], int]
    expected: tuple[list[int], int]
    gap: float = 0.0
    near_tie: bool = False

    @property
    def confirmed(self) -> bool:
        return self.recorded == self.expected or self.near_tie


def verify_record(path: str | Path, *, load_head: LoadHead | None = None) -> list[RowVerdict]:
    """Sample every row of a record again, by `tpsample.reference`, on the CPU.

    Args:
        load_head: loads the head of a model that a record may name in place of holding one.

    Raises:
        ValueError: the file is no record, or one that this version cannot repeat.
        ImportError: safetensors is not installed, or what loading the model needs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever made the requests has been warned
            record = read(path)
            parts = logits_of(record, range(len(record.params)), *record.head_of(load_head))
            return [
                verdict for rows, logits in parts for verdict in sampled_again(record, rows, logits)
            ]
    except ImportError:
        raise
    except Exception as error:  # whatever a file brings about, it is the file that is wrong
        describe = text_of if isinstance(error, (TypeError, ValueError)) else kind_and_text
        raise ValueError(f"record: {describe(error)}") from error


def logits_of(
    record: Record, rows: range, weight: Tensor, bias: Tensor | None, head: dict[str, Any]
) -> Iterator[tuple[range, Tensor]]:
    """Yield rows and their raw logits [some, V], as many at a time as the memory allows.

    Args:
        weight, bias, head: all rows of the head, as in `FullHead`.
    """
    vocab_size, hidden_size = weight.shape
    hidden_states = record.tensors["hidden_states"]
    for block in _slices(rows, max(hidden_size, LOGITS // vocab_size)):
        states = hidden_states[block.start : block.stop]
        logits = reference.logits(states, weight, bias=bias, **head)
        for some in _slices(block, SAMPLED_LOGITS // vocab_size):
            first = some.start - block.start
            yield some, logits[first : first + len(some)]


def _slices(whole: range, length: int) -> Iterator[range]:
    """Return consecutive parts of a range, of at least one value."""
    length = max(1, length)
    return (whole[start : start + length] for start in range(0, len(whole), length))


def sampled_again(
    record: Record, rows: range, logits: Tensor, *, exact: bool = False
) -> Iterator[RowVerdict]:
    """Yield the verdicts on rows whose raw logits these are.

    Args:
        exact: no other token is confirmed, because the record is of the definition itself.
    """
    batch = record.batch(rows, logits.shape[1])
    part = record.part(rows)
    positions, num_samples = part["positions"], record.num_samples
    again = reference.sample(logits, batch, positions, num_samples=num_samples)

    @lru_cache(maxsize=4)
    def scores(sample: int) -> Tensor:
        of_rows = reference.scores(logits, batch, positions, sample=sample)
        return of_rows.masked_fill(~reference.kept_mask(logits, batch), -torch.inf)

    def gap(row: int, sample: int, recorded: int, expected: int) -> float:
        """Returns inf for a token that could not have been drawn. Nothing is near to a score that
        is infinite."""
        if not 0 <= recorded < logits.shape[1] or expected < 0:
            return torch.inf
        apart = float(scores(sample)[row, expected] - scores(sample)[row, recorded])
        return torch.inf if math.isnan(apart) else apart

    hidden_size = part["hidden_states"].shape[1]
    near_tie = reference.near_tie(logits, batch.temperature, hidden_size).tolist()
    recorded, expected = (
        list(zip(ids.view(len(rows), -1).tolist(), codes.tolist(), strict=True))
        for ids, codes in ((part["token_ids"], part["status"]), (again.token_ids, again.status))
    )
    for row, (one, other) in enumerate(zip(recorded, expected, strict=True)):
        apart, near = 0.0, one[1] == other[1]
        for sample, (theirs, ours) in enumerate(zip(one[0], other[0], strict=True)):
            if near and theirs != ours:
                apart = max(apart, gap(row, sample, theirs, ours))
                near = apart < near_tie[row] and not exact
        yield RowVerdict(one, other, apart, near and one[0] != other[0])
