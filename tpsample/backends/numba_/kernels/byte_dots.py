"""Products of 8-bit weights of a block of ids and of rows, in int32, as LLVM code.

The weights of a block lie as one instruction of AVX512_VNNI takes them: of four columns, a group,
first those of id 0, then of id 1, to id BLOCK − 1. They are unsigned, and the numbers of rows are
signed. Each of 16 sums of a vector belongs to one id, so nothing is left to add at the end. Sums
wrap; a caller takes away what made the weights unsigned, and is left with a sum that fits.

Processors without that instruction multiply pairs of 16-bit numbers, which takes three times as
many instructions.
"""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tpsample.backends.numba_.kernels.inputs import BLOCK
from tpsample.backends.numba_.kernels.vectors import FEATURES, ROWS
from tpsample.backends.screening.int8_copy import GROUP

HAS_VNNI = "+avx512vnni" in FEATURES
"""Whether one instruction adds 64 products of 8-bit numbers."""
LANES = 16
"""Sums of a vector, each of one id."""


def _byte_dots(count: int) -> Any:
    """Return the function that multiplies so many rows."""

    @intrinsic
    def byte_dots(typing, numbers, first, low, high, wide_groups, row, out):  # type: ignore[no-untyped-def]
        """Put Σ w (256 high + low) of a block and rows from `row` on into out[row + r, lane].

        Args:
            numbers: flat uint8; the block begins at `first`.
            low: int8 [R, width].
            high: int8 [R, GROUP · wide groups], of the groups that have any.
            wide_groups: int64 [wide groups], which groups these are.
            out: int32 [R, BLOCK].
        """
        integer = types.intp
        return types.void(numbers, integer, low, high, wide_groups, integer, out), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def array(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index])

        numbers, low, high, wide_groups, out = (array(index) for index in (0, 2, 3, 4, 6))
        first, row = arguments[1], arguments[5]
        word, sums = ir.IntType(32), ir.VectorType(ir.IntType(32), LANES)

        def constant(value: int) -> Any:
            return ir.Constant(first.type, value)

        def at(array: Any, row: Any) -> Any:
            first = builder.mul(row, builder.extract_value(array.shape, 1))
            return builder.gep(array.data, [first])

        def add_pairs(before: Any, x: Any, y: Any) -> Any:
            """Add the products of neighbouring 16-bit numbers."""
            wide = ir.VectorType(word, 2 * LANES)
            product = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
            for start in (0, 1):
                mask = ir.Constant(sums, list(range(start, 2 * LANES, 2)))
                before = builder.add(before, builder.shuffle_vector(product, product, mask))
            return before

        def add_products(before: Any, weights: Any, of_row: Any) -> Any:
            if HAS_VNNI:
                kind = ir.FunctionType(sums, [sums] * 3)
                name = "llvm.x86.avx512.vpdpbusd.512"
                function = cgutils.get_or_insert_function(builder.module, kind, name)
                return builder.call(function, [before, weights, of_row])
            pairs = ir.VectorType(ir.IntType(16), 2 * LANES)
            eight, byte = (ir.Constant(pairs, [bits] * 2 * LANES) for bits in (8, 255))
            w, h = builder.bitcast(weights, pairs), builder.bitcast(of_row, pairs)
            even = builder.ashr(builder.shl(h, eight), eight)
            before = add_pairs(before, builder.and_(w, byte), even)
            return add_pairs(before, builder.lshr(w, eight), builder.ashr(h, eight))

        def fours(array: Any) -> list[Any]:
            """Return each row of bytes as numbers of 32 bits, which have a group each."""
            numbers = [at(array, builder.add(row, constant(r))) for r in range(count)]
            return [builder.bitcast(pointer, word.as_pointer()) for pointer in numbers]

        def add_group(totals: list[Any], rows: list[Any], index: Any, group: Any) -> None:
            """Add the products of a group of columns, which lies at a place of the rows."""
            start = builder.mul(group, constant(len(parts)))
            vectors = [builder.gep(block, [builder.add(start, constant(i))]) for i in parts]
            weights = [builder.load(vector, align=1) for vector in vectors]
            for pointer, of_row in zip(rows, totals, strict=True):
                four = builder.load(builder.gep(pointer, [index]), align=1)
                one = builder.insert_element(ir.Constant(sums, ir.Undefined), four, word(0))
                spread = builder.shuffle_vector(one, one, ir.Constant(sums, [0] * LANES))
                for total, vector in zip(of_row, weights, strict=True):
                    builder.store(add_products(builder.load(total), vector, spread), total)

        def empty_sums() -> list[Any]:
            """Return sums of each row and part of the block, which are 0."""
            totals = [[cgutils.alloca_once(builder, sums) for _ in parts] for _ in range(count)]
            for total in itertools.chain(*totals):
                builder.store(ir.Constant(sums, [0] * LANES), total)
            return totals

        block = builder.bitcast(builder.gep(numbers.data, [first]), sums.as_pointer())
        parts, none, one = range(BLOCK // LANES), constant(0), constant(1)
        of_low, of_high = empty_sums(), empty_sums()
        # The low numbers first, because memory sends what is read one after the other.
        groups = builder.sdiv(builder.extract_value(low.shape, 1), constant(GROUP))
        with cgutils.for_range_slice(builder, none, groups, one) as (group, _):
            add_group(of_low, fours(low), group, group)
        wide = builder.extract_value(wide_groups.shape, 0)
        with cgutils.for_range_slice(builder, none, wide, one) as (index, _):
            add_group(
                of_high, fours(high), index, builder.load(builder.gep(wide_groups.data, [index]))
            )
        eight = ir.Constant(sums, [8] * LANES)
        for r in range(count):
            start = builder.bitcast(at(out, builder.add(row, constant(r))), sums.as_pointer())
            for i in parts:
                more = builder.shl(builder.load(of_high[r][i]), eight)
                total = builder.add(builder.load(of_low[r][i]), more)
                builder.store(total, builder.gep(start, [constant(i)]), align=4)
        return context.get_dummy_value()

    return byte_dots


dots_of_rows, dots_of_row = _byte_dots(ROWS), _byte_dots(1)
