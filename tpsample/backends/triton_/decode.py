"""Words to tokens as one Triton launch. Twin: `tpsample.backends.torch_.decode`."""

from __future__ import annotations

from torch import Tensor

from tpsample.backends.torch_.room import Decode
from tpsample.backends.triton_.arguments import early_launch
from tpsample.backends.triton_.kernels.decode import decode_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.output import SampleOutput
from tpsample.request.plan import FilteredWords, Undrawn

ROW_BLOCK = 64
"""Rows of a program of the kernel."""


def decoder(*, overlap: bool = False) -> Decode:
    """Return what decodes words; with `overlap`, while the kernel before it may still run."""

    early = early_launch(overlap)

    def decode(
        words: Tensor,
        seeds: Tensor,
        out: SampleOutput,
        undrawn: Undrawn | None = None,
        filtered: FilteredWords | None = None,
    ) -> None:
        num_rows = out.status.shape[0]
        rows, bad = undrawn or (None, None)
        own, place = filtered or (None, None)
        launch_kernel(
            decode_kernel,
            (-(-num_rows // ROW_BLOCK),),
            words_ptr=words,
            stride_words_s=words.stride(0),
            seed_ptr=seeds,
            undrawn_ptr=rows,
            bad_ptr=bad,
            filtered_ptr=own,
            place_ptr=place,
            token_ptr=out.token_ids,
            status_ptr=out.status,
            out_seed_ptr=out.seeds,
            num_rows=num_rows,
            num_filtered=0 if own is None else own.shape[0],
            num_samples=words.shape[1] // num_rows,
            num_sources=words.shape[0],
            BLOCK=ROW_BLOCK,
            OVERLAP=overlap,
            **early,
        )

    return decode
