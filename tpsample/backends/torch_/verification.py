"""Verification on one rank: arithmetic on rows, and for that by ratio passes over both laws.

    p_v = P_v / Z_P    P_v the integer mass of token v if the row's kept set has it, else 0
    q_v = Q_v / Z_Q    Q_v its mass under the drafter's logits / T; without logits the draft is
                       certain, with all mass at the draft token; q = 0 where there is no draft

Masses are the integers of `core.masses`. So neither the sums over ranks nor what follows from them
depends on the number of ranks, shards or tiles. The law of the masses is within max(2^-22, 0.51 V ·
2^-40) of the softmax in total variation: a token less likely than 2^-41 of the likeliest has no
mass. A greedy row, and one with a +inf logit, is certain of its first token.

This is plain PyTorch, the definition. The other backends have kernels of the same passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits, tile_elements
from tpsample.core import residual, word
from tpsample.core.acceptance import (
    DOMAIN_RECOVERY,
    accept_block,
    accept_tokenwise,
    coefficients,
    leading,
    position_of_rows,
    uniforms,
)
from tpsample.core.masses import TOP_MASS, masses
from tpsample.core.order import order_words
from tpsample.core.word import Status
from tpsample.noise import row_stream, tile_noise
from tpsample.output import SampleOutput, VerifyOutput


def drafted_rows(
    drafts: Tensor, undrawn: Tensor | None, positions: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the drafts of the rows to verify, and the absolute position of each of these.

    Args:
        drafts: int64 [B, K]; ids after the first one outside [0, V) are ignored.
        undrawn: bool [B], rows without drafts; None for no such rows.
        positions: int64 [B], the position of each request's first token.

    Returns:
        int64 [B, K + 1], -1 where there is no draft, and int64 [B · (K + 1)].
    """
    known = ((drafts >= 0) & (drafts < vocab_size)).cumprod(dim=1).bool()
    if undrawn is not None:
        known &= ~undrawn.unsqueeze(1)
    own_drafts = F.pad(drafts.where(known, word.NO_TOKEN), (0, 1), value=word.NO_TOKEN)
    return own_drafts, position_of_rows(positions, own_drafts.shape[1])


def coupled_output(drafts: Tensor, out: SampleOutput) -> VerifyOutput:
    """Accept the drafts that equal the tokens drawn at their positions, up to the first difference.

    Args:
        drafts: int64 [B, K + 1], of `drafted_rows`.
        out: the tokens of all B · (K + 1) rows.
    """
    tokens, status = out.token_ids.view(drafts.shape), out.status.view(drafts.shape)
    accepted = leading((drafts == tokens) & (drafts >= 0))
    return VerifyOutput.of(accepted, tokens, status, out.seeds[:: drafts.shape[1]].clone())


@dataclass(frozen=True)
class Laws:
    """The numbers of both laws at S positions of B rows.

    Attributes:
        top, draft_top: fp32 [B, S], largest logits over all ranks; draft_top means nothing at the
            last position, which has no draft.
        cut: int64 [B, S]; a token is kept iff its order word is >= the cut.
        drafts: int64 [B, S]; -1 for no draft, or for a draft that its own law excludes.
        status: int32 [B, S]; where it is not OK there is no draft, and the law means nothing.
    """

    top: Tensor
    draft_top: Tensor
    cut: Tensor
    drafts: Tensor
    status: Tensor


@dataclass(frozen=True)
class Places:
    """The positions whose residuals are summed: N = 1, where a row stops, or all S of a block.

    Attributes:
        index: int64 [B, N].
        weights: int64 [2, B, N], by which masses of target and draft become shares.
        coefficient: float64 [B, N], c.
    """

    index: Tensor
    weights: Tensor
    coefficient: Tensor


