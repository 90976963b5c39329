"""Drafts have to be draws from the law that was passed with them, or nobody's law comes out.

A draw x of the law q has log q(x) = -entropy on average, with the variance of log q. The sum of the
differences over many drafts is counted in its standard deviations. It is far from 0 only if the
drafts are those of another temperature, of a filtered law, or an argmax.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tpsample.backends.torch_.verification import Laws, Verification
from tpsample.core.tensors import readable
from tpsample.sampler import LMHeadSampler

LOOKS = 32
"""Verifications that are looked at, as far as each has a random draft."""
FAR = 6.0
"""Standard deviations that a right law exceeds once in 5 · 10⁸ times."""


class DrawnDrafts:
    """The evidence on drafts of a sampler's first verifications, on one rank of a CPU."""

    def __init__(self, looks: int) -> None:
        self._looks, self._sum, self._variance = looks, 0.0, 0.0

    def are_of_another_law(self, verification: Verification, laws: Laws, sums: Tensor) -> bool:
        """Look at drafts, and return whether those so far are no draws of their law; once.

        Args:
            verification: with the logits of the drafts.
            sums: of all ranks, as `Verification.sums` makes them.
        """
        if self._looks == 0 or not readable(laws.drafts.device):
            return False
        random = verification.rows.noise.random.view(laws.drafts.shape) & (laws.drafts >= 0)
        if not bool(random.any()):
            return False
        self._looks -= 1
        total = sums[2].clamp(min=1).double()
        mean = torch.zeros_like(total)
        square = torch.zeros_like(mean)
        for _, _, draft in verification.mass_tiles(laws):
            q = draft.double() / total.unsqueeze(2)
            log = q.clamp(min=torch.finfo(q.dtype).tiny).log()
            mean += (q * log).sum(dim=2)
            square += (q * log.square()).sum(dim=2)
        own = (sums[3].double() / total).clamp(min=1e-300).log()
        self._sum += float((own - mean)[random].sum())
        self._variance += float((square - mean.square())[random].clamp(min=0).sum())
        if self._variance < 1 or abs(self._sum) < FAR * self._variance**0.5:
            return False
        self._looks = 0
        return True


_OF_SAMPLERS: WeakKeyDictionary[LMHeadSampler, DrawnDrafts] = WeakKeyDictionary()


def drawn_drafts(sampler: LMHeadSampler) -> DrawnDrafts:
    """Return what the verifications of a sampler have shown so far. On several ranks, which have
    parts of the laws, nothing is looked at."""
    if sampler not in _OF_SAMPLERS:
        _OF_SAMPLERS[sampler] = DrawnDrafts(LOOKS if sampler.ranks.world_size == 1 else 0)
    return _OF_SAMPLERS[sampler]


OTHER_LAW = (
    "draft_logits: the drafts are no draws of these logits at the temperature of their rows, so "
    "the tokens follow no law; pass the list that sample_draft returned, or no logits for an argmax"
)
