"""Writes anew the results in the test vectors of MASSES.md, whose inputs are in the file alone.

python -m tests.support.masses_vectors
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from tests.support.commands import ROOT
from tpsample.core.masses import masses_and_moments
from tpsample.core.order import least_logit

FILE = ROOT / "tpsample" / "masses_vectors.json"


def _floats(bits: list[str]) -> Tensor:
    numbers = torch.tensor([int(each, 16) for each in bits])
    return numbers.to(torch.int32).view(torch.float32)


def _row(its: dict[str, Any]) -> dict[str, Any]:
    given = (_floats(each) for each in (its["logits"], [its["top"]], [its["temperature"]]))
    mass, moment = masses_and_moments(*given)
    return {"masses": [*map(str, mass.tolist())], "moments": [*map(str, moment.tolist())]}


def _floor(its: dict[str, Any]) -> dict[str, Any]:
    log_min_p = math.log(its["min_p"]) if its["min_p"] else -math.inf
    top, temperature = _floats([its["top"]]), _floats([its["temperature"]])
    floor = least_logit(top, temperature, torch.tensor([log_min_p], dtype=torch.float64))
    return {"floor": f"{int(floor.view(torch.int32)) & 0xFFFFFFFF:08x}"}


def as_text() -> str:
    """Return the file with the results of this package: JSON with one vector per line."""
    vectors = json.loads(FILE.read_text())
    lines = []
    for kind, result in {"rows": _row, "floors": _floor}.items():
        rows = ",\n".join(f"  {json.dumps(row | result(row))}" for row in vectors[kind])
        lines.append(f'"{kind}": [\n{rows}\n]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text())
