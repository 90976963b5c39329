"""Digests of 64 bits that ranks compare: of tensors where they are, and of texts on the host.

On a device a digest is made by `mix`, the finaliser of SplitMix64 (Steele et al., OOPSLA 2014).
That is a bijection, so two tensors that differ in one element never have the same digest. On the
host it is BLAKE2b.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# The constants of SplitMix64 as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their number of bytes."""

_FEW = 4096
"""Elements of a tensor that the host reads one by one."""


_AT_ONCE = 2**18
"""Elements that are mixed at once: 2 MB of int64, in up to five tensors."""


def digest_rows(*columns: Tensor, first: int = 0) -> Tensor:
    """Return an int64 scalar of integer tensors [B], in which the order of rows and columns counts.

    The rows are summed modulo 2^64, so the order in which a device adds them does not count.

    Args:
        first: the number of the first row.
    """
    rows = torch.arange(first, first + len(columns[0]), device=columns[0].device) + _GOLDEN
    digest = mix(rows)
    for column in columns:
        digest = mix(digest + column)
    return digest.sum()


def column_factors(num_columns: int, device: torch.device) -> Tensor:
    """Return odd int64 [num_columns], the factors of the columns in `sum_rows`."""
    return mix(torch.arange(num_columns, dtype=torch.int64, device=device)) | 1


def sum_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Return int64 [n], sums over the bits of each row of [n, D], whatever the dtype.

    It takes two operators, and any change of a single element changes the sum.
    """
    return (rows.view(_INTEGERS[rows.element_size()]) * factors).sum(dim=1)


def digest_bits(tensor: Tensor) -> int:
    """Return a signed 64-bit integer of a tensor's bits, whatever its dtype, and of their number.

    The host hashes a few elements, because that takes less time than small operators; many are
    mixed.
    """
    flat = tensor.detach().contiguous().view(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    if flat.numel() <= _FEW:
        return digest_text(str(flat.tolist()))
    parts = enumerate(flat.split(_AT_ONCE))
    digests = [digest_rows(part.to(torch.int64), first=i * _AT_ONCE) for i, part in parts]
    return int(torch.stack(digests).sum())


def digest_text(text: str) -> int:
    """Return a signed 64-bit integer of a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mix(x: Tensor) -> Tensor:
    """Map 64 bits to 64 bits one to one, each input bit moving half the output bits."""
    for shift, factor in _FACTORS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 as if it were unsigned; its own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
