"""Words to tokens in one native call; see `tpsample.exchange.decode`."""

from __future__ import annotations

from torch import Tensor

from tpsample.native.compiling import call
from tpsample.native.decode import decode
from tpsample.output import SampleOutput


def decode_natively(words: Tensor, seeds: Tensor, out: SampleOutput) -> None:
    """Write tokens, status and seeds; clear the words."""
    token_ids = out.token_ids.numpy()
    call(
        decode,
        words.is_contiguous(),
        words.numpy(),
        seeds.numpy(),
        token_ids.reshape(len(token_ids), -1) if token_ids.ndim == 1 else token_ids,
        out.status.numpy(),
        out.seeds.numpy(),
    )
