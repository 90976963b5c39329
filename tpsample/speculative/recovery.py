"""The token behind the accepted drafts: a draw from the residual, by Gumbel-max.

    argmax over v of log2 max(c · p_v - q_v, 0) - L_v        L the noise of the recovery domain

Where there was no draft q = 0, so this is a draw from the target: the bonus token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.order import order_words
from tpsample.noise import tile_noise
from tpsample.ranks.ranks import Ranks
from tpsample.speculative.laws import Laws


def recovered(
    laws: Laws, coefficient: Tensor, stream: tuple[Tensor, ...], rounds: int, ranks: Ranks
) -> Tensor:
    """Return the tokens, int64 [B], -1 where the status is not OK. Collective: one gather.

    Args:
        laws: at one position of each row.
        coefficient: float64 [B].
        stream: row stream of each row, int64 [B] tensors.
        rounds: Philox rounds.
    """
    best = torch.zeros_like(laws.drafts)
    streams = tuple(r.view(-1, 1, 1) for r in stream)
    for first_id, residual in laws.residual_tiles(coefficient.unsqueeze(1)):
        noise = tile_noise(streams, first_id, residual.shape[2], rounds)
        words = order_words(recovery_scores(residual, noise), first_id)
        best = best.maximum(words.amax(dim=2))
    token_ids, _ = word.decode(ranks.gather_integers(best).amax(dim=0))
    return token_ids.where(laws.status == word.Status.OK, word.NO_TOKEN).squeeze(1)


def recovery_scores(residual: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 scores, rounded once; -inf where the residual is 0."""
    return (residual.log2() - noise.double()).float()
