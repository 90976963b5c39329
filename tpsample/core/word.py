"""A candidate (score, token id) packed into one int64, so that integer max is argmax.

    bits 62…52  epoch, 1 … 2046 (0 outside the `peer` exchange)
    bits 51…20  key(score), the order-preserving map of fp32 to unsigned 32 bits
    bits 19…0   2^20 - 1 - token id, so that of equal scores the lowest id wins

    >>> pack(torch.tensor(0.0), torch.tensor(7)).item() == (0x80000000 << 20) | (2**20 - 8)
    True

The map flips all bits of a negative float and the sign bit of a positive one; -0.0 becomes +0.0
first, and every NaN gets the largest key, so that a NaN anywhere in a row wins and every rank sees
it. Words are never negative, so stores, NCCL, gloo and CPUs agree on the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from tpsample.core.caller_warning import warn

TOKEN_BITS = 20
KEY_BITS = 32
EPOCH_SHIFT = TOKEN_BITS + KEY_BITS
EPOCH_MAX = 2**11 - 2
MAX_VOCAB_SIZE = 2**TOKEN_BITS
TOKEN_MASK = MAX_VOCAB_SIZE - 1

KEY_NAN = 0xFFFFFFFF
KEY_MINUS_INF = 0x007FFFFF
LOWEST_DRAWABLE = (KEY_MINUS_INF + 1) << TOKEN_BITS
"""The least word of a candidate that may be drawn, because its logit or score is above -inf."""
NO_TOKEN = -1
LOST = 2**63 - 1
"""Larger than every word of every epoch, so that it wins: a rank is lost."""


class Status(IntEnum):
    """It says whether a row has a token, and if not, why not; it is the same on all ranks."""

    OK = 0
    NAN = 1
    """A logit of the row is NaN, or a product of its hidden states overflowed to +inf; token -1."""
    EMPTY = 2
    """Every token of the row is masked (logit -inf); token -1."""
    PEER_LOST = 3
    """A rank did not answer in time; token -1."""
    BAD_SLOT = 4
    """The row of a selection names a slot that is not there, has no request, or was named before;
    token -1."""


def warn_of_failed(status: Sequence[int]) -> None:
    """Warn of the first row of a step that has no token, because -1 is an index, too."""
    row, code = next((row, code) for row, code in enumerate(status) if code != Status.OK)
    warn(
        f"status: row {row} has no token but -1, status {_NAMES.get(code, code)}, and "
        "embedding[-1] reads the last row; look at out.status, or build the sampler with "
        "on_failed= an id",
    )


_NAMES = {status.value: status.name for status in Status}


def key(score: Tensor) -> Tensor:
    """Map fp32 scores to int64 0 … 2^32 - 1, keeping their order."""
    bits = (score.float() + 0.0).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    ordered = torch.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return torch.where(score.isnan(), KEY_NAN, ordered)


def pack(score: Tensor, token_id: Tensor) -> Tensor:
    """Return words of (score, global token id), epoch 0; the arguments broadcast."""
    return (key(score) << TOKEN_BITS) | (TOKEN_MASK - token_id)


def key_of(word: Tensor) -> Tensor:
    """Return the 32-bit key of each word."""
    return (word >> TOKEN_BITS) & 0xFFFFFFFF


def value_of(word: Tensor) -> Tensor:
    """Return the fp32 number of each word's key; NaN for KEY_NAN, -inf for no word, 0."""
    word_key = key_of(word).clamp(min=KEY_MINUS_INF)
    bits = torch.where(word_key >> 31 == 1, word_key ^ 0x80000000, word_key ^ 0xFFFFFFFF)
    return torch.where(bits >> 31 == 1, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def token_of(word: Tensor) -> Tensor:
    """Return the global token id of each word."""
    return TOKEN_MASK - (word & TOKEN_MASK)


def decode(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids, int64, and status, int32, of winning words; -1 unless the status is OK."""
    word_key = key_of(word)
    nan, empty = word_key == KEY_NAN, word_key <= KEY_MINUS_INF
    token_ids = torch.where(nan | empty, NO_TOKEN, token_of(word))
    status = torch.where(nan, int(Status.NAN), torch.where(empty, int(Status.EMPTY), 0))
    return token_ids, status.to(torch.int32)
