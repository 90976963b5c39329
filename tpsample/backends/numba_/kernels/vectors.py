"""Dot products of ROWS rows and IDS ids, as LLVM code that keeps all sums in vector registers.

LLVM makes vector code of a loop over columns by itself, but it keeps few sums and waits for memory.
Here each vector that is read is used ROWS or IDS times. Where the processor has AVX512_BF16, one
instruction adds 32 products of bf16 numbers; it takes subnormal numbers for zero.

Each of LANES sums adds every LANES-th product, and then the sums are added in pairs. So a product
goes through about D / LANES additions, on which the bound of an fp32 sum depends.
"""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

FEATURES = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
HAS_BF16 = "+avx512bf16" in FEATURES
"""Whether bf16 numbers are multiplied as they are."""
VECTOR_BYTES, IDS = (64, 4) if "+avx512f" in FEATURES else (32, 2)
"""IDS are multiplied at once: AVX-512 has 32 vector registers, AVX2 has 16."""
LANES = VECTOR_BYTES // 4
"""fp32 sums of a vector."""
ROWS = 4
"""Rows that are multiplied at once."""
PADDING = 32
"""The number of columns is a multiple of it; zeros fill them up."""

FUSED = ("contract", "nsz")
"""A multiplication and an addition may be rounded once; the order of additions stays."""


def _fetch(builder: Any, pointer: Any) -> None:
    """Ask for memory that a later call reads: processors do not foresee runs of neighbouring ids.

    It goes to the second cache, because the first one waits for few lines at a time.
    """
    integer, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    arguments = builder.bitcast(pointer, byte), integer(0), integer(2), integer(1)
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, arguments)


