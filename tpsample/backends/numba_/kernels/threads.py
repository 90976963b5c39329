"""Ranges that the threads of PyTorch (`torch.get_num_threads`) share, without Python in between.

PyTorch's threads are those of OpenMP. After each of its operations they wait for the next one by
spinning, for some milliseconds. Threads of our own would share the processor with them.

    draw(first, last, parts, threads, arguments)    an entry, which Python calls
    → share(kernel, first, last, …)                 a team of OpenMP
    → kernel(begin, end, part, arguments)           once per part, on any thread of the team

No Python code runs in the team, so no exception of a signal's handler can be lost in it: Python
raises it after the kernel. A part belongs to whichever thread takes it first, so a team of fewer
threads than were asked for, or of one, leaves none.

Subnormal numbers count while a part runs, whatever `torch.set_flush_denormal` says of a thread,
because the threads of a team may differ in it. Afterwards each thread has its own mode again. This
is done on x86 alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
from types import SimpleNamespace
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

THREAD_WORK = 2**21
"""Multiplications that are worth another thread: about 0.1 ms."""

FLUSHED = 0x8040
"""The bits of MXCSR by which subnormal results and operands are zero."""

_TEAM = "tpsample_team"
_library = ctypes.CDLL(torch._C.__file__)
has_teams = hasattr(_library, "GOMP_parallel")
"""Whether OpenMP is there, and its threads are."""
# A function of OpenMP: it calls another one in each of a team of threads, and waits for all.
_parallel = _library.GOMP_parallel if has_teams else ctypes.pythonapi.Py_IncRef  # is not called
_address = ctypes.cast(_parallel, ctypes.c_void_p).value
binding.add_symbol(_TEAM, _address)


def _forget_threads() -> None:
    """OpenMP's threads do not survive a fork, and a team would wait for them."""
    global has_teams
    has_teams = False


os.register_at_fork(after_in_child=_forget_threads)


def threads_for(work: int) -> int:
    """Return among how many threads so many multiplications are worth sharing."""
    return max(1, min(torch.get_num_threads(), work // THREAD_WORK))


def in_ranges(kernel: Any, first: int, last: int, parts: int, *arguments: Any) -> None:
    """Call a kernel for each part of a range, on as many threads.

    Args:
        kernel: an entry.
        arguments: of all parts alike.
    """
    kernel(first, last, parts, parts if has_teams else 1, arguments)


def _raw(bits: int) -> Any:
    return ir.IntType(bits)


_pointer = _raw(8).as_pointer()


def _mode(builder: Any, name: str, pointer: Any) -> None:
    """Read or write MXCSR, `stmxcsr` or `ldmxcsr`."""
    kind = ir.FunctionType(ir.VoidType(), [_pointer])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}")
    builder.call(function, [builder.bitcast(pointer, _pointer)])


@intrinsic
def share(typing, kernel, first, last, parts, threads, arguments):  # type: ignore[no-untyped-def]
    """Call kernel(begin, end, part, arguments) for parts of the range from `first` to `last`."""
    integer = types.intp
    argument_types = integer, integer, integer, arguments
    kernel.get_call_type(typing, argument_types, {})  # compiles it

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        compiled = kernel.dispatcher.overloads[argument_types]
        context.active_code_library.add_linking_library(compiled.library)
        _, first, last, parts, threads, arguments = values
        word = first.type
        # The next part, the range, the number of parts, the arguments; an error and its code.
        fields = [word, word, word, word, arguments.type, _pointer, _raw(32)]
        shared = cgutils.alloca_once(builder, ir.LiteralStructType(fields))

        def at(builder: Any, pointer: Any, field: int) -> Any:
            return cgutils.gep_inbounds(builder, pointer, 0, field)

        zeros = [word(0), first, last, parts, arguments, _pointer(None), _raw(32)(0)]
        for field, value in enumerate(zeros):
            builder.store(value, at(builder, shared, field))
        team = _take_parts(context, builder.module, compiled, argument_types, shared.type)
        whole, null = builder.bitcast(shared, _pointer), _raw(32)(0)
        several = builder.icmp_signed(">", threads, word(1))
        with builder.if_else(several) as (in_team, alone):
            with in_team:
                kinds = [team.type, _pointer, null.type, null.type]
                kind = ir.FunctionType(ir.VoidType(), kinds)
                function = cgutils.get_or_insert_function(builder.module, kind, _TEAM)
                count = builder.trunc(threads, null.type)
                builder.call(function, [team, whole, count, null])
            with alone:
                builder.call(team, [whole])
        code = builder.load(at(builder, shared, 6))
        with builder.if_then(builder.icmp_signed("!=", code, null), likely=False):
            conventions = context.call_conv
            kind = conventions._get_excinfo_argument(builder.function).type.pointee
            error = builder.bitcast(builder.load(at(builder, shared, 5)), kind)
            conventions.return_status_propagate(
                builder, SimpleNamespace(code=code, excinfoptr=error)
            )
        return context.get_dummy_value()

    def _take_parts(
        context: Any, module: Any, compiled: Any, argument_types: Any, kind: Any
    ) -> Any:
        """Return the function of a thread: it takes parts as long as some are left."""
        name = f"{compiled.fndesc.llvm_func_name}.parts"
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_pointer]), name)
        function.linkage = "internal"
        builder = ir.IRBuilder(function.append_basic_block())
        shared = builder.bitcast(function.args[0], kind)
        pointers = [cgutils.gep_inbounds(builder, shared, 0, field) for field in range(7)]
        first, last, parts, arguments = (builder.load(pointer) for pointer in pointers[1:5])
        before, during = (cgutils.alloca_once(builder, _raw(32)) for _ in range(2))
        if platform.machine() in ("x86_64", "AMD64"):
            _mode(builder, "stmxcsr", before)
            builder.store(builder.and_(builder.load(before), _raw(32)(~FLUSHED)), during)
            _mode(builder, "ldmxcsr", during)
        loop, body, end = (function.append_basic_block() for _ in range(3))
        builder.branch(loop)
        builder.position_at_end(loop)
        one = first.type(1)
        part = builder.atomic_rmw("add", pointers[0], one, "monotonic")
        builder.cbranch(builder.icmp_signed("<", part, parts), body, end)
        builder.position_at_end(body)
        size = builder.sub(last, first)
        bounds = [
            builder.add(first, builder.sdiv(builder.mul(size, number), parts))
            for number in (part, builder.add(part, one))
        ]
        callee = context.declare_function(module, compiled.fndesc)
        # As a part of this function, its arithmetic could be moved before the change of the mode.
        status, _ = context.call_conv.call_function(
            builder,
            callee,
            types.none,
            argument_types,
            [*bounds, part, arguments],
            attrs=("noinline",),
        )
        with builder.if_then(status.is_error, likely=False):
            builder.store(builder.bitcast(status.excinfoptr, _pointer), pointers[5])
            builder.store(status.code, pointers[6])
        builder.branch(loop)
        builder.position_at_end(end)
        if platform.machine() in ("x86_64", "AMD64"):
            _mode(builder, "ldmxcsr", before)
        builder.ret_void()
        return function

    return types.void(kernel, integer, integer, integer, integer, arguments), generate
