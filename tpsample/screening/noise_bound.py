"""The noise of a tile: an upper bound for all of its ids at five operations each, exact for a few.

With f = fp32(w) of an id's word w, the definition (`tpsample.noise`) has

    u >= f 2^-32 (1 − 2^-23)                 `low` is positive, and rounding is monotone
    e >= u log2 e (1 − 2e-6)                 −log2(1 − u) >= u log2 e; 2e-6 covers the polynomial
    −L <= 32 − log2 f − log2 log2 e + 1e-5   and the roundings of e and of L

and for a normal fp32 number f >= 1 its bits, read as an integer, bound the logarithm, because log2
is concave and so lies above the line through neighbouring powers of two:

    log2 f >= bits(f) 2^-23 − 127            at most 0.087 below; equal at powers of two

    −L <= NOISE_TOP − bits(f) 2^-23

f = 0 has bits 0, and the bound is then 158.5, more than any noise (48.5). No logarithm is computed,
so nothing depends on the accuracy of a library.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core.row_noise import RowNoise
from tpsample.noise import log2_exponential, quad_words

NOISE_TOP = 159.0 - math.log2(math.log2(math.e)) + 1e-5
BITS_SCALE = 2.0**-23


class Pairs(NamedTuple):
    """P pairs: int64 rows [P] and columns of a tile [P]."""

    rows: Tensor
    columns: Tensor

    def keep(self, kept: Tensor) -> Pairs:
        """Return the pairs for which bool [P] holds."""
        return Pairs(self.rows[kept], self.columns[kept])


class TileNoise:
    """The Philox words of `num_ids` ids from `first_id` on, for each row of `row_noise`."""

    def __init__(self, row_noise: RowNoise, sample: int, first_id: int, num_ids: int) -> None:
        stream = row_noise.streams[sample]
        first_quad, last_quad = first_id >> 2, (first_id + num_ids - 1) >> 2
        quad = torch.arange(first_quad, last_quad + 1, dtype=torch.int64, device=stream[0].device)
        self._words = quad_words(stream, quad, row_noise.rounds)
        self._skipped, self._num_ids = first_id - 4 * first_quad, num_ids

    def bits(self) -> Tensor:
        """Return int32 [B, n], bits(f) of every id: −L <= NOISE_TOP − bits · BITS_SCALE."""
        rows, quads = self._words[0].shape
        words = torch.empty(rows, quads, 4, dtype=torch.float32, device=self._words[0].device)
        for place, word in enumerate(self._words):
            words[..., place].copy_(word)
        ids = words.view(rows, 4 * quads).narrow(1, self._skipped, self._num_ids)
        return ids.view(torch.int32)

    def exact(self, pairs: Pairs) -> Tensor:
        """Return L as the definition has it, fp32 [P]."""
        place = pairs.columns + self._skipped
        row, of_quad = pairs.rows, place >> 2
        quad = torch.stack([word[row, of_quad] for word in self._words])
        word = quad.gather(0, (place & 3).unsqueeze(0)).squeeze(0)
        return log2_exponential(word, quad[0] ^ quad[1] ^ quad[2] ^ quad[3])
