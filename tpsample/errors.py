"""The exceptions tpsample raises beside ValueError and TypeError."""

from __future__ import annotations


class UnsupportedParameter(ValueError):
    """A sampling parameter this version cannot honour. Nothing is ever ignored silently."""


class RankMismatch(ValueError):
    """An argument is wrong on some rank, or ranks disagree; raised on every rank alike."""


class PeerLost(RuntimeError):
    """A rank did not answer in time; the tokens of that step are -1."""
