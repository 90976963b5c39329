"""Writes anew the results in the test vectors of NOISE.md, whose inputs are in the file alone.

    python -m tests.support.noise_vectors

Words and floats are hexadecimal there, 64-bit integers decimal texts.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from tests.support.commands import ROOT
from tpsample import SamplingBatch, SamplingParams, noise, reference
from tpsample.core.word import pack

FILE = ROOT / "tpsample" / "noise_vectors.json"


def _hex(words: Any) -> list[str]:
    return [f"{int(word):08x}" for word in words]


def _numbers(words: list[str]) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in words)


def _bits(numbers: Tensor) -> list[str]:
    return _hex(numbers.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF)


def _philox(row: dict[str, Any]) -> dict[str, Any]:
    counter, key = (_numbers(row[name]) for name in ("counter", "key"))
    words = noise.philox4x32(counter, key)  # type: ignore[type-var, arg-type]
    return {"words": _hex(words)}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    ids, sample = torch.tensor(row["token_ids"]), row["sample"]
    seed, position = int(row["seed"]), int(row["position"])
    stream = noise.row_stream(
        *(torch.tensor([noise.signed64(number)]) for number in (seed, position)), sample
    )
    return {
        "stream": _hex(stream[:3]),
        "words": _hex(noise.words(seed, position, ids, sample=sample)),
        "noise": _bits(noise.token_noise(stream, ids)),
    }


def _noise(row: dict[str, Any]) -> dict[str, Any]:
    given = (torch.tensor(_numbers([row[name]])) for name in ("word", "xor"))
    return {"noise": _bits(noise.log2_exponential(*given))[0]}


def _packed(row: dict[str, Any]) -> dict[str, Any]:
    score = torch.tensor(_numbers([row["score"]])).to(torch.int32).view(torch.float32)
    packed = int(pack(score, torch.tensor([row["token_id"]])))
    return {"word": str(packed | row["epoch"] << 52)}


def _token(row: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(temperature=row["temperature"], seed=int(row["seed"]))
    batch = SamplingBatch.from_params([params], vocab_size=len(row["logits"]))
    given = torch.tensor([row["logits"]]), batch, int(row["position"])
    drawn = reference.sample(*given, num_samples=row["sample"] + 1)
    return {"token": int(drawn.token_ids[0, row["sample"]])}


RESULTS = {"philox": _philox, "rows": _row, "noise": _noise, "packed": _packed, "tokens": _token}


def as_text() -> str:
    """Return the file with the results of this package: JSON with one vector per line."""
    lines = [f'"layout": {json.dumps(noise.LAYOUT)}']
    vectors = json.loads(FILE.read_text())
    for kind, result in RESULTS.items():
        rows = ",\n".join(f"  {json.dumps(row | result(row))}" for row in vectors[kind])
        lines.append(f'"{kind}": [\n{rows}\n]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text())
