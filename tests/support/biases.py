"""Defects to plant into the torch backend, each as a real implementation would have it.

Every one leaves the definition (`tpsample.reference`) alone but for the noise itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tpsample import VocabShard, noise
from tpsample.core import score
from tpsample.core.row_noise import RowNoise
from tpsample.local import torch_backend
from tpsample.local.torch_backend import TorchBackend
from tpsample.request.step import Step


def noise_ends_at_16_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 -log(-log(rand)): uniforms 2^-24 apart at the winning end, none above 1 - 2^-24."""

    def log2_exponential(word: Tensor, quad_xor: Tensor) -> Tensor:
        uniform = (1.0 - word.float() * 2.0**-32).clamp(max=1.0 - 2.0**-24, min=2.0**-31)
        return torch.log2(-torch.log2(uniform))

    monkeypatch.setattr(noise, "log2_exponential", log2_exponential)


def noise_by_local_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of the index inside the shard in place of the token id."""
    _shift_noise(monkeypatch, lambda shard: -shard.start)


def noise_shared_by_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that starts halfway has the noise of the one that starts at 0."""
    _shift_noise(monkeypatch, lambda shard: -shard.start if shard.start == len(shard) else 0)


def padding_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row behind the shard takes part."""
    _change_shard(
        monkeypatch,
        lambda shard, rows: VocabShard(shard.start, min(shard.stop + 1, shard.start + rows)),
    )


def shard_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank but the first takes its rows for those one id further on."""
    _change_shard(
        monkeypatch,
        lambda shard, rows: VocabShard(shard.start + 1, shard.stop + 1) if shard.start else shard,
    )


def _shift_noise(monkeypatch: pytest.MonkeyPatch, shift: Callable[[VocabShard], int]) -> None:
    true_run = TorchBackend.best_words

    def run(self: TorchBackend, step: Step, words: Tensor, *parts) -> None:
        def score_tile(logits: Tensor, first_id: int, rows: RowNoise, sample: int) -> Tensor:
            return score.score_tile(logits, first_id + shift(self._shard), rows, sample)

        with monkeypatch.context() as patch:
            patch.setattr(torch_backend, "score_tile", score_tile)
            true_run(self, step, words, *parts)

    monkeypatch.setattr(TorchBackend, "best_words", run)


def _change_shard(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[VocabShard, int], VocabShard]
) -> None:
    true_init = TorchBackend.__init__

    def init(self: TorchBackend, weight: Tensor, shard: VocabShard, *args, **kwargs) -> None:
        true_init(self, weight, change(shard, weight.shape[0]), *args, **kwargs)

    monkeypatch.setattr(TorchBackend, "__init__", init)
