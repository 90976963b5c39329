"""Words to tokens: the winner of every row, its status, and a copy of the row's seed.

    best[s, b] = max over the sources of words[source, s · B + b]        see `tpsample.core.word`

Whoever decodes words clears them, so that the next step finds zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from tpsample.core import word
from tpsample.output import SampleOutput

Decode: TypeAlias = Callable[[Tensor, Tensor, SampleOutput], None]
"""Words int64 [sources, num_samples · B] and seeds int64 [B] into an output."""

ROW_BLOCK = 64
"""Rows of a program of the kernel."""


def decoder(backend: str, *, overlap: bool = False) -> Decode:
    """Return what decodes words beside a backend: one Triton launch, one native call, or
    their plain twin.

    Args:
        overlap: whether the launch may come before the kernel that makes the words has ended.
            Only for words that no collective moves in between.
    """
    if backend == "triton":
        from tpsample.kernels import decode as kernels  # needs Triton

        def decode_by_kernel(words: Tensor, seeds: Tensor, out: SampleOutput) -> None:
            num_rows = out.status.shape[0]
            kernels.decode_kernel[(-(-num_rows // ROW_BLOCK),)](
                words_ptr=words,
                stride_words_s=words.stride(0),
                seed_ptr=seeds,
                token_ptr=out.token_ids,
                status_ptr=out.status,
                out_seed_ptr=out.seeds,
                num_rows=num_rows,
                num_samples=words.shape[1] // num_rows,
                num_sources=words.shape[0],
                BLOCK=ROW_BLOCK,
                OVERLAP=overlap,
                launch_pdl=overlap,
            )

        return decode_by_kernel
    if backend == "numba":
        from tpsample.native.arrays import array_of  # needs Numba
        from tpsample.native.decode import decode

        def decode_natively(words: Tensor, seeds: Tensor, out: SampleOutput) -> None:
            token_ids = out.token_ids.view(len(out.status), -1)
            decode(*map(array_of, (words, seeds, token_ids, out.status, out.seeds)))

        return decode_natively
    return decode_words


def decode_words(words: Tensor, seeds: Tensor, out: SampleOutput) -> None:
    """Write tokens, status and seeds; clear the words."""
    rows = out.status.shape[0]
    token_ids, status = word.decode(words.amax(dim=0).view(-1, rows))
    out.token_ids.copy_(token_ids.T.reshape(out.token_ids.shape))
    out.status.copy_(status.amax(dim=0))
    out.seeds.copy_(seeds)
    words.zero_()
