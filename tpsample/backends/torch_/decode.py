"""Words to tokens: the winner of every row, its status, and a copy of the row's seed.

    best[s, b] = max over the sources of words[source, s · B + b]        see `tpsample.core.word`

Whoever decodes words clears them, so that the next step finds zeros.
"""

from __future__ import annotations

from torch import Tensor

from tpsample.core import word
from tpsample.output import SampleOutput
from tpsample.request.plan import Undrawn


def decode_words(
    words: Tensor, seeds: Tensor, out: SampleOutput, undrawn: Undrawn | None = None
) -> None:
    """Write tokens, status and seeds; clear the words.

    Args:
        undrawn: rows that have no token whatever their words are; None for none.
    """
    rows = out.status.shape[0]
    token_ids, status = word.decode(words.amax(dim=0).view(-1, rows))
    out.token_ids.copy_(token_ids.T.reshape(out.token_ids.shape))
    out.status.copy_(status.amax(dim=0))
    out.seeds.copy_(seeds)
    words.zero_()
    if undrawn is not None:
        out.fill_skipped(*undrawn)
