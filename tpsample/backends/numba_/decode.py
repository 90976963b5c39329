"""Words to tokens as one native call. Twin: `tpsample.backends.torch_.decode`."""

from __future__ import annotations

from torch import Tensor

from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.decode import decode
from tpsample.output import SampleOutput
from tpsample.request.plan import Undrawn


def decode_words(
    words: Tensor, seeds: Tensor, out: SampleOutput, undrawn: Undrawn | None = None
) -> None:
    """Write tokens, status and seeds, also of undrawn rows; clear the words."""
    token_ids = out.token_ids.view(len(out.status), -1)
    decode(*map(array_of, (words, seeds, token_ids, out.status, out.seeds)))
    if undrawn is not None:
        out.fill_skipped(*undrawn)
