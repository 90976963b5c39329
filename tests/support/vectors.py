"""Writes anew the results of the test vectors of NOISE.md and MASSES.md, beside their inputs.

    python -m tests.support.vectors

Words and floats are hexadecimal there, 64-bit integers decimal texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.commands import ROOT
from tpsample import SamplingBatch, SamplingParams, noise, reference
from tpsample.core.masses import masses_and_moments
from tpsample.core.order import least_logit
from tpsample.core.rules import ENDING
from tpsample.core.spread import spread_of, spread_sums
from tpsample.core.word import pack

Vector = dict[str, Any]


def _hex(words: Any) -> list[str]:
    return [f"{int(word):08x}" for word in words]


def _numbers(words: list[str]) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in words)


def _floats(words: list[str]) -> Tensor:
    return torch.tensor(_numbers(words)).to(torch.int32).view(torch.float32)


def _bits(numbers: Tensor) -> list[str]:
    return _hex(numbers.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF)


def _philox(row: Vector) -> Vector:
    counter, key = (_numbers(row[name]) for name in ("counter", "key"))
    words = noise.philox4x32(counter, key)  # type: ignore[type-var, arg-type]
    return {"words": _hex(words)}


def _row(row: Vector) -> Vector:
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


def _noise(row: Vector) -> Vector:
    given = (torch.tensor(_numbers([row[name]])) for name in ("word", "xor"))
    return {"noise": _bits(noise.log2_exponential(*given))[0]}


def _packed(row: Vector) -> Vector:
    packed = int(pack(_floats([row["score"]]), torch.tensor([row["token_id"]])))
    return {"word": str(packed | row["epoch"] << 52)}


def _token(row: Vector) -> Vector:
    params = SamplingParams(temperature=row["temperature"], seed=int(row["seed"]))
    batch = SamplingBatch.from_params([params], vocab_size=len(row["logits"]))
    given = torch.tensor([row["logits"]]), batch, int(row["position"])
    drawn = reference.sample(*given, num_samples=row["sample"] + 1)
    return {"token": int(drawn.token_ids[0, row["sample"]])}


def _masses(row: Vector) -> Vector:
    given = (_floats(each) for each in (row["logits"], [row["top"]], [row["temperature"]]))
    mass, moment = masses_and_moments(*given)
    return {"masses": [*map(str, mass.tolist())], "moments": [*map(str, moment.tolist())]}


def _floor(row: Vector) -> Vector:
    log_min_p = math.log(row["min_p"]) if row["min_p"] else -math.inf
    top, temperature = _floats([row["top"]]), _floats([row["temperature"]])
    floor = least_logit(top, temperature, torch.tensor([log_min_p], dtype=torch.float64))
    return {"floor": _bits(floor)[0]}


class _Facts:
    """The facts of one row. A rule gets its limit or its floor back, in place of a word."""

    def __init__(self, row: Vector) -> None:
        self.top, self.temperature = _floats([row["top"]]), _floats([row["temperature"]])
        self._logits = _floats(row["logits"])

    def total_moment(self) -> list[Tensor]:
        pair = masses_and_moments(self._logits, self.top, self.temperature)
        return [(each * (self._logits > -math.inf)).sum().view(1) for each in pair]

    def total_mass(self) -> Tensor:
        return self.total_moment()[0]

    def spread(self) -> Tensor:
        return spread_of(spread_sums(self._logits.unsqueeze(0), self.top))

    def least_of_mass(self, limit: Tensor) -> Vector:
        return {"limit": str(int(limit))}

    def least_word(self, y: Tensor, temperature: Tensor) -> Vector:
        return {"floor": _bits(least_logit(self.top, temperature, y))[0]}


def _end(row: Vector) -> Vector:
    (rule,) = (rule for rule in ENDING if rule.name == row["rule"])
    assert rule.end is not None
    number = torch.tensor([row["number"]], dtype=torch.float64)
    end: Any = rule.end(_Facts(row), number)  # type: ignore[arg-type]
    return end  # type: ignore[no-any-return]


NOISE, MASSES = (ROOT / "tpsample" / f"{name}_vectors.json" for name in ("noise", "masses"))
RESULTS: dict[Path, dict[str, Callable[[Vector], Vector]]] = {
    NOISE: {"philox": _philox, "rows": _row, "noise": _noise, "packed": _packed, "tokens": _token},
    MASSES: {"rows": _masses, "floors": _floor, "ends": _end},
}


def as_text(file: Path) -> str:
    """Return a file with the results of this package: JSON with one vector per line."""
    lines = [f'"layout": {json.dumps(noise.LAYOUT)}'] if file == NOISE else []
    vectors = json.loads(file.read_text())
    for kind, result in RESULTS[file].items():
        rows = ",\n".join(f"  {json.dumps(row | result(row))}" for row in vectors[kind])
        lines.append(f'"{kind}": [\n{rows}\n]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    for each in RESULTS:
        each.write_text(as_text(each))
