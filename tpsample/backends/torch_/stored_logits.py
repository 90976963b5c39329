"""The fp32 logits of some rows over this rank's shard. They never leave the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpsample.core.masses import masses
from tpsample.core.order import order_words
from tpsample.core.row_noise import RowNoise, safe_temperature
from tpsample.request.filters import lists_all
from tpsample.request.plan import BatchView
from tpsample.request.step import Found, halves

if TYPE_CHECKING:
    from typing_extensions import Self


def tile_elements(device: torch.device) -> int:
    """Return how many logits a pass takes at a time.

    On a CPU the float64 temporaries then stay in a core's cache; on a GPU few launches do much.
    """
    return 2**18 if device.type == "cpu" else 2**23


@dataclass(frozen=True)
class Rough:
    """Rows some of whose stored logits are upper ends, as the local step leaves them.

    Attributes:
        best: int64 [F, num_samples, n], the best score words, in any order; 0 in the other rows.
            The logits of their tokens are stored.
        slack: fp32 [F]: no stored logit is below the logit, nor above it by more.
        index: int64 [F], the rows of the batch.
        store: that of `tpsample.request.step.Found`, of the step.
    """

    best: Tensor
    slack: Tensor
    index: Tensor
    store: Callable[..., None]

    def select(self, index: slice | Tensor) -> Rough:
        """Return some of the rows."""
        return Rough(self.best[index], self.slack[index], self.index[index], self.store)


@dataclass(frozen=True)
class StoredLogits:
    """Rows whose logits this rank keeps for a step.

    Attributes:
        logits: fp32 [F, V_local], processed: after penalties and constraints.
        raw: the same before them.
        first_id: global id of the first column.
        vocab_size: V, over all ranks.
        temperature: fp32 [F], 1 for greedy rows.
        noise: what the scores of these rows need.
        top: fp32 [F], largest logits over all ranks, once these are known; masses are shares of it.
        done: bool [F], rows that the passes of a draw leave out, because their token is known:
            their results are 0. None leaves out no row.
        first: int64 [F, n], the rows' first order words in any order, as far as the local step has
            listed them; 0 in rows that it has not.
        rough: of rows that may be upper ends; None if all logits are stored themselves.
    """

    logits: Tensor
    raw: Tensor
    first_id: int
    vocab_size: int
    temperature: Tensor
    noise: RowNoise
    top: Tensor | None = None
    done: Tensor | None = None
    first: Tensor | None = None
    rough: Rough | None = None

    @classmethod
    def of(
        cls,
        stored: Tensor,
        batch: BatchView,
        noise: RowNoise,
        *,
        first_id: int = 0,
        found: Found | None = None,
    ) -> Self:
        """Take the stored rows of a batch.

        Args:
            stored: the memory of `tpsample.request.step.Step.logits`.
            noise: of all rows of the batch.
            found: what else the step found of the stored rows; its `store` knows the step.
        """
        count = len(batch.plan.stored_list)
        raw, processed = halves(stored, count)
        all_rows = lists_all(batch.plan.stored_list, len(batch.seed))
        index = slice(None) if all_rows else batch.plan.stored_index
        assert index is not None
        rough = None
        if found is not None and batch.plan.rough:
            assert batch.plan.stored_index is not None
            best, slack = found.best.movedim(0, 2).flatten(2), found.slack.amax(dim=0)
            rough = Rough(best, slack, batch.plan.stored_index, found.store)
        return cls(
            logits=processed if len(processed) else raw,
            raw=raw,
            first_id=first_id,
            vocab_size=batch.plan.vocab_size,
            temperature=safe_temperature(batch.temperature[index])[0],
            noise=noise.select(index),
            first=None if found is None else found.first.transpose(0, 1).flatten(1),
            rough=rough,
        )

    def shown(self, processed: Tensor) -> Self:
        """Return the rows, with raw logits where `processed` is False."""
        if self.logits is self.raw:
            return self
        mode = processed.unsqueeze(1)
        return replace(self, logits=torch.where(mode, self.logits, self.raw), first=None)

    def select(self, index: slice | Tensor) -> Self:
        """Return some of the rows, of a slice without a copy."""
        logits = self.logits[index]
        return replace(
            self,
            logits=logits,
            raw=logits if self.raw is self.logits else self.raw[index],
            temperature=self.temperature[index],
            noise=self.noise.select(index),
            top=None if self.top is None else self.top[index],
            done=None if self.done is None else self.done[index],
            first=None if self.first is None else self.first[index],
            rough=None if self.rough is None else self.rough.select(index),
        )

    def exact(self) -> Self:
        """Store the logits of all rows in place of upper ends, and return the rows."""
        if self.rough is None:
            return self
        places = self.rough.slack.nonzero().squeeze(1)
        processed = self.logits[:0] if self.raw is self.logits else self.logits
        self.rough.store(self.rough.index[places], places, self.raw, processed)
        return replace(self, rough=None)

    def without(self, done: Tensor) -> Self:
        """Return the rows with more of them done, bool [F]. Nothing is copied."""
        return replace(self, done=done if self.done is None else self.done | done)

    def of_undone(self, found: Tensor) -> Tensor:
        """Return what a pass has found, [F, …], with 0 in rows that are done."""
        if self.done is None:
            return found
        return found.masked_fill(self.done.view(-1, *[1] * (found.dim() - 1)), 0)

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the global id of the first column, and fp32 [F, n], of each tile of the shard."""
        width = max(64, tile_elements(self.logits.device) // max(1, self.logits.shape[0]))
        for start in range(0, self.logits.shape[1], width):
            yield self.first_id + start, self.logits[:, start : start + width]

    def masses(self, logits: Tensor, top: Tensor | None = None) -> Tensor:
        """Return the masses of logits [F, n]; see `tpsample.core.masses`."""
        top = self.top if top is None else top
        assert top is not None
        return masses(logits, top.unsqueeze(1), self.temperature.unsqueeze(1))

    @cached_property
    def words_and_mass(self) -> tuple[Tensor, Tensor]:
        """Order words and masses, int64 [F, V_local] each; 0 where a token is masked."""
        words = torch.empty_like(self.logits, dtype=torch.int64)
        mass = torch.empty_like(words)
        for first_id, logits in self.tiles():
            start = first_id - self.first_id
            tile = slice(start, start + logits.shape[1])
            unmasked = logits > -torch.inf
            words[:, tile] = order_words(logits, first_id) * unmasked
            mass[:, tile] = self.masses(logits) * unmasked
        return words, mass
