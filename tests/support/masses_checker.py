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
    return least(np.float64(fp32(top)) + np.float64(fp32(temperature)) * np.log(np.float64(min_p)))


def least(exact: Any) -> Any:
    """The least fp32 number that is not below a number of float64, nor below the lowest one."""
    exact = max(exact, -np.float64(np.finfo(fp32).max))
    floor = fp32(exact)
    return np.nextafter(floor, fp32(np.inf)) if floor < exact else floor


def epsilon_limit(q: Any, epsilon: float) -> int:
    """The least mass that epsilon_cutoff leaves."""
    return min(int(np.rint(np.float64(epsilon) * np.float64(q.sum()))), 2**40)


def sigma_floor(x: Any, top: Any, n_sigma: float) -> Any:
    """The least logit that top_n_sigma leaves."""
    far = np.where(x == top, fp32(0), np.minimum(fp32(top) - x, fp32(4096)))
    d = np.rint(fp32(2.0**19) * far).astype(np.int64)
    n, s, high, low = map(np.float64, (len(d), d.sum(), (d * d >> 32).sum(), (d * d % 2**32).sum()))
    sigma = np.sqrt(max((high * 2.0**32 + low) / n - (s / n) * (s / n), 0.0)) / 2.0**19
    return least(np.float64(top) - np.float64(n_sigma) * sigma)


def eta_limit(q: Any, m: Any, eta: float) -> int:
    """The least mass that eta_cutoff leaves."""
    total = np.float64(q.sum())
    b = np.float64(m.sum()) / total
    n = np.ceil(b)
    x, t = (n - b) * np.float64(0.6931471805599453), np.float64(1)
    for i in range(18, 0, -1):
        t = 1 + t * x / i
    by_entropy = np.sqrt(np.float64(eta)) * 2.0**40 * (t / 2.0**n)
    return min(int(np.rint(np.float64(eta) * total)), int(np.rint(by_entropy)), 2**40)


def end(its: dict[str, Any]) -> dict[str, str]:
    """Where a rule ends, by the name of that number in MASSES.md."""
    top, temperature = _floats([its["top"], its["temperature"]])
    x = _floats(its["logits"])
    x = x[x > -np.inf]
    if its["rule"] == "top_n_sigma":
        return {"floor": f"{sigma_floor(x, top, its['number']).view(np.uint32):08x}"}
    q, m = masses_and_moments(x, top, temperature)
    if its["rule"] == "epsilon_cutoff":
        return {"limit": str(epsilon_limit(q, its["number"]))}
    assert its["rule"] == "eta_cutoff", its
    return {"limit": str(eta_limit(q, m, its["number"]))}


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
    for its in vectors["ends"]:
        assert end(its).items() <= its.items(), its
    return sum(len(rows) for rows in vectors.values())


if __name__ == "__main__":
    print(f"{check(json.loads(Path(sys.argv[1]).read_text()))} test vectors hold")
