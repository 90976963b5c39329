"""Words to tokens as one native call. Twin: `tpsample.backends.torch_.decode`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tpsample.backends.numba_.kernels.arrays import array_of, arrays_of
from tpsample.backends.numba_.kernels.decode import decode
from tpsample.output import SampleOutput
from tpsample.request.plan import FilteredWords, Undrawn

NONE = np.empty((0, 1), np.int64), np.empty(0, np.int32)
"""The words of no filtered rows, and no places."""


def decode_words(
    words: Tensor,
    seeds: Tensor,
    out: SampleOutput,
    undrawn: Undrawn | None = None,
    filtered: FilteredWords | None = None,
) -> None:
    """Write tokens, status and seeds, also of undrawn and of filtered rows; clear the words."""
    token_ids = out.token_ids.view(len(out.status), -1)
    own = NONE if filtered is None else arrays_of(filtered)
    decode(*map(array_of, (words, seeds)), *own, *map(array_of, (token_ids, out.status, out.seeds)))
    if undrawn is not None:
        out.fill_skipped(*undrawn)
