"""Hidden states to this rank's best words, by Triton launches or in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tpsample.core.score import Head
from tpsample.core.vocab_shard import VocabShard
from tpsample.local.backend import Backend
from tpsample.local.screened_backend import ScreenedBackend
from tpsample.local.torch_backend import TorchBackend


def make_backend(
    name: str,
    weight: Tensor,
    shard: VocabShard,
    bias: Tensor | None,
    head: Head,
    rounds: int,
    max_rows: int,
) -> Backend:
    """Return the backend called "torch" or "triton"; arguments as for those."""
    if name == "torch":
        # The screen reads what it finds on the host, which on a GPU would wait for the device.
        kind = ScreenedBackend if weight.device.type == "cpu" else TorchBackend
        return kind(weight, shard, bias, head, rounds=rounds)
    from tpsample.local.triton_backend import TritonBackend  # needs Triton

    return TritonBackend(weight, shard, bias, head, rounds=rounds, max_rows=max_rows)
