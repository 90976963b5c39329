"""Implements NOISE.md in numpy alone, and checks the test vectors with it.

    python noise_checker.py noise_vectors.json

Nothing of tpsample or torch is imported: whoever implements the layout elsewhere may start here.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

COEFFICIENTS = (
    1.4426958560943604,
    0.7211766839027405,
    0.4861740469932556,
    0.30503642559051514,
    0.5137483477592468,
)
LAST_BITS = 4e-6
"""How far noise may be off where an implementation takes another log2."""


def philox(counter: Any, key: Any) -> list[Any]:
    """Philox4x32-10: four words of a counter of four words, which broadcast, and a key of two."""
    words = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    (c0, c1, c2, c3), (k0, k1) = words, map(int, key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def halves(number: int) -> tuple[int, int]:
    """The low and the high 32 bits of 64, given signed or unsigned."""
    number %= 2**64
    return number % 2**32, number >> 32


def row_stream(seed: int, position: int, sample: int) -> list[int]:
    """The words that name a row's stream; the fourth is not used."""
    counter = (*halves(position), sample, 0x7470536D)
    return [int(word) for word in philox(counter, halves(seed))[:3]]


def words(stream: list[int], ids: Any) -> tuple[Any, Any]:
    """Each token's word, and the XOR of the four words of its quad."""
    ids = np.asarray(ids, np.int64)
    quad = philox(((ids >> 2).astype(np.uint64), *stream), (0x1BD11BDA, 0xA9FC1A22))
    return np.choose(ids & 3, quad), quad[0] ^ quad[1] ^ quad[2] ^ quad[3]


def fp32(x: Any) -> Any:
    """Round float64 to fp32 once, and go on in float64."""
    return np.asarray(x, np.float32).astype(np.float64)


def noise(word: Any, quad_xor: Any) -> Any:
    """L of each word, fp32."""
    low = ((quad_xor ^ word) & np.uint64(0xFFFF)).astype(np.float64) * 2.0**-48 + 2.0**-49
    u = fp32(fp32(word) * (2.0**-32 * (1 - 2.0**-24)) + low)
    p = np.full_like(u, COEFFICIENTS[4])
    for coefficient in COEFFICIENTS[3::-1]:
        p = fp32(p * u + coefficient)
    e = np.where(u < 0.25, fp32(u * p), -fp32(np.log2(fp32(1 - u))))
    return np.log2(e).astype(np.float32)


def pack(score: Any, ids: Any, epoch: int = 0) -> list[int]:
    """The candidate word of each (score, id)."""
    bits = (np.asarray(score, np.float32) + np.float32(0)).view(np.uint32).astype(np.int64)
    key = np.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    key = np.where(np.isnan(score), 0xFFFFFFFF, key)
    ids = np.asarray(ids, np.int64)
    return [int(word) for word in epoch << 52 | key << 20 | (2**20 - 1 - ids)]


def scores(row: dict[str, Any]) -> Any:
    """fp32 scores of a row's logits."""
    logits = np.asarray(row["logits"], np.float32).astype(np.float64)
    temperature = np.float32(row["temperature"])
    if temperature < np.float32(1e-5):
        return logits.astype(np.float32)
    stream = row_stream(int(row["seed"]), int(row["position"]), row["sample"])
    found = noise(*words(stream, np.arange(len(logits))))
    scale = np.float32(math.log2(math.e) / float(temperature))
    return (logits * float(scale) - found.astype(np.float64)).astype(np.float32)


def _bits(numbers: Any) -> list[str]:
    return [f"{bits:08x}" for bits in np.asarray(numbers, np.float32).view(np.uint32)]


def _floats(bits: list[str]) -> Any:
    return np.array([int(each, 16) for each in bits], np.uint32).view(np.float32)


def check(vectors: dict[str, Any]) -> int:
    """Check all vectors, and return how many there are; AssertionError names one that is wrong."""
    assert vectors["layout"] == "tps-philox-v1"
    for row in vectors["philox"]:
        found = philox([int(c, 16) for c in row["counter"]], [int(k, 16) for k in row["key"]])
        assert [f"{int(word):08x}" for word in found] == row["words"], row
    for row in vectors["rows"]:
        stream = row_stream(int(row["seed"]), int(row["position"]), row["sample"])
        assert [f"{word:08x}" for word in stream] == row["stream"], row
        found, quad_xor = words(stream, row["token_ids"])
        assert [f"{int(word):08x}" for word in found] == row["words"], row
        difference = np.abs(noise(found, quad_xor) - _floats(row["noise"]))
        assert difference.max() <= LAST_BITS, row
    for row in vectors["noise"]:
        word, quad_xor = (np.array([int(row[name], 16)], np.uint64) for name in ("word", "xor"))
        assert np.abs(noise(word, quad_xor) - _floats([row["noise"]])).max() <= LAST_BITS, row
    for row in vectors["packed"]:
        score = _floats([row["score"]])
        assert pack(score, [row["token_id"]], row["epoch"]) == [int(row["word"])], row
    for row in vectors["tokens"]:
        found = scores(row)
        best = max(pack(found, np.arange(len(found))))
        assert 2**20 - 1 - best % 2**20 == row["token"], row
    return sum(len(rows) for rows in vectors.values() if isinstance(rows, list))


if __name__ == "__main__":
    print(f"{check(json.loads(Path(sys.argv[1]).read_text()))} test vectors hold")
