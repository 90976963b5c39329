"""Hidden states to this rank's best words, and passes over stored logits, by three backends.

The definition is plain PyTorch (`torch_`); Triton (`triton_`) and Numba (`numba_`) return its
words. A room has the same files in each: `launch`, `passes`, `decode`, and what they call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from tpsample.backends.backend import Backend
from tpsample.backends.torch_.decode import decode_words
from tpsample.backends.torch_.drafts import draft_words
from tpsample.backends.torch_.launch import TorchBackend
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.torch_.verification import Verification
from tpsample.core.row_noise import RowNoise
from tpsample.output import SampleOutput
from tpsample.settings import Settings

Decode: TypeAlias = Callable[[Tensor, Tensor, SampleOutput], None]
"""Words int64 [sources, num_samples · B] and seeds int64 [B] into an output."""


def make_backend(settings: Settings) -> Backend:
    """Return the backend that a sampler's settings name."""
    if settings.backend == "torch":
        return TorchBackend(settings)
    if settings.backend == "numba":
        from tpsample.backends.numba_.launch import NativeBackend  # needs Numba

        return NativeBackend(settings)
    from tpsample.backends.triton_.launch import TritonBackend  # needs Triton

    return TritonBackend(settings)


def passes_of(backend: str) -> type[ShardLogits]:
    """Return the passes over stored logits of a backend."""
    if backend == "triton":
        from tpsample.backends.triton_.passes import TritonShardLogits  # needs Triton

        return TritonShardLogits
    if backend == "numba":
        from tpsample.backends.numba_.passes import NativeShardLogits  # needs Numba

        return NativeShardLogits
    return ShardLogits


def verification_of(backend: str) -> type[Verification]:
    """Return the passes and the arithmetic of a verification by ratio of a backend."""
    if backend == "triton":
        from tpsample.backends.triton_.verification import TritonVerification  # needs Triton

        return TritonVerification
    if backend == "numba":
        from tpsample.backends.numba_.verification import NativeVerification  # needs Numba

        return NativeVerification
    return Verification


def draft_words_of(backend: str) -> Callable[[Tensor, int, RowNoise, int, int], Tensor]:
    """Return what draws from a drafter's logits in a backend."""
    if backend == "triton":
        from tpsample.backends.triton_ import drafts as launched  # needs Triton

        return launched.draft_words
    if backend == "numba":
        from tpsample.backends.numba_ import drafts as native  # needs Numba

        return native.draft_words
    return draft_words


def decoder(backend: str, *, overlap: bool = False) -> Decode:
    """Return what decodes words beside a backend: one launch, one native call, or their twin.

    Args:
        backend: its name.
        overlap: whether the launch may come before the kernel that makes the words has ended.
            Only for words that no collective moves in between.
    """
    if backend == "triton":
        from tpsample.backends.triton_.decode import launches  # needs Triton

        return launches(overlap=overlap)
    if backend == "numba":
        from tpsample.backends.numba_.decode import decode_natively  # needs Numba

        return decode_natively
    return decode_words
