"""Operations that are a few instructions of LLVM, and no kernels of their own.

Numba's own `view`, `min` and `max` are each a kernel for every set of types, which a first step has
to compile. Arrays stay those of `np.empty`: with memory that is made inline, passes over stored
logits took up to 6 times as long.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic


@intrinsic
def bits_as(typing, number, kind):  # type: ignore[no-untyped-def]
    """Return the number of another type of as many bytes that has the bits of this one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], context.get_value_type(signature.return_type))

    return kind.dtype(number, kind), generate


def _second_if(comparison: str) -> Any:
    """Return the code for the second of two numbers if it compares so with the first. Else the code
    is for the first, as Python has `min` and `max`."""

    def type_of(typing, a, b):  # type: ignore[no-untyped-def]
        kind = typing.unify_types(a, b)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            first, second = values
            if isinstance(kind, types.Float):
                chosen = builder.fcmp_ordered(comparison, second, first)
            elif kind.signed:
                chosen = builder.icmp_signed(comparison, second, first)
            else:
                chosen = builder.icmp_unsigned(comparison, second, first)
            return builder.select(chosen, second, first)

        return kind(kind, kind), generate

    return type_of


@intrinsic
def smaller(typing, a, b):  # type: ignore[no-untyped-def]
    """Return the smaller of two numbers, and `a` where either is no number."""
    return _second_if("<")(typing, a, b)


@intrinsic
def larger(typing, a, b):  # type: ignore[no-untyped-def]
    """Return the larger of two numbers, and `a` where either is no number."""
    return _second_if(">")(typing, a, b)