@intrinsic
def fetch(typing, numbers, first, size):  # type: ignore[no-untyped-def]
    """Ask for numbers of a flat array that are read soon; there may be fewer of them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        start, step = (ir.Constant(arguments[2].type, value) for value in (0, 64))
        pointer = builder.gep(array.data, [arguments[1]])
        pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        stop = builder.mul(arguments[2], array.itemsize)
        with cgutils.for_range_slice(builder, start, stop, step) as (offset, _):
            _fetch(builder, builder.gep(pointer, [offset]))
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp), generate


def _dots(*, squares: bool) -> Any:
    """Return the function that multiplies ROWS rows.

    Args:
        squares: whether it also asks for later weights, and finds Σ w² where sums are fp32.
    """

    @intrinsic
    def dots(
        typing, hidden, row, column, numbers, begin, stride, id_, count, size, out, lane, of_ids
    ):  # type: ignore[no-untyped-def]
        """Add the products of rows and IDS ids to out[row + r, lane + i], and Σ w² to of_ids.

        Args:
            hidden: [R, ≥ D] of uint16 (bf16), fp32 or float64.
            row, column: where the products begin.
            numbers: flat, of uint16 as well, else fp32; id i begins at begin + i · stride.
            id_, count: the first of the IDS ids. Of ids outside of 0 … count − 1 the product is
                that of the nearest one, which the caller takes away.
            size: columns, a multiple of PADDING.
            out, of_ids: fp32 or float64, [R, ≥ lane + IDS] and [≥ lane + IDS].
        """
        integer = types.intp
        of_weights = numbers, integer, integer, integer, integer, integer
        signature = types.void(hidden, integer, integer, *of_weights, out, integer, of_ids)
        return signature, generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def array(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index])

        def constant(value: int) -> Any:
            return ir.Constant(column.type, value)

        _, row, column, _, begin, stride, id_, count, size, _, lane, _ = arguments
        hidden, numbers, out, of_ids = array(0), array(3), array(9), array(11)
        number, total = numbers.data.type.pointee, out.data.type.pointee
        wide = isinstance(total, ir.DoubleType)
        total_bytes = 8 if wide else 4
        width, is_bf16 = VECTOR_BYTES // total_bytes, isinstance(number, ir.IntType) and not wide
        sums = ir.VectorType(total, width)
        read = ir.VectorType(ir.IntType(32), width) if is_bf16 else sums

        def at(array: Any, row: Any, column: Any) -> Any:
            first = builder.mul(row, builder.extract_value(array.shape, 1))
            return builder.gep(array.data, [builder.add(first, column)])

        def load(pointer: Any) -> Any:
            address = builder.bitcast(pointer, read.as_pointer())
            return builder.load(address, align=2 if is_bf16 else total_bytes)

        def load_weights(pointer: Any) -> Any:
            """Return weights in the type of the sums."""
            if not wide:
                return load(pointer)
            address = builder.bitcast(pointer, ir.VectorType(number, width).as_pointer())
            return builder.fpext(builder.load(address, align=4), sums)

        def call(name: str, result: Any, *values: Any) -> Any:
            kind = ir.FunctionType(result, [value.type for value in values])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, values)

        def plus(x: Any, y: Any) -> Any:
            return builder.fadd(x, y, flags=FUSED)

        def add_product(x: Any, y: Any, to: Any) -> None:
            before = builder.load(to)
            if is_bf16:
                after = call("llvm.x86.avx512bf16.dpbf16ps.512", sums, before, x, y)
            else:
                after = plus(before, builder.fmul(x, y, flags=FUSED))
            builder.store(after, to)

        def chosen(x: Any, y: Any, lanes: range) -> Any:
            mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
            return builder.shuffle_vector(x, y, mask)

        def in_sum(vectors: list[Any]) -> Any:
            """Return one vector with the sum of each of IDS vectors."""
            half = width
            while half > IDS:
                half //= 2
                low, high = range(half), range(half, 2 * half)
                vectors = [plus(chosen(v, v, low), chosen(v, v, high)) for v in vectors]
            even, odd = range(0, 2 * IDS, 2), range(1, 2 * IDS, 2)
            while len(vectors) > 1:
                pairs = zip(vectors[::2], vectors[1::2], strict=True)
                vectors = [plus(chosen(x, y, even), chosen(x, y, odd)) for x, y in pairs]
            return vectors[0]

        rows = [at(hidden, builder.add(row, constant(r)), column) for r in range(ROWS)]
        ids = []
        for i in range(IDS):
            index, last = builder.add(id_, constant(i)), builder.sub(count, constant(1))
            index = builder.select(builder.icmp_signed("<", index, last), index, last)
            index = builder.select(builder.icmp_signed(">", index, constant(0)), index, constant(0))
            ids.append(builder.gep(numbers.data, [builder.add(begin, builder.mul(index, stride))]))
        zero = ir.Constant(sums, [0.0] * width)
        totals = [
            [cgutils.alloca_once(builder, sums) for _ in range(IDS)] for _ in range(ROWS + squares)
        ]
        for accumulator in itertools.chain(*totals):
            builder.store(zero, accumulator)
        step = constant(width * 2 if is_bf16 else width)
        with cgutils.for_range_slice(builder, constant(0), size, step) as (d, _):
            of_rows = [load(builder.gep(pointer, [d])) for pointer in rows]
            for i, pointer in enumerate(ids):
                w = load_weights(builder.gep(pointer, [d]))
                if squares:
                    later = builder.add(d, builder.mul(stride, constant(2 * IDS)))
                    _fetch(builder, builder.gep(pointer, [later]))
                for h, of_row in zip(of_rows if wide else [*of_rows, w], totals, strict=False):
                    add_product(h, w, of_row[i])
        outputs = [at(out, builder.add(row, constant(r)), lane) for r in range(ROWS)]
        if not wide:
            outputs.append(builder.gep(of_ids.data, [lane]))
        few = ir.VectorType(total, IDS)
        for output, of_row in zip(outputs, totals, strict=False):
            products = in_sum([builder.load(accumulator) for accumulator in of_row])
            address = builder.bitcast(output, few.as_pointer())
            products = plus(builder.load(address, align=total_bytes), products)
            builder.store(products, address, align=total_bytes)
        return context.get_dummy_value()

    return dots


dots, dots_and_squares = _dots(squares=False), _dots(squares=True)
