"""Words to tokens as one Triton launch. Twin: `tpsample.exchange.decode.decode_words`."""

from __future__ import annotations

from torch import Tensor

from tpsample.kernels.decode import decode_kernel
from tpsample.output import SampleOutput

ROW_BLOCK = 64


def decode_by_kernel(
    words: Tensor,
    seeds: Tensor,
    out: SampleOutput,
    *,
    overlap: bool = False,
) -> None:
    """Write tokens, status and seeds; clear the words."""
    num_rows = out.status.shape[0]
    decode_kernel[(-(-num_rows // ROW_BLOCK),)](
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
