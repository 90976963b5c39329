"""The laws of the target and the draft at every position of a verification, on vocabulary shards.

    p_v = P_v / Z_P    P_v the integer mass of token v if the row's kept set has it, else 0
    q_v = Q_v / Z_Q    Q_v its mass under the draft's logits / T; without logits the draft is
                       certain, all mass at the draft token; q = 0 where there is no draft
    residual           max(c · p_v - q_v, 0), c = 1 or a prefix's coefficient

Masses are those of `core.masses`, so what ranks sum, and what follows from the sums, does not
depend on the number of ranks, shards or tiles. The law of the masses is within
max(2^-22, 0.51 V · 2^-40) of the softmax in total variation: a token less likely than 2^-41 of the
likeliest has no mass. A greedy row, and one with a +inf logit, is certain of its first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.torch_.stored_logits import tile_elements
from tpsample.core import word
from tpsample.core.masses import TOP_MASS, masses
from tpsample.core.order import order_words
from tpsample.core.word import Status
from tpsample.filters.kept_sets import find_cut
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import lists_all
from tpsample.request.plan import BatchView


@dataclass(frozen=True)
class Laws:
    """Both laws at S positions of B rows; K of the positions can have a draft.

    Attributes:
        target: fp32 [B, S, V_local], this rank's processed logits.
        draft: [B, K, V_local], this rank's logits of the drafter; None if drafts are certain.
        first_id: global id of the first column.
        drafts: int64 [B, S], -1 where there is none, or one that the draft's law excludes.
        temperature: fp32 [B, S], 1 for greedy rows.
        top, draft_top: fp32 [B, S], largest logits over all ranks; anything where no draft can be.
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
        """Find the largest logits, the kept sets and the sums over all ranks.

        Collective: one gather, one sum, and those of `find_cut` if rows have filters.

        Args:
            rows: the stored logits of all B · S rows.
            batch: these rows.
            drafts, status: [B, S].
        """
        shape = drafts.shape
        draft_words = _top_words(rows, draft) if draft is not None else drafts[:, :0]
        own = torch.cat([rows.first_words(1).view(shape), draft_words], dim=1)
        best = ranks.gather_integers(own).amax(dim=0)
        top_word = best[:, : shape[1]]
        draft_word = F.pad(best[:, shape[1] :], (0, 2 * shape[1] - best.shape[1]))
        top = word.value_of(top_word)

        cut = torch.full_like(top_word, word.LOWEST_DRAWABLE)
        filters = batch.plan.filters
        if filters is not None:
            all_rows = lists_all(filters.row_list, len(batch.seed))
            its = slice(None) if all_rows else filters.row_index
            filtered = replace(rows, top=top.flatten()).select(its)
            cut.view(-1)[filters.row_index] = find_cut(filtered, filters, ranks)
        certain = ~rows.noise.random.view(shape) | (top == torch.inf)
        cut = torch.where(certain, top_word, cut)

        nan_draft = (word.key_of(draft_word) == word.KEY_NAN) & (drafts >= 0)
        status = status.masked_fill(nan_draft & (status == Status.OK), int(Status.NAN))
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
        """Add the sums, and the drafts' own masses, which the owner of each id knows."""
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
        """Yield (global id of the first column, P, Q), int64 [B, S, n] each, over the shard."""
        for tile in _tiles(self.target):
            first_id = self.first_id + tile.start
            logits = self.target[:, :, tile]
            mass = masses(logits, self.top.unsqueeze(2), self.temperature.unsqueeze(2))
            kept = order_words(logits, first_id) >= self.cut.unsqueeze(2)
            yield first_id, mass * kept, self._draft_masses(first_id, tile, logits)

    def _draft_masses(self, first_id: int, tile: slice, target: Tensor) -> Tensor:
        if self.draft is None:
            ids = torch.arange(first_id, first_id + target.shape[2], device=target.device)
            return (ids == self.drafts.unsqueeze(2)) * TOP_MASS
        logits = self.draft[:, :, tile].float()
        positions = logits.shape[1]
        temperature = self.temperature[:, :positions].unsqueeze(2)
        mass = masses(logits, self.draft_top[:, :positions].unsqueeze(2), temperature)
        possible = (logits > -torch.inf) & (self.drafts[:, :positions] >= 0).unsqueeze(2)
        draft = torch.zeros_like(target, dtype=torch.int64)
        draft[:, :positions] = mass * possible
        return draft

    def residual_tiles(self, coefficient: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (global id of the first column, residual float64 [B, S, n]); coefficient [B, S]."""
        c, total, draft_total = (
            x.double().unsqueeze(2) for x in (coefficient, self.total, self.draft_total)
        )
        for first_id, target, draft in self.mass_tiles():
            yield first_id, residual(c, target.double() / total, draft.double() / draft_total)

    def at(self, index: Tensor) -> Laws:
        """Return the laws at one position of each row, int64 [B]: S = 1. The logits are copied."""
        places = index.unsqueeze(1)
        row_index = torch.arange(len(index), device=index.device).unsqueeze(1)
        names = {field.name for field in fields(self)} - {"target", "draft", "first_id"}
        chosen = {name: getattr(self, name).gather(1, places) for name in names}
        if self.draft is not None and self.draft.shape[1]:
            # The last position has no draft, so the logits of any other serve.
            chosen["draft"] = self.draft[row_index, places.clamp(max=self.draft.shape[1] - 1)]
        return replace(self, target=self.target[row_index, places], **chosen)


def residual(coefficient: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return max(c · p - q, 0), from which a rejected draft's token is drawn, not normalised.

    Zeros are replaced by 2^-200 · c · p, so that a row whose residual is zero everywhere (p and q
    equal up to rounding) still has a token to draw. No other row can be affected.
    """
    scaled = coefficient * p
    return (scaled - q).maximum(scaled * 2.0**-200)


def _top_words(rows: ShardLogits, draft: Tensor) -> Tensor:
    """Return int64 [B, K], the largest order word of the draft's logits on this rank, or 0."""
    best = draft.new_zeros(draft.shape[:2], dtype=torch.int64)
    for tile in _tiles(draft):
        words = order_words(draft[:, :, tile].float(), rows.first_id + tile.start)
        best = best.maximum(words.amax(dim=2))
    return best


def _tiles(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the columns of [B, S, V_local] that fit into the cache."""
    width = max(64, tile_elements(logits.device) // max(1, logits[:, :, :1].numel()))
    for start in range(0, logits.shape[2], width):
        yield slice(start, start + width)
