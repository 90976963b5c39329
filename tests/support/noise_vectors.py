"""Writes the test vectors of NOISE.md: `python -m tests.support.noise_vectors`."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from tests.support.commands import ROOT
from tpsample import SamplingBatch, SamplingParams, noise, reference
from tpsample.core.word import pack

FILE = ROOT / "tpsample" / "noise_vectors.json"

_PHILOX = (
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
)
_ROWS = (
    (0, 0, 0, 10),
    (1, 17, 0, 10),
    (1, 17, 0, 7),
    (1, 17, 3, 10),
    (-2, 5, 0, 10),
    (2**63 + 12345, 2**40 + 9, 1, 10),
)
_IDS = (0, 1, 2, 3, 4, 7, 1000, 49151, 128255, 2**20 - 1)
_WORDS = ((0, 0), (0, 0xFFFF), (1, 1), (2**30 - 1, 5), (2**30, 5), (2**31, 0), (2**32 - 1, 0))
_PACKED = (
    *((0.0, 0, 0), (-0.0, 0, 0), (1.5, 7, 0), (-1.5, 7, 0), (1.5, 2**20 - 1, 3)),
    *((float("inf"), 9, 0), (float("-inf"), 9, 2046), (float("nan"), 4, 1)),
)
_TOKENS = ((0.0, 0), (1.0, 0), (0.7, 1), (1.3, 2))


def _hex(words: Any) -> list[str]:
    return [f"{int(word):08x}" for word in words]


def _bits(numbers: Tensor) -> list[str]:
    return _hex(numbers.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF)


def _philox(rounds: int, counter: str, key: str) -> dict[str, Any]:
    given = [[int(word, 16) for word in text.split()] for text in (counter, key)]
    words = noise.philox4x32(tuple(given[0]), tuple(given[1]), rounds)  # type: ignore[type-var]
    return {
        "rounds": rounds,
        "counter": counter.split(),
        "key": key.split(),
        "words": _hex(words),
    }


def _row(seed: int, position: int, sample: int, rounds: int) -> dict[str, Any]:
    ids = torch.tensor(_IDS)
    at = [torch.tensor([noise.signed64(number)]) for number in (seed, position)]
    stream = noise.row_stream(*at, sample)
    return {
        "seed": str(seed),
        "position": str(position),
        "sample": sample,
        "rounds": rounds,
        "stream": _hex(stream[:3]),
        "token_ids": list(_IDS),
        "words": _hex(noise.words(seed, position, ids, sample=sample, rounds=rounds)),
        "noise": _bits(noise.token_noise(stream, ids, rounds)),
    }


def _noise(word: int, xor: int) -> dict[str, Any]:
    found = noise.log2_exponential(torch.tensor([word]), torch.tensor([xor]))
    return {"word": f"{word:08x}", "xor": f"{xor:08x}", "noise": _bits(found)[0]}


def _packed(score: float, token_id: int, epoch: int) -> dict[str, Any]:
    packed = int(pack(torch.tensor(score), torch.tensor(token_id))) | epoch << 52
    bits = _bits(torch.tensor([score]))[0]
    return {"score": bits, "token_id": token_id, "epoch": epoch, "word": str(packed)}


def _token(temperature: float, sample: int) -> dict[str, Any]:
    """A draw among 40 logits that are exact in fp32, two of them equal and largest."""
    logits = [((7 * i) % 23) / 4 - 3 for i in range(40)]
    params = SamplingParams(temperature=temperature, seed=2026)
    batch = SamplingBatch.from_params([params], vocab_size=len(logits))
    drawn = reference.sample(torch.tensor([logits]), batch, 11, num_samples=sample + 1)
    return {
        "temperature": temperature,
        "seed": "2026",
        "position": "11",
        "sample": sample,
        "rounds": 10,
        "logits": logits,
        "token": int(drawn.token_ids[0, sample]),
    }


def vectors() -> dict[str, Any]:
    """Return all test vectors. Words and floats are hexadecimal, 64-bit integers decimal texts."""
    return {
        "layout": noise.LAYOUT,
        "philox": [_philox(*each) for each in _PHILOX],
        "rows": [_row(*each) for each in _ROWS],
        "noise": [_noise(*each) for each in _WORDS],
        "packed": [_packed(*each) for each in _PACKED],
        "tokens": [_token(*each) for each in _TOKENS],
    }


def as_text() -> str:
    """Return the file: JSON with one vector per line."""
    lines = []
    for name, value in vectors().items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f'"{name}": [\n{rows}\n]')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text())
