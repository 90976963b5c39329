"""The exceptions that tpsample raises beside ValueError and TypeError."""

from __future__ import annotations

from collections.abc import Sequence


class UnsupportedParameter(ValueError):
    """A parameter cannot be honoured where it was given, and none is ignored without a word."""


class RankMismatch(ValueError):
    """An argument is wrong on some rank, or ranks disagree. Every rank raises it."""


class NoToken(RuntimeError):
    """A row of a whole generation has no token: a logit is NaN, or everything is masked."""


class PeerLost(RuntimeError):
    """Ranks did not answer in time.

    Attributes:
        ranks: which ranks did not, numbered as in the sampler's group; empty if unknown.
        step: the first step whose tokens some rank may not have, counted from 0 since the sampler
            was built or reset; None where steps are not counted (NCCL, construction).
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), step: int | None = None) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.step = step


class Desync(RuntimeError):
    """Ranks sampled different tokens, or the same ones from different seeds or positions.

    Attributes:
        ranks: which ranks differ from the majority; all of them if there is none.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
