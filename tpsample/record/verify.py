"""Sample the rows of a record again, and say whether its tokens are those of the definition."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsample import reference
from tpsample.record.format import LoadHead, Record, read
from tpsample.reference import NEAR_TIE

WEIGHT_VALUES = 2**22
"""Of the head at a time: the oracle multiplies in float64."""
LOGITS = 2**24
"""As many at a time are computed, or D rows of them, which are no more than the head has values."""
SAMPLED_LOGITS = 2**20
"""As many at a time are sampled, which takes about 200 bytes for each."""


@dataclass(frozen=True)
class RowVerdict:
    """The tokens of a row as recorded, and as sampled again.

    Attributes:
        recorded, expected: token ids, one per sample, and the status behind them.
        gap: how far the recorded token's score is below the best, where near_tie is true.
        near_tie: every token that differs lies within NEAR_TIE of the best and is in the kept set.
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
            return list(_verdicts(record, *record.head_of(load_head)))
    except ImportError:
        raise
    except Exception as error:  # whatever a file brings about, it is the file that is wrong
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"record: {kind}{error}") from error


def _verdicts(
    record: Record, weight: Tensor, bias: Tensor | None, head: dict[str, Any]
) -> Iterator[RowVerdict]:
    """Yield the verdicts row by row, over as many logits at a time as the memory allows."""
    vocab_size, hidden_size = weight.shape
    hidden_states = record.tensors["hidden_states"]
    for rows in _slices(range(len(hidden_states)), max(hidden_size, LOGITS // vocab_size)):
        logits = torch.empty(len(rows), vocab_size)
        for ids in _slices(range(vocab_size), WEIGHT_VALUES // hidden_size):
            part = slice(ids.start, ids.stop)
            logits[:, part] = reference.logits(
                hidden_states[rows.start : rows.stop],
                weight[part],
                bias=None if bias is None else bias[part],
                **head,
            )
        for some in _slices(rows, SAMPLED_LOGITS // vocab_size):
            first = some.start - rows.start
            yield from _sampled_again(record, some, logits[first : first + len(some)])


def _slices(whole: range, length: int) -> Iterator[range]:
    """Consecutive parts of a range, of at least one value."""
    length = max(1, length)
    for start in range(whole.start, whole.stop, length):
        yield range(start, min(start + length, whole.stop))


def _sampled_again(record: Record, rows: range, logits: Tensor) -> Iterator[RowVerdict]:
    """Yield the verdicts on rows whose raw logits these are."""
    batch = record.batch(rows, logits.shape[1])
    rounds, num_samples = record.philox_rounds, record.num_samples
    positions = record.tensors["positions"][rows.start : rows.stop]
    again = reference.sample(
        logits, batch, positions, num_samples=num_samples, philox_rounds=rounds
    )
    kept = reference.kept_mask(logits, batch)

    @lru_cache(maxsize=4)
    def scores(sample: int) -> Tensor:
        return reference.scores(logits, batch, positions, sample=sample, philox_rounds=rounds)

    def gap(row: int, sample: int, recorded: int, expected: int) -> float:
        """Returns inf for a token that could not have been drawn."""
        if not 0 <= recorded < logits.shape[1] or expected < 0 or not kept[row, recorded]:
            return torch.inf
        return float(scores(sample)[row, expected] - scores(sample)[row, recorded])

    for row in range(len(rows)):
        token_ids = record.tensors["token_ids"][rows[row]].view(-1).tolist()
        recorded = token_ids, int(record.tensors["status"][rows[row]])
        expected = again.token_ids[row].view(-1).tolist(), int(again.status[row])
        apart, near = 0.0, recorded[1] == expected[1]
        for sample, (one, other) in enumerate(zip(recorded[0], expected[0], strict=True)):
            if near and one != other:
                apart = max(apart, gap(row, sample, one, other))
                near = apart < NEAR_TIE
        yield RowVerdict(recorded, expected, apart, near and recorded[0] != expected[0])
