"""Hidden states to this rank's best words, by Triton, by Numba or in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tpsample.core.score import Head
from tpsample.core.vocab_shard import VocabShard
from tpsample.local.backend import Backend
from tpsample.local.torch_backend import TorchBackend
from tpsample.screening.int8_copy import Int8Copy


def make_backend(
    name: str,
    weight: Tensor,
    shard: VocabShard,
    bias: Tensor | None,
    head: Head,
    rounds: int,
    max_rows: int,
    screening: str | None = None,
) -> Backend:
    """Return the backend called "torch", "numba" or "triton".

    Args:
        screening: as `LMHeadSampler` takes it; the others are those of the backends.
    """
    if name == "torch":
        return TorchBackend(weight, shard, bias, head, rounds=rounds)
    if name == "numba":
        from tpsample.local.native_backend import NativeBackend  # needs Numba

        copy = None if screening is None else Int8Copy(weight[: len(shard)])
        return NativeBackend(weight, shard, bias, head, rounds=rounds, max_rows=max_rows, copy=copy)
    from tpsample.local.triton_backend import TritonBackend  # needs Triton

    screen = None
    if screening is not None:
        from tpsample.local.screen_launches import Screen

        screen = Screen(weight, shard, bias, head, rounds=rounds)
    return TritonBackend(weight, shard, bias, head, rounds=rounds, max_rows=max_rows, screen=screen)
