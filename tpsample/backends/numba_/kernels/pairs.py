"""Products of single pairs of rows, and sums of weighted rows. Twin:
`tpsample.backends.torch_.pairs`."""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, jit
from tpsample.backends.numba_.kernels.numbers import as_fp32, exact_product
from tpsample.backends.numba_.kernels.vectors import fetch


@jit(in_parts=True, allocates=True)
def pair_products(start, stop, part, arguments):
    """Store the dot products of pairs of rows.

    Args:
        left, right: the two tensors, as `Weight`.
        rows, columns: int64 [T], the rows of `left` and of `right` that make the pairs.
        size: D.
        out: fp32 [T].
    """
    left, rows, right, columns, size, out = arguments
    own, taken = np.empty(size, F32), -1
    for t in range(start, stop):
        if rows[t] != taken:
            taken = rows[t]
            begin = taken * left.stride
            for d in range(size):
                own[d] = as_fp32(left.numbers[begin + d])
        if t + 1 < stop:
            fetch(right.numbers, columns[t + 1] * right.stride, size)
        out[t] = exact_product(right.numbers, columns[t] * right.stride, own)


@jit(in_parts=True, allocates=True)
def add_weighted_rows(start, stop, part, arguments):
    """Add weighted rows of a tensor to the rows of `out`.

    Args:
        out: float64 [n, D].
        ends: int64 [n + 1]: row i of `out` gets the places from ends[i] to ends[i + 1].
        factors: float64 [T], the weight of the row at each place.
        source: the tensor, as `Weight`.
        index: int64 [T], the row of `source` at each place.
    """
    out, ends, factors, source, index = arguments
    size, last = out.shape[1], ends[stop]
    for i in range(start, stop):
        total = out[i]
        for t in range(ends[i], ends[i + 1]):
            if t + 1 < last:
                fetch(source.numbers, index[t + 1] * source.stride, size)
            begin, factor = index[t] * source.stride, factors[t]
            part_of_source = source.numbers[begin : begin + size]
            for d in range(size):
                total[d] += factor * F64(as_fp32(part_of_source[d]))
