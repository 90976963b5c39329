"""Products of bf16 weights of a block of ids and of TILE rows, in fp32, as LLVM code.

Processors with AMX_BF16 have eight tiles of TILE lines. One instruction adds the products of TILE
ids and TILE rows over PADDING columns to a tile of fp32 sums. It takes subnormal numbers for zero.
A tile of weights is read as they lie in memory. A tile of rows has a pair of neighbouring columns
of each row in a line.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tpsample.backends.numba_.kernels.vectors import FEATURES, PADDING
from tpsample.backends.screening.int8_copy import BLOCK

HAS_TILES = {"+amx-tile", "+amx-bf16"} <= set(FEATURES.split(",")) and (
    platform.system() == "Linux"
)
"""Whether the processor multiplies tiles."""
TILE = 16
"""Lines of a tile: ids of a tile of weights, and numbers of fp32 in a line of sums."""
LINE = 64
"""Bytes of a line."""
TILE_DEPTH = PADDING // 2 + 1
"""Additions that a product goes through in one instruction: those of every second column, and one
that joins the two sums."""

# The layout of tiles, as Intel's manual has it: palette 1, bytes of a line, lines.
_CONFIGURATION = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[TILE] * 8, *[0] * 8])
_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18


@intrinsic
def may_use_tiles(typing):  # type: ignore[no-untyped-def]
    """Return whether this process may use tiles, for which Linux must be asked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not HAS_TILES:
            return context.get_constant(types.boolean, False)
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word], var_arg=True)
        function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        call = (_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA)
        refused = builder.call(function, [word(number) for number in call])
        return builder.icmp_signed("==", refused, word(0))

    return types.boolean(), generate


@intrinsic
def tile_dots(typing, packed, tile, first, count, numbers, begin, stride, out):  # type: ignore[no-untyped-def]
    """Put the products of TILE rows and a whole block over some columns into out[id, row].

    Args:
        packed: uint32 [tiles, D / PADDING, TILE, TILE], the rows: [t, c, p, r] has columns
            PADDING c + 2 p, in the low bits, and the next one, of row TILE t + r.
        tile: which rows of them.
        first, count: the columns, in units of PADDING.
        numbers: flat uint16; id i begins at begin + i · stride.
        out: fp32 [BLOCK, TILE].
    """
    integer = types.intp
    place = packed, integer, integer, integer
    return types.void(*place, numbers, integer, integer, out), _generate_dots


def _generate_dots(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    def array(index: int) -> Any:
        return context.make_array(signature.args[index])(context, builder, arguments[index])

    _, tile, first, count, _, begin, stride, _ = arguments
    packed, numbers, out = array(0), array(4), array(7)
    word, byte = first.type, ir.IntType(8)

    def run(instruction: str, *operands: Any) -> None:
        """Run an instruction; tiles are named by their number."""
        values = [byte(its) if isinstance(its, int) else its for its in operands]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        name = f"llvm.x86.{instruction}"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    def memory(array: Any, offset: Any) -> Any:
        return builder.bitcast(builder.gep(array.data, [offset]), byte.as_pointer())

    bytes_of = ir.ArrayType(byte, len(_CONFIGURATION))
    wanted = cgutils.global_constant(builder, "tiles", bytes_of(bytearray(_CONFIGURATION)))
    before = cgutils.alloca_once(builder, bytes_of)
    wanted, before = (builder.bitcast(its, byte.as_pointer()) for its in (wanted, before))
    run("sttilecfg", before)
    run("ldtilecfg", wanted)
    parts, line = range(BLOCK // TILE), word(LINE)
    for part in parts:
        run("tilezero", part)
    chunks = builder.extract_value(packed.shape, 1)
    with cgutils.for_range(builder, count) as loop:
        chunk = builder.add(first, loop.index)
        place = builder.add(builder.mul(tile, chunks), chunk)
        run("tileloadd64", 4, memory(packed, builder.mul(place, word(TILE * TILE))), line)
        start = builder.add(begin, builder.mul(chunk, word(PADDING)))
        for part in parts:
            own = 5 + part % 3
            ids = builder.add(start, builder.mul(stride, word(part * TILE)))
            run("tileloadd64", own, memory(numbers, ids), builder.mul(stride, word(2)))
            run("tdpbf16ps", part, own, 4)
    for part in parts:
        run("tilestored64", part, memory(out, word(part * TILE * TILE)), line)
    run("ldtilecfg", before)
    return context.get_dummy_value()
