"""Hidden states to this rank's best words, by Triton, by Numba or in plain PyTorch."""

from __future__ import annotations

from tpsample.local.backend import Backend
from tpsample.local.torch_backend import TorchBackend
from tpsample.screening.int8_copy import Int8Copy
from tpsample.settings import Settings


def make_backend(settings: Settings) -> Backend:
    """Return the backend that a sampler's settings name."""
    weight, shard, rounds = settings.weight, settings.shard, settings.philox_rounds
    arguments = (weight, shard, settings.bias, settings.head)
    if settings.backend == "torch":
        return TorchBackend(*arguments, rounds=rounds)
    screened = settings.screening is not None
    if settings.backend == "numba":
        from tpsample.local.native_backend import NativeBackend  # needs Numba

        copy = Int8Copy(weight[: len(shard)]) if screened else None
        return NativeBackend(*arguments, rounds=rounds, copy=copy)
    from tpsample.local.triton_backend import TritonBackend  # needs Triton

    screen = None
    if screened:
        from tpsample.local.screen_launches import Screen

        screen = Screen(*arguments, rounds=rounds)
    max_rows = settings.max_rows
    return TritonBackend(*arguments, rounds=rounds, max_rows=max_rows, screen=screen)
