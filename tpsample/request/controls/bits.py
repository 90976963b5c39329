"""Sets of token ids as packed bits: bit v % 32 of int32 word v // 32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def num_words(vocab_size: int) -> int:
    """Return how many words of 32 bits hold a bit per id."""
    return -(-vocab_size // 32)


def pack_ids(token_ids: Iterable[int] | None, vocab_size: int) -> Tensor:
    """Return int32 [ceil(V / 32)] with the bits of these ids; None stands for all of [0, V)."""
    bits = torch.zeros(num_words(vocab_size) * 32, dtype=torch.bool, device="cpu")
    if token_ids is None:
        bits[:vocab_size] = True
    else:
        bits[torch.tensor(list(token_ids), dtype=torch.int64, device="cpu")] = True
    words = (bits.view(-1, 32).long() << torch.arange(32, device="cpu")).sum(dim=1)
    return _signed32(words)


def shard_of_bitmask(bitmask: Tensor, first_id: int, words: int) -> Tensor:
    """Return int32 [B, words]: the bits of [B, ceil(V / 32)] from `first_id` on, then zeros."""
    start, shift = divmod(first_id, 32)
    part = bitmask[:, start : start + words + 1].long() & 0xFFFFFFFF
    part = torch.nn.functional.pad(part, (0, words + 1 - part.shape[1]))
    return _signed32((part[:, 1:] << 32 | part[:, :-1]) >> shift & 0xFFFFFFFF)


def single_bit(token_ids: Tensor, first_id: int, words: int) -> Tensor:
    """Return int32 [B, words] with the bit of each row's id, int [B]; no bit for an id that is not
    among the columns from `first_id` on."""
    column = token_ids.long().unsqueeze(1) - first_id
    column = column.where(token_ids.unsqueeze(1) >= 0, -1)
    word = torch.arange(words, device=token_ids.device)
    bit = torch.ones_like(column, dtype=torch.int32) << (column & 31).to(torch.int32)
    return torch.where(column >> 5 == word, bit, 0)


def _signed32(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