@dataclass(frozen=True)
class Verification:
    """The drafts of a step, and both laws' logits on this rank. Methods are in the order of calls.

    Attributes:
        rows: the target's logits of all B · S rows, S = K + 1.
        draft: [B, K, V_local], the drafter's logits; None if the drafts were certain.
        drafts: int64 [B, S], -1 where there is no draft.
        sampled: int64 [B, S], draws from the target, -1 in rows that are not drawn.
        status: int32 [B, S].
        seed, positions: int64 [B].
        block: whether drafts are accepted as a block.
    """

    rows: ShardLogits
    draft: Tensor | None
    drafts: Tensor
    sampled: Tensor
    status: Tensor
    seed: Tensor
    positions: Tensor
    block: bool

    @cached_property
    def draft_logits(self) -> Tensor:
        """fp32 [B · K, V_local], a copy only if the drafter has another dtype or order of rows."""
        if self.draft is None:
            return self.rows.logits[:0]
        return self.draft.float().flatten(0, 1).contiguous()

    def tops(self) -> Tensor:
        """Return the first order words of the target, and then those of the drafter if it has
        logits, int64 [B, S + K]."""
        own = self.rows.first_words(1).view(self.drafts.shape)
        if self.draft is None:
            return own
        logits = self.draft_logits
        law = replace(self.rows, logits=logits, raw=logits, done=None, found=None)
        return torch.cat([own, law.first_words(1).view(self.draft.shape[:2])], dim=1)

    def laws(self, gathered: Tensor) -> Laws:
        """Return the laws without filters, from the `tops` of all ranks, [W, …]."""
        width = self.drafts.shape[1]
        best = gathered.amax(dim=0)
        top_word = best[:, :width]
        draft_word = F.pad(best[:, width:], (0, 2 * width - best.shape[1]))
        top = word.value_of(top_word)
        certain = ~self.rows.noise.random.view(top.shape) | (top == torch.inf)
        nan_draft = (word.key_of(draft_word) == word.KEY_NAN) & (self.drafts >= 0)
        nan_draft &= self.status == Status.OK
        status = self.status.masked_fill(nan_draft, int(Status.NAN))
        return Laws(
            top=top,
            draft_top=word.value_of(draft_word),
            cut=torch.where(certain, top_word, word.LOWEST_DRAWABLE),
            drafts=self.drafts.where(status == Status.OK, word.NO_TOKEN),
            status=status,
        )

    def sums(self, laws: Laws) -> Tensor:
        """Return Z_P and the draft's P, then Z_Q and its Q if the drafter has logits, int64
        [2 or 4, B, S]. Only the rank that owns the draft's id adds its masses."""
        sums = self.drafts.new_zeros(2 if self.draft is None else 4, *self.drafts.shape)
        for first_id, target, draft in self.mass_tiles(laws):
            ids = torch.arange(first_id, first_id + target.shape[2], device=target.device)
            own = ids == laws.drafts.unsqueeze(2)
            parts = (target, target * own, draft, draft * own)[: len(sums)]
            sums += torch.stack([part.sum(dim=2) for part in parts])
        return sums

    def accept(self, laws: Laws, sums: Tensor) -> tuple[Laws, Places]:
        """Return the laws without drafts that their own law excludes, and the positions to sum.

        Args:
            sums: the `sums` over all ranks.
        """
        total, mass = sums[:2]
        draft_total = draft_mass = (laws.drafts >= 0) * TOP_MASS
        if self.draft is not None:
            draft_total, draft_mass = sums[2:]
        laws = replace(laws, drafts=laws.drafts.where(draft_mass > 0, word.NO_TOKEN))
        p = mass.double() / total.clamp(min=1).double()
        q = draft_mass.double() / draft_total.clamp(min=1).double()
        if self.block:
            coefficient = coefficients(p, q)
            index = torch.arange(p.shape[1], device=p.device).expand(p.shape).contiguous()
        else:
            u = uniforms(self.seed, self.positions, p.shape[1])
            index = accept_tokenwise(p, q, u).unsqueeze(1)
            coefficient = torch.ones_like(p[:, :1])
        weights = torch.stack(
            [
                residual.share_weight(coefficient, total.gather(1, index)),
                residual.share_weight(torch.ones_like(coefficient), draft_total.gather(1, index)),
            ]
        )
        return laws, Places(index, weights, coefficient)

    def residuals(self, laws: Laws, places: Places) -> Tensor:
        """Return the best words of a draw from each residual on this rank. A block adds the sums of
        the residuals. int64 [1 or 2, B, N]."""
        index, weights = places.index, places.weights.unsqueeze(3)
        at = self.seed.unsqueeze(1), self.positions.unsqueeze(1) + index, index
        streams = tuple(r.unsqueeze(2) for r in row_stream(*at, domain=DOMAIN_RECOVERY))
        best = torch.zeros_like(index)
        units = torch.zeros_like(best)
        for first_id, target, draft in self.mass_tiles(laws, index):
            left = residual.residuals(target, weights[0], draft, weights[1])
            units += left.sum(dim=2)
            noise = tile_noise(streams, first_id, left.shape[2])
            scores = residual.recovery_scores(left, target, noise)
            best = best.maximum((order_words(scores, first_id) * (target > 0)).amax(dim=2))
        return torch.stack([best, units] if self.block else [best])

    def output(self, laws: Laws, places: Places, gathered: Tensor) -> VerifyOutput:
        """Return the output, from the `residuals` of all ranks, [W, …]."""
        words, stop = gathered[:, 0].amax(dim=0), places.index[:, 0]
        if self.block:
            sums = gathered[:, 1].sum(dim=0).double() * 2.0**-residual.SHARE_BITS
            # A position without a law has no draft, so c alone enters its test.
            sums = torch.where(laws.status == Status.OK, sums, places.coefficient)
            u = uniforms(self.seed, self.positions, sums.shape[1])
            stop = accept_block(places.coefficient, sums, u)
            words = words.gather(1, stop.unsqueeze(1))
        last = stop.unsqueeze(1)
        good = laws.status.gather(1, last) == Status.OK
        good &= self.sampled.gather(1, last) >= 0
        token = word.decode(words)[0].where(good, word.NO_TOKEN)
        return VerifyOutput.of(stop, laws.drafts.scatter(1, last, token), laws.status, self.seed)

    def mass_tiles(
        self, laws: Laws, index: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (global id of the first column, P, Q), int64 [B, N, n] each, over the shard.

        Args:
            index: int64 [B, N], the positions; None for all S.
        """
        rows, (num_rows, width) = self.rows, self.drafts.shape
        target = rows.logits.view(num_rows, width, -1)
        temperature = rows.temperature.view(num_rows, width)
        draft, top, draft_top, cut, drafts = (
            self.draft, laws.top, laws.draft_top, laws.cut, laws.drafts
        )  # fmt: skip
        if index is not None and index.shape[1] < width:
            row_index = torch.arange(num_rows, device=index.device).unsqueeze(1)
            target = target[row_index, index]
            temperature, top, draft_top, cut, drafts = (
                x.gather(1, index) for x in (temperature, top, draft_top, cut, drafts)
            )
            if draft is not None and draft.shape[1]:
                # The last position has no draft, so the logits of any other serve.
                draft = draft[row_index, index.clamp(max=draft.shape[1] - 1)]
        for tile in _tiles(target):
            first_id = rows.first_id + tile.start
            logits = target[:, :, tile]
            mass = masses(logits, top.unsqueeze(2), temperature.unsqueeze(2))
            kept = order_words(logits, first_id) >= cut.unsqueeze(2)
            if draft is None:
                ids = torch.arange(first_id, first_id + logits.shape[2], device=logits.device)
                yield first_id, mass * kept, (ids == drafts.unsqueeze(2)) * TOP_MASS
                continue
            own = draft[:, :, tile].float()
            count = own.shape[1]
            q = masses(own, draft_top[:, :count].unsqueeze(2), temperature[:, :count].unsqueeze(2))
            q *= (own > -torch.inf) & (drafts[:, :count] >= 0).unsqueeze(2)
            yield first_id, mass * kept, F.pad(q, (0, 0, 0, logits.shape[1] - count))


def _tiles(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the columns of [B, S, V_local] that fit into the cache."""
    width = max(64, tile_elements(logits.device) // max(1, logits[:, :, :1].numel()))
    for start in range(0, logits.shape[2], width):
        yield slice(start, start + width)
