"""Products of a block of ids and of TILE rows, in bf16 or 8-bit numbers, as LLVM code.

Processors with AMX have eight tiles of TILE lines of LINE bytes. One instruction multiplies TILE
ids and TILE rows over the columns of a line. It adds the products to a tile of sums, in fp32 or
int32. Subnormal numbers of bf16 count as zero. A tile of weights is read as they lie in memory. A
tile of rows has, in a line, the same 32 bits of columns of each row.
"""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tpsample.backends.numba_.kernels.vectors import FEATURES
from tpsample.backends.screening.int8_copy import BLOCK

HAS_TILES = {"+amx-tile", "+amx-bf16", "+amx-int8"} <= set(FEATURES.split(",")) and (
    sys.platform == "linux"
)
"""Whether the processor multiplies tiles."""
TILE = 16
"""Lines of a tile, and sums in a line."""
LINE = 64
"""Bytes of a line: 32 columns in bf16, 64 in 8 bits."""
TILE_DEPTH = LINE // 4 + 1
"""Additions that a product in bf16 goes through in one instruction: those of every second column,
and one that joins the two sums."""

# The layout of tiles, as Intel's manual has it: palette 1, bytes of a line, lines.
_LAYOUT = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[TILE] * 8, *[0] * 8])
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
def tile_dots(typing, tiles, place, its_step, numbers, begin, step, stride, count, turns, out):  # type: ignore[no-untyped-def]
    """Put the products of TILE rows and a whole block over some columns into out[id, row].

    Args:
        tiles: uint32, of the rows; [..., p, r] is column group p of row r of a tile.
        place: the first number of the tile of the first columns; the others follow.
        numbers: flat uint16 (bf16) or int8, of the weights.
        begin, stride: id i begins at begin + i · stride.
        count: lines of LINE bytes; as many tiles of the rows are read.
        turns: how often this is done; a turn begins `its_step` after the last one in `tiles`, and
            `step` in `numbers`. The products of all turns are added.
        out: fp32 [BLOCK, TILE], or int32 for numbers of 8 bits.
    """
    of_rows = tiles, types.intp, types.intp
    of_ids = numbers, types.intp, types.intp, types.intp
    return types.void(*of_rows, *of_ids, types.intp, types.intp, out), _generate_dots


def _generate_dots(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    if not HAS_TILES:  # is not called, and LLVM ends the process where it has no such instruction
        return context.get_dummy_value()

    def array(index: int) -> Any:
        return context.make_array(signature.args[index])(context, builder, arguments[index])

    _, place, its_step, _, begin, step, stride, count, turns, _ = arguments
    tiles, numbers, out = array(0), array(3), array(9)
    word, byte = count.type, ir.IntType(8)
    of_bytes = signature.args[3].dtype == types.int8
    multiply, columns = ("tdpbssd", LINE) if of_bytes else ("tdpbf16ps", LINE // 2)

    def run(instruction: str, *operands: Any) -> None:
        """Run an instruction; tiles are named by their number."""
        values = [byte(its) if isinstance(its, int) else its for its in operands]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        name = f"llvm.x86.{instruction}"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    def memory(array: Any, *offsets: Any) -> Any:
        pointer = array.data
        for offset in offsets:
            pointer = builder.gep(pointer, [offset])
        return builder.bitcast(pointer, byte.as_pointer())

    layout = ir.ArrayType(byte, len(_LAYOUT))
    wanted = cgutils.global_constant(builder, "tiles", layout(bytearray(_LAYOUT)))
    before = cgutils.alloca_once(builder, layout)
    wanted, before = (builder.bitcast(its, byte.as_pointer()) for its in (wanted, before))
    run("sttilecfg", before)
    run("ldtilecfg", wanted)
    parts, line, stride_bytes = range(BLOCK // TILE), word(LINE), stride
    if not of_bytes:
        stride_bytes = builder.mul(stride, word(2))
    for part in parts:
        run("tilezero", part)
    with cgutils.for_range(builder, turns) as turn:
        of_rows = builder.add(place, builder.mul(its_step, turn.index))
        of_ids = builder.add(begin, builder.mul(step, turn.index))
        with cgutils.for_range(builder, count) as loop:
            its_place = builder.mul(loop.index, word(TILE * TILE))
            run("tileloadd64", 4, memory(tiles, of_rows, its_place), line)
            column = builder.mul(loop.index, word(columns))
            for part in parts:
                own, ids = 5 + part % 3, builder.mul(stride, word(part * TILE))
                run("tileloadd64", own, memory(numbers, of_ids, column, ids), stride_bytes)
                run(multiply, part, own, 4)
    for part in parts:
        run("tilestored64", part, memory(out, word(part * TILE * TILE)), line)
    run("ldtilecfg", before)
    return context.get_dummy_value()
