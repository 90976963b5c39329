"""Powers of two in float64 by IEEE operations alone. Twin: `tpsample.core.order.power_of_2`."""

from __future__ import annotations

import numpy as np

from tpsample.core.order import POWER_OF_2
from tpsample.native.compiling import jit
from tpsample.native.numbers import F64, I64

C = tuple(POWER_OF_2)


@jit()
def power_of_2(exponent):  # type: ignore[no-untyped-def]
    """Return 2^x of float64 x, |x| <= 1000."""
    whole = np.rint(exponent)
    f = exponent - whole
    p = C[13]
    p = p * f + C[12]
    p = p * f + C[11]
    p = p * f + C[10]
    p = p * f + C[9]
    p = p * f + C[8]
    p = p * f + C[7]
    p = p * f + C[6]
    p = p * f + C[5]
    p = p * f + C[4]
    p = p * f + C[3]
    p = p * f + C[2]
    p = p * f + C[1]
    p = p * f + C[0]
    # Adding 1.5 · 2^52 leaves the integer in the lowest bits, without a conversion.
    bits = F64(whole + 6755399441055744.0).view(I64)
    return p * I64((bits + I64(1023)) << I64(52)).view(F64)
