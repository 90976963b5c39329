"""The target's and the draft's law at every position of a verification, on vocabulary shards.

    p_v = P_v / Z_P    P_v the integer mass of token v if the row's kept set has it, else 0
    q_v = Q_v / Z_Q    Q_v its mass under the draft's logits / T; without logits the draft is
                       certain, all mass at the draft token; q = 0 where there is no draft
    residual           max(c · p_v - q_v, 0), c = 1 or a prefix's coefficient

Masses are those of `stored.kept_set`, so what ranks sum and what follows from the sums depends
on no number of ranks, shards or tiles. The law of the masses is within V · 2^-41 of the softmax in
total variation; a token less likely than 2^-41 of the likeliest has none. A greedy row, and one
with a +inf logit, is certain of its first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.order import TOP_MASS, below_top, masses, order_words
from tpsample.core.word import Status
from tpsample.logits.cut import find_cut
from tpsample.logits.shard_logits import ShardLogits, tile_elements
from tpsample.ranks.ranks import Ranks
from tpsample.request.plan import BatchView


@dataclass(frozen=True)
class Laws:
    """Both laws at S positions of B rows; K of the positions can have a draft.

    Attributes:
        target: fp32 [B, S, V_local], this rank's processed logits.
        draft: [B, K, V_local], this rank's logits of the drafter, or None.
        first_id: global id of the first column.
        drafts: int64 [B, S], -1 where there is none, or one that the draft's law excludes.
        temperature: fp32 [B, S], 1 for greedy rows.
        top, draft_top: fp32 [B, S] and [B, K], largest logits over all ranks.
        cut: int64 [B, S]; a token is kept iff its order word is >= this one.
        status: int32 [B, S]; where it is not OK there is no draft, and the law means nothing.
        total, draft_total: int64 [B, S], Z_P and Z_Q; 1 for an empty law.
        p, q: float64 [B, S], of the drafts; 0 where there is none.
    """

    target: Tensor
    draft: Tensor | None
    first_id: int
    drafts: Tensor
    temperature: Tensor
    top: Tensor
    draft_top: Tensor
    cut: Tensor
    status: Tensor
    total: Tensor
    draft_total: Tensor
    p: Tensor
    q: Tensor

    @staticmethod
    def of(
        rows: ShardLogits,
        batch: BatchView,
        drafts: Tensor,
        draft: Tensor | None,
        status: Tensor,
        ranks: Ranks,
    ) -> Laws:
        """Find what the laws need of all ranks: the largest logits, the kept sets, the sums.

        Collective: one gather, one sum, and the fixed number of `find_cut` if rows have filters.

        Args:
            rows: the stored logits of all B · S rows.
            batch: these rows.
            drafts, status: [B, S].
        """
        shape = drafts.shape
        draft_words = _top_words(rows, draft) if draft is not None else drafts[:, :0]
        own = torch.cat([rows.first_words(1).view(shape), draft_words], dim=1)
        top_word, draft_word = (
            ranks.gather_integers(own).amax(dim=0).split([shape[1], draft_words.shape[1]], dim=1)
        )
        top = word.value_of(top_word)

        cut = torch.full_like(top_word, word.LOWEST_DRAWABLE)
        if batch.plan.filters is not None:
            index = batch.plan.filters.row_index
            tops = top.flatten()[index]
            filtered = rows.select(batch.plan.filters.row_list)
            cut.view(-1)[index] = find_cut(filtered, batch.plan.filters, tops, ranks)
        certain = ~rows.noise.random.view(shape) | (top == torch.inf)
        cut = torch.where(certain, top_word, cut)

        nan_draft = torch.zeros_like(status, dtype=torch.bool)
        nan_draft[:, : draft_word.shape[1]] = word.key_of(draft_word) == word.KEY_NAN
        nan_draft &= (drafts >= 0) & (status == Status.OK)
        status = status.masked_fill(nan_draft, int(Status.NAN))
        empty = torch.zeros(shape, dtype=torch.float64, device=drafts.device)
        laws = Laws(
            target=rows.logits.view(*shape, -1),
            draft=draft,
            first_id=rows.first_id,
            drafts=drafts.where(status == Status.OK, word.NO_TOKEN),
            temperature=rows.temperature.view(shape),
            top=top,
            draft_top=word.value_of(draft_word),
            cut=cut,
            status=status,
            total=top_word,
            draft_total=top_word,
            p=empty,
            q=empty,
        )
        return laws._summed(ranks)

    def _summed(self, ranks: Ranks) -> Laws:
        """With the sums, and the drafts' own masses, which the owner of each id answers for."""
        sums = self.drafts.new_zeros(4, *self.drafts.shape)
        for first_id, target, draft in self.mass_tiles():
            ids = torch.arange(first_id, first_id + target.shape[2], device=target.device)
            own = ids == self.drafts.unsqueeze(2)
            parts = (target, draft, target * own, draft * own)
            sums += torch.stack([part.sum(dim=2) for part in parts])
        total, draft_total, target_mass, draft_mass = ranks.sum_integers(sums).unbind()
        total, draft_total = total.clamp(min=1), draft_total.clamp(min=1)
        return replace(
            self,
            drafts=self.drafts.where(draft_mass > 0, word.NO_TOKEN),
            total=total,
            draft_total=draft_total,
            p=target_mass.double() / total.double(),
            q=draft_mass.double() / draft_total.double(),
        )

    def mass_tiles(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(global id of the first column, P, Q), int64 [B, S, n] each, over the shard."""
        rows, positions, columns = self.target.shape
        width = max(64, tile_elements(self.target.device) // max(1, rows * positions))
        for start in range(0, columns, width):
            first_id, tile = self.first_id + start, slice(start, start + width)
            logits = self.target[:, :, tile]
            below = below_top(logits, self.top.unsqueeze(2), self.temperature.unsqueeze(2))
            kept = order_words(logits, first_id) >= self.cut.unsqueeze(2)
            yield first_id, masses(below) * kept, self._draft_masses(first_id, tile, logits)

    def _draft_masses(self, first_id: int, tile: slice, target: Tensor) -> Tensor:
        if self.draft is None:
            ids = torch.arange(first_id, first_id + target.shape[2], device=target.device)
            return (ids == self.drafts.unsqueeze(2)) * TOP_MASS
        logits = self.draft[:, :, tile].float()
        positions = logits.shape[1]
        temperature = self.temperature[:, :positions].unsqueeze(2)
        below = below_top(logits, self.draft_top.unsqueeze(2), temperature)
        possible = (logits > -torch.inf) & (self.drafts[:, :positions] >= 0).unsqueeze(2)
        draft = torch.zeros_like(target, dtype=torch.int64)
        draft[:, :positions] = masses(below) * possible
        return draft

    def residual_tiles(self, coefficient: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(global id of the first column, residual float64 [B, S, n]); coefficient [B, S]."""
        total, draft_total = (z.double().unsqueeze(2) for z in (self.total, self.draft_total))
        for first_id, target, draft in self.mass_tiles():
            yield (
                first_id,
                residual(
                    coefficient.unsqueeze(2), target.double() / total, draft.double() / draft_total
                ),
            )

    def at(self, index: Tensor) -> Laws:
        """The laws at one position of each row, int64 [B]: S = 1. The logits are copied."""
        places = index.unsqueeze(1)
        rows = torch.arange(len(index), device=index.device).unsqueeze(1)
        per_position = ("drafts", "temperature", "top", "cut", "status", "total", "draft_total")
        chosen = {name: getattr(self, name).gather(1, places) for name in (*per_position, "p", "q")}
        if self.draft is not None and self.draft.shape[1]:
            # The last position has no draft, and any other's logits will do for it.
            places = places.clamp(max=self.draft.shape[1] - 1)
            chosen["draft"] = self.draft[rows, places]
            chosen["draft_top"] = self.draft_top.gather(1, places)
        return replace(self, target=self.target[rows, index.unsqueeze(1)], **chosen)


def residual(coefficient: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """max(c · p - q, 0): where a rejected draft's token is drawn from, not normalised.

    With 2^-200 c · p in place of 0, which nothing but a row of nothing else can draw: p and q that
    differ by less than their rounding.
    """
    scaled = coefficient * p
    return (scaled - q).maximum(scaled * 2.0**-200)


def _top_words(rows: ShardLogits, draft: Tensor) -> Tensor:
    """int64 [B, K], the largest order word of the draft's logits on this rank; 0 if it has none."""
    best = draft.new_zeros(draft.shape[:2], dtype=torch.int64)
    width = max(64, tile_elements(draft.device) // max(1, best.numel()))
    for start in range(0, draft.shape[2], width):
        tile = draft[:, :, start : start + width].float()
        best = best.maximum(order_words(tile, rows.first_id + start).amax(dim=2))
    return best
