"""Hidden states to this rank's best words, by Triton, by Numba or in plain PyTorch."""

from __future__ import annotations

from tpsample.local.backend import Backend
from tpsample.local.torch_backend import TorchBackend
from tpsample.settings import Settings


def make_backend(settings: Settings) -> Backend:
    """Return the backend that a sampler's settings name."""
    if settings.backend == "torch":
        return TorchBackend(settings)
    if settings.backend == "numba":
        from tpsample.local.native_backend import NativeBackend  # needs Numba

        return NativeBackend(settings)
    from tpsample.local.triton_backend import TritonBackend  # needs Triton

    return TritonBackend(settings)
