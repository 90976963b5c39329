"""Makes Triton's interpreter do once what it does again and again; a kernel computes the same.

Eight things cost most of a test of kernels, and have no result:

- Before it runs a function, the interpreter puts its own operations in the place of
  `triton.language`'s, and restores them when a launch ends. It does so for the kernel, and once
  more at each call of a jitted function in it, some hundred times per program.
- Beside every integer operation of less than 64 bits it computes whether that overflows. Then it
  drops the answer, because it only asserts under an option that nothing sets.
- It makes the table of NumPy's types anew each time it looks one up.
- It makes the shape of a tensor, and the name of its type, anew for every tensor.
- It finds the common type and shape of two operands anew at each operation. Most have the same, or
  are a block and a number. It makes a tensor of a constant anew each time.
- It calls an operation through three functions that hand it on.
- It looks into every operand for a constant, and at every result for its number of bits.
- It decides at every operator anew how its operands become of one type and shape
  (`interpreter_plans.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support.interpreter_plans import planned, see_operations

_WRITTEN_FOR = "3.7."
"""The versions of Triton whose interpreter does these; others are left as they are."""


def spare_repetitions() -> None:
    """Change the interpreter of this process; a second call does nothing."""
    patched = isinstance(interpreter._patch_lang, _Once)
    if patched or not triton.__version__.startswith(_WRITTEN_FOR):
        return
    interpreter._patch_lang = _Once()
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _keep_numpy_types()
    _keep_shapes_of_types()
    _keep_shapes_of_tensors()
    _keep_operands()
    see_operations()
    _call_operations_themselves()
    _look_into_no_tensor()


class _Once:
    """Takes the place of `_patch_lang`, which is called with a function that is about to run.

    Its functions stay in place for the life of the process, which compiles nothing.
    """

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._in_place = set[Any]()

    def __call__(self, fn: Any) -> Any:
        if len(self._in_place) < 2:  # tl and tl.core, whichever the function's module has
            found = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
            if not found or not found <= self._in_place:
                self._patch(fn)
                self._in_place |= found
        return interpreter._LangPatchScope()  # with nothing to restore


def _keep_numpy_types() -> None:
    make, known = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(dtype: Any) -> Any:
        element = dtype.scalar
        found = known.get(element.name)
        if found is None:
            found = known[element.name] = make(element)
        return found

    interpreter._get_np_dtype = numpy_type


def _keep_shapes_of_types() -> None:
    """A shape is checked, and its type named, when a tensor first has it."""
    make, known = core.block_type.__init__, dict[tuple[Any, ...], tuple[Any, int, str]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        found = known.get(key)
        if found is not None:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found
            return
        make(self, element_ty, shape)
        if all(type(size) is int for size in shape):
            known[key] = self.shape, self.numel, self.name

    core.block_type.__init__ = init


def _keep_shapes_of_tensors() -> None:
    """Tensors of a shape share what says so; nothing writes into it."""
    known = dict[str, tuple[Any, Any]]()

    def init(self: Any, handle: Any, of: Any) -> None:
        self.handle, self.type, self.dtype = handle, of, of.scalar
        found = known.get(of.name)
        if found is None:
            sizes = tuple(of.shape) if of.is_block() else ()
            shape = core.tuple([core.constexpr(size) for size in sizes])
            found = known[of.name] = core.constexpr(math.prod(sizes)), shape
        self.numel, self.shape = found

    core.tensor.__init__ = init


_MOST_CONSTANTS, _LARGEST_CONSTANT = 4096, 4096
"""How many are kept, and how many elements one has at most."""


def _keep_operands() -> None:
    """Two tensors of one type are operands as they are, and so is a constant that was one before.

    Half floats are left alone, because a division makes floats of them, and so are pointers.
    """
    make, plain = TritonSemantic.binary_op_type_checking_impl, dict[str, bool]()
    constants = dict[tuple[Any, ...], Any]()

    def is_plain(of: Any) -> bool:
        found = plain.get(of.name)
        if found is None:
            scalar = of.scalar
            found = plain[of.name] = scalar.is_int() or scalar.is_fp32() or scalar.is_fp64()
        return found

    def operands(self: Any, lhs: Any, rhs: Any, *how: Any, **named: Any) -> Any:
        left, right = type(lhs), type(rhs)
        if left is core.tensor and right is core.tensor:
            if lhs.dtype.name == rhs.dtype.name and is_plain(lhs.dtype):
                if lhs.type.name == rhs.type.name:
                    return lhs, rhs
                if not lhs.type.is_block() or not rhs.type.is_block():
                    return self.broadcast_impl_value(lhs, rhs)
        elif left is core.tensor and right in (int, float) and is_plain(lhs.type):
            # repr tells 1.0 from 1.
            key = (repr(rhs), lhs.type.name, how, *named.items())
            found = constants.get(key)
            if found is not None:
                return lhs, found
            same, found = make(self, lhs, rhs, *how, **named)
            if same is lhs and found.numel.value <= _LARGEST_CONSTANT:
                if len(constants) == _MOST_CONSTANTS:
                    constants.clear()
                constants[key] = found
            return same, found
        return make(self, lhs, rhs, *how, **named)

    TritonSemantic.binary_op_type_checking_impl = operands


def _call_operations_themselves() -> None:
    """An operation that a kernel names is the innermost function, which is told the interpreter."""
    semantic = interpreter.interpreter_semantic

    def patch(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = inspect.unwrap(member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*args, **named)

        scope.set_attr(place, name, planned(place, name, call))

    interpreter._patch_attr = patch


def _look_into_no_tensor() -> None:
    unwrap, values = core._unwrap_if_constexpr, {core.tensor, int, float, bool, type(None)}

    def value_of(operand: Any) -> Any:
        kind = type(operand)
        if kind in values:
            return operand
        return operand.value if kind is core.constexpr else unwrap(operand)

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    core._unwrap_if_constexpr = value_of
    interpreter.TensorHandle.__init__ = init
