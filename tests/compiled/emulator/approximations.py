"""Approximate instructions, rounded correctly or as wrong as the PTX ISA allows.

An error depends on the operand's bits and a seed, because a GPU returns the same result for the
same operand. The documented bounds are those of `lg2.approx.f32` (2^-22 absolute on [1/2, 2], 2 ulp
elsewhere), `ex2.approx.f32` (2^-22 relative), `div.full.f32` and `div.approx.f32` (2 ulp).
"""

from __future__ import annotations

import numpy as np

from tests.compiled.emulator.report import Options

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


class Approximations:
    """The approximate instructions of one launch.

    Args:
        options: `noise` and `sign` choose the errors.
    """

    def __init__(self, options: Options) -> None:
        self._seed, self._sign = options.noise, options.sign

    def lg2(self, x: np.ndarray) -> np.ndarray:
        exact = np.log2(x.astype(np.float64))
        return self._moved(exact, np.where((x >= 0.5) & (x <= 2), 2.0**-22, 2 * _ulp(exact)), x)

    def ex2(self, x: np.ndarray) -> np.ndarray:
        exact = np.exp2(x.astype(np.float64))
        return self._moved(exact, 2.0**-22 * exact, x)

    def sqrt(self, x: np.ndarray) -> np.ndarray:
        exact = np.sqrt(x.astype(np.float64))
        return self._moved(exact, 2.0**-23 * exact, x)

    def div(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = np.divide(a, b, dtype=np.float32)
        return self._moved(found.astype(np.float64), 1.5 * _ulp(found), found)

    def _moved(self, exact: np.ndarray, bound: np.ndarray, operand: np.ndarray) -> np.ndarray:
        if self._seed is None:
            return exact.astype(np.float32)
        bits = operand.view(np.uint32).astype(np.uint64)
        mixed = bits * _MIX[0] + np.uint64(self._seed)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * _MIX[1]
        mixed ^= mixed >> np.uint64(29)
        error = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0
        if self._sign:
            error = self._sign * np.abs(error)
        movable = np.isfinite(exact) & (exact != 0)
        return np.where(movable, exact + error * np.where(movable, bound, 0), exact).astype(
            np.float32
        )


def _ulp(x: np.ndarray) -> np.ndarray:
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)
