"""Operators of Triton's interpreter go to NumPy at once, by plans for the types of operands.

The interpreter decides at every operator how two operands become of one type and shape. Here the
first call of its kind goes that way while `see_operations` notes what NumPy did, and later calls do
that at once. A kind keeps to the interpreter where it takes several operations of NumPy, or where
the plan does not find the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_ARITHMETIC = ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_OPERATORS = {f"__{name}__": False for name in _ARITHMETIC + _COMPARISONS}
_OPERATORS |= {f"__r{name}__": True for name in _ARITHMETIC}
"""By the name of an operator, whether its tensor stands on the right."""
_MOST_PLANS = 4096

Plan = Callable[..., Any]
Maker = Callable[[tuple[Any, ...], Any], Plan | None]
"""Makes a plan of operands and their result, or None where there is none."""
_seen: list[tuple[Any, tuple[Any, ...], Any]] = []
"""Operation, operands and result of the first two operations of NumPy since one was looked for."""


def planned(place: Any, name: str, call: Plan) -> Plan:
    """Return what takes the place of `call`, which the interpreter has there by that name."""
    if place is core.tensor and name in _OPERATORS:
        swapped = _OPERATORS[name]
        return _remembered(call, 2, lambda operands, out: _operator(operands, out, swapped))
    if place is core.tensor and name == "to":
        return _remembered(call, 2, _cast)
    return _remembered(call, 3, _select) if name == "where" else call


def see_operations() -> None:
    """Note what the interpreter computes with NumPy."""
    for name in ("binary_op", "ternary_op", "create_addptr"):
        _note(name, getattr(interpreter.InterpreterBuilder, name))


def _note(name: str, compute: Plan) -> None:
    def noted(self: Any, *given: Any) -> Any:
        out = compute(self, *given)
        if len(_seen) < 2:  # a second one says that there are several
            *operands, operation = (*given, name) if name == "create_addptr" else given
            _seen.append((operation, tuple(operands), out))
        return out

    setattr(interpreter.InterpreterBuilder, name, noted)


def _remembered(
    call: Plan, count: int, make: Callable[[tuple[Any, ...], Any], Plan | None]
) -> Plan:
    """Return a function of `count` operands that has a plan for each combination of their kinds."""
    plans = dict[tuple[Any, ...], Plan | None]()

    def operate(*operands: Any, **options: Any) -> Any:
        if options or len(operands) != count:
            return call(*operands, **options)
        key = []
        for operand in operands:
            kind = type(operand)
            if kind is core.tensor:
                key.append(operand.type.name)
            elif kind is int or kind is core.dtype:
                key.append(operand if kind is int else operand.name)
            elif kind is float:
                key.append(repr(operand))  # which tells 1.0 from 1
            else:
                return call(*operands)
        kinds = tuple(key)
        plan = plans.get(kinds)
        if plan is not None:
            return plan(*operands)
        if kinds in plans:
            return call(*operands)
        _seen.clear()
        out = call(*operands)
        plan = make(operands, out)
        if len(plans) == _MOST_PLANS:
            plans.clear()
        plans[kinds] = plan if plan is not None and _same(plan(*operands), out) else None
        return out

    return operate


def _same(found: Any, expected: Any) -> bool:
    left, right = np.asarray(found.handle.data), np.asarray(expected.handle.data)
    alike = left.dtype == right.dtype and left.shape == right.shape
    return alike and left.tobytes() == right.tobytes()


def _is_plain(operand: Any) -> bool:
    """Whether NumPy casts it by `astype`: a number, or a tensor of no half floats or pointers."""
    if type(operand) is not core.tensor:
        return True
    return operand.dtype.is_int() or operand.dtype in (tl.float32, tl.float64)


def _only(out: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the one operation that made `out`, and its operands."""
    if len(_seen) != 1 or _seen[0][2] is not out.handle:
        return None
    return _seen[0][:2]


def _made(out: Any) -> Callable[[Any], Any]:
    """Return what makes a tensor of NumPy's numbers that is else like `out`."""
    tensor, handle, of, of_handle = (
        core.tensor,
        interpreter.TensorHandle,
        out.type,
        out.handle.dtype,
    )
    return lambda data: tensor(handle(data, of_handle), of)


def _operator(operands: tuple[Any, ...], out: Any, swapped: bool) -> Plan | None:
    only = _only(out)
    if only is None:
        return None
    (operation, (lhs, rhs)), (left, right) = only, operands
    number, made = type(right) is not core.tensor, _made(out)
    if operation == "create_addptr":
        if swapped or not left.dtype.is_ptr() or not (number or right.dtype.is_int_signed()):
            return None
        num_bytes = np.uint64(max(1, lhs.get_element_ty().primitive_bitwidth // 8))
        if number:
            far = num_bytes * rhs.data.ravel()[:1].astype(np.uint64)
            return lambda a, b: made(a.handle.data + far)
        return lambda a, b: made(a.handle.data + num_bytes * b.handle.data.astype(np.uint64))
    if not _is_plain(left) or not _is_plain(right):
        return None
    its, others = (rhs, lhs) if swapped else (lhs, rhs)
    as_left, as_right, as_out = its.data.dtype, others.data.dtype, out.handle.data.dtype
    constant = others.data.ravel()[:1]

    def computed(a: Any, b: Any) -> Any:
        x, y = a.handle.data, constant if number else b.handle.data
        if x.dtype is not as_left:
            x = x.astype(as_left)
        if y.dtype is not as_right:
            y = y.astype(as_right)
        found = operation(y, x) if swapped else operation(x, y)
        return made(found if found.dtype is as_out else found.astype(as_out))

    return computed


def _cast(operands: tuple[Any, ...], out: Any) -> Plan | None:
    tensor, dtype = operands
    if out is tensor:
        return lambda a, _: a
    if not _is_plain(tensor) or not _is_plain(out) or dtype is tl.int1:
        return None
    made, to = _made(out), out.handle.data.dtype
    return lambda a, _: made(a.handle.data.astype(to))


def _select(operands: tuple[Any, ...], out: Any) -> Plan | None:
    only = _only(out)
    if only is None or only[0] is not np.where or not all(map(_is_plain, operands)):
        return None
    made, to = _made(out), out.handle.data.dtype
    constants = [
        None if type(operand) is core.tensor else handle.data.ravel()[:1]
        for operand, handle in zip(operands, only[1], strict=True)
    ]

    def selected(*operands: Any) -> Any:
        condition, x, y = (
            operand.handle.data if constant is None else constant
            for operand, constant in zip(operands, constants, strict=True)
        )
        return made(np.where(condition, x.astype(to, copy=False), y.astype(to, copy=False)))

    return selected
