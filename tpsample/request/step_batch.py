"""What a call takes its rows from: a batch, some slots of one, or the tensors of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.core.vocab_shard import VocabShard
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.seeds import SeedSource
from tpsample.request.slot_rows import Undrawn


class StepBatch(Sealed, ABC):
    """The rows of a call, as the call's checks, its settlement and its step ask for them.

    Attributes:
        vocab_size: V.
        unseeded: the rows that still wait for their seed.
        version: another one after rows joined, left, moved or changed.
    """

    vocab_size: int
    unseeded: list[int]
    version: int = 0

    @property
    @abstractmethod
    def rows(self) -> int:
        """B."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors are."""

    @property
    @abstractmethod
    def temperature(self) -> Tensor:
        """fp32 [B]; below 1e-5 the row is greedy."""

    @property
    @abstractmethod
    def seed(self) -> Tensor:
        """int64 [B], 64 bits."""

    @property
    @abstractmethod
    def plan(self) -> BatchPlan:
        """What follows from the requests, which ranks compare."""

    @property
    def stores_logits(self) -> bool:
        """Whether a step keeps logits of some of these rows on their ranks."""
        return self.plan.stored_index is not None

    @property
    def undrawn(self) -> Undrawn | None:
        """The rows that are not drawn; None if all are."""
        return None

    @abstractmethod
    def for_rows(self, num_rows: int) -> StepBatch:
        """Return the batch of so many rows; a ValueError if this one has another number."""

    @abstractmethod
    def view(self, num_rows: int) -> BatchView:
        """Return what a step of so many rows reads."""

    @abstractmethod
    def with_drafts(self, draft_token_ids: Tensor) -> BatchView:
        """Return what a verification of drafts, int64 [B, K], reads: B · (K + 1) rows."""

    @abstractmethod
    def check_masks(self, num_rows: int) -> None:
        """Raise a ValueError if a mask is not of so many rows, or of rows that have changed."""

    @abstractmethod
    def prepare(self, shard: VocabShard) -> None:
        """Make the state of a shard."""

    @abstractmethod
    def draw_seeds(self, source: SeedSource) -> None:
        """Give every row without a seed the next one of `source`."""

    def note_step(self, positions: Tensor) -> None:
        """Warn if a step cannot see the tokens of the one before it. Nothing is known here."""

    @abstractmethod
    def state(self) -> dict[str, object]:
        """Return all that a step reads beside plan, seeds and temperatures, by name, for ranks to
        compare: tensors with a row for each row of the batch, or values that `str` tells apart."""
