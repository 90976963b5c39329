"""Implements MASSES.md in numpy alone, and checks the test vectors with it.

    python masses_checker.py masses_vectors.json

Nothing of tpsample or torch is imported: whoever implements the masses elsewhere may start here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

fp32 = np.float32
COEFFICIENTS = tuple(
    fp32(c)
    for c in (
        1.0,
        0.6931471824645996,
        0.24022647738456726,
        0.055503323674201965,
        0.00961843691766262,
        0.0013398873852565885,
        0.00015353361959569156,
    )
)
R = fp32(12582912)


def short(x: Any) -> Any:
    """The first 17 significant bits."""
    return (np.asarray(x, fp32).view(np.int32) & np.int32(-128)).view(fp32)[()]


def row(top: Any, temperature: Any) -> dict[str, Any]:
    """The numbers of a row, by the names of MASSES.md, section 1."""
    top, temperature = fp32(top), fp32(temperature)
    s = fp32(1.4426950216293335) / temperature
    log2 = fp32(0.6931471824645996)
    u = short(temperature * log2)
    left = fp32(np.float64(temperature) * np.float64(log2) - np.float64(u))
    v = short(left + temperature * fp32(-1.9046542121259175e-09))
    is_near = abs(top * s) < 85
    b, h = (fp32(0), top) if is_near else (top, fp32(0))
    n = (h * s + R) - R
    return {"s": s, "u": u, "v": v, "b": b, "h": h, "l": h - 42 * u, "n": n, "r": h - n * u}


def exponents(x: Any, its: dict[str, Any]) -> tuple[Any, Any]:
    """w, an integer, and f of logits."""
    x = np.asarray(x, fp32) - its["b"]
    x = np.where(x < its["h"], x, its["h"])  # also in place of a NaN
    x = np.where(x > its["l"], x, its["l"])
    turns = x * its["s"] - (its["h"] * its["s"] - its["n"])
    k = (turns + (R - its["n"])) - (R - its["n"])
    w = k - its["n"]
    x = (x - k * its["u"]) - its["r"]
    return w, (x - w * its["v"]) * its["s"]


def power_of_2(f: Any) -> Any:
    """2^f by Horner's rule, each product and each sum rounded."""
    p = np.full_like(f, COEFFICIENTS[6])
    for coefficient in COEFFICIENTS[5::-1]:
        p = p * f + coefficient
    return p


def masses_and_moments(x: Any, top: Any, temperature: Any) -> tuple[Any, Any]:
    """q and m of logits, int64."""
    with np.errstate(all="ignore"):
        w, f = exponents(x, row(top, temperature))
        power = power_of_2(f) * fp32(2) ** w
        q = np.rint(power * fp32(2.0**40)).astype(np.int64)
        turned = np.rint(power * f * fp32(2.0**40)).astype(np.int64)
    return q, -q * w.astype(np.int64) - turned


def min_p_floor(top: Any, temperature: Any, min_p: float) -> Any:
    """The least logit that min_p leaves."""
    if min_p == 0:
        return -np.finfo(fp32).max
    exact = np.float64(fp32(top)) + np.float64(fp32(temperature)) * np.log(np.float64(min_p))
    exact = max(exact, -np.float64(np.finfo(fp32).max))
    floor = fp32(exact)
    return np.nextafter(floor, fp32(np.inf)) if floor < exact else floor


def _floats(bits: Any) -> Any:
    return np.array([int(each, 16) for each in bits], np.uint32).view(fp32)


def check(vectors: dict[str, Any]) -> int:
    """Check all vectors, and return how many there are; AssertionError names one that is wrong."""
    for its in vectors["rows"]:
        top, temperature = _floats([its["top"], its["temperature"]])
        q, m = masses_and_moments(_floats(its["logits"]), top, temperature)
        assert [str(each) for each in q] == its["masses"], its
        assert [str(each) for each in m] == its["moments"], its
    for its in vectors["floors"]:
        top, temperature, floor = _floats([its["top"], its["temperature"], its["floor"]])
        assert min_p_floor(top, temperature, its["min_p"]) == floor, its
    return sum(len(rows) for rows in vectors.values())


if __name__ == "__main__":
    print(f"{check(json.loads(Path(sys.argv[1]).read_text()))} test vectors hold")
