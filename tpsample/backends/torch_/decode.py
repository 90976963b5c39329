"""Words to tokens: the winner of every row, its status, and a copy of the row's seed.

    best[s, b] = max over the sources of words[source, s · B + b]        see `tpsample.core.word`

Whoever decodes words clears them, so that the next step finds zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.output import SampleOutput
from tpsample.request.plan import FilteredWords, Undrawn


def decode_words(
    words: Tensor,
    seeds: Tensor,
    out: SampleOutput,
    undrawn: Undrawn | None = None,
    filtered: FilteredWords | None = None,
) -> None:
    """Write tokens, status and seeds; clear the words.

    Args:
        undrawn: rows that have no token whatever their words are; None for none.
        filtered: the words of rows with filters, but where a rank is lost; None for no such rows.
    """
    best = words.amax(dim=0).view(-1, out.status.shape[0])
    lost = best == word.LOST
    if filtered is not None:
        own = filtered.words.T
        place = filtered.place.to(torch.int64).expand_as(best)
        found = own.gather(1, place.clamp(0, own.shape[1] - 1))
        best = found.where((place >= 0) & (place < own.shape[1]) & ~lost, best)
    token_ids, status = word.decode(best)
    status = status.masked_fill(lost, int(word.Status.PEER_LOST))
    out.token_ids.copy_(token_ids.T.reshape(out.token_ids.shape))
    out.status.copy_(status.amax(dim=0))
    out.seeds.copy_(seeds)
    words.zero_()
    if undrawn is not None:
        out.fill_skipped(*undrawn)
