"""The exceptions tpsample raises beside ValueError and TypeError."""

from __future__ import annotations

from collections.abc import Sequence


class UnsupportedParameter(ValueError):
    """A sampling parameter this version cannot honour. Nothing is ever ignored silently."""


class RankMismatch(ValueError):
    """An argument is wrong on some rank, or ranks disagree; raised on every rank alike."""


class PeerLost(RuntimeError):
    """Ranks did not answer in time.

    Attributes:
        ranks: who did not, in the numbering of the sampler's group; empty if that is unknown.
        step: first step whose tokens not every rank may have, counted from 0 since the sampler was
            built or reset; None where steps are not counted (NCCL, construction).
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), step: int | None = None) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.step = step


class Desync(RuntimeError):
    """Ranks sampled different tokens, or the same ones from different seeds or positions.

    Attributes:
        ranks: who differs from most of the others; all of them if there is no majority.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
