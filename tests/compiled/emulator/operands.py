"""Operands of an instruction as Python expressions, and assignments to registers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.compiled.emulator.ptx import REGISTER_BITS, Instruction, Kernel

ARRAYS: dict[str, Any] = {"p": np.bool_, "h": np.uint16, "r": np.uint32, "d": np.uint64}
VIEWS: dict[str, dict[str, Any]] = {
    "h": {"i": np.int16, "f": np.float16},
    "r": {"i": np.int32, "f": np.float32},
    "d": {"i": np.int64, "f": np.float64},
}
"""How the bits of a register are seen, by class and suffix of a name."""

SHARED_BASE = 1024
"""Where shared memory of a program begins; the system keeps 1 KB before it."""
_LITERALS = {"f": 32, "F": 32, "d": 64, "D": 64}
_PER_THREAD = ("tid.x", "ctaid.x", "ctaid.y", "ctaid.z", "laneid")
_OF_LAUNCH = ("nctaid.x", "nctaid.y", "nctaid.z", "ntid.x")


class Operands:
    """The names and constants of a kernel's Python source.

    Attributes:
        where: the name of the threads that the instruction is executed for.
        python: of every register, its name in Python.
        constants: numbers by their names in Python.
        views: the name and suffix of registers that are seen as signed integers or floats.
    """

    where: str

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.python = {
            name: f"{kind}{number}" for number, (name, kind) in enumerate(kernel.registers.items())
        }
        self.constants: dict[str, Any] = {}
        self.views: set[tuple[str, str]] = set()

    def _view(self, register: str, kind: str) -> str:
        """Return the whole array of a register, seen as b, u, s or f."""
        name, of = self.python[register], self.kernel.registers[register]
        if of == "p" or kind in "bu":
            return name
        suffix = "i" if kind == "s" else "f"
        self.views.add((name, suffix))
        return f"{name}_{suffix}"

    def _constant(self, value: Any) -> str:
        name = f"c_{value.dtype.name}_{value.tobytes().hex()}"
        self.constants[name] = value
        return name

    def _source(self, operand: str, type_name: str) -> str:
        """Return an expression of an operand, as the type says."""
        if type_name == "pred":
            if operand in ("0", "1", "-1"):
                return str(operand != "0")
            bare = f"{self.python[operand.lstrip('!')]}[{self.where}]"
            return f"(~{bare})" if operand.startswith("!") else bare
        if type_name == "bf16":
            return f"N.from_bfloat({self._source(operand, 'b16')})"
        kind, bits = type_name[0], int(type_name[1:])
        if operand in self.python:
            of = REGISTER_BITS[self.kernel.registers[operand]]
            if of == bits:
                return f"{self._view(operand, kind)}[{self.where}]"
            assert of > bits, f"{operand} has fewer bits than {type_name}"
            return f"{self.python[operand]}[{self.where}].astype({dtype_of(kind, bits)})"
        if operand.startswith("%"):
            return self._special(operand[1:])
        if literal := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", operand):
            size = _LITERALS[literal[1]]
            raw = np.array(int(literal[2], 16), f"u{size // 8}")
            return self._constant(
                raw.view(f"{kind.replace('s', 'i').replace('b', 'u')}{size // 8}")[()]
            )
        if operand in self.kernel.shared:
            return self._constant(np.dtype(f"u{bits // 8}").type(SHARED_BASE))
        assert kind != "f", f"the integer {operand} as a float"
        value = int(operand.rstrip("U"), 0) & ((1 << bits) - 1)
        raw = np.array(value, f"u{bits // 8}")
        return self._constant((raw.view(f"i{bits // 8}") if kind == "s" else raw)[()])

    def _special(self, name: str) -> str:
        if name.startswith("globaltimer"):
            return "M.globaltimer()"
        if name in _PER_THREAD:
            return f"M.{name.replace('.', '_')}[{self.where}]"
        if name in _OF_LAUNCH:
            return f"M.{name.replace('.', '_')}"
        if name in ("tid.y", "tid.z"):
            return "np.uint32(0)"
        raise NotImplementedError(f"%{name}")

    def _into(self, register: str, type_name: str, text: str, extend: bool = False) -> list[str]:
        """Return the assignment of an expression, widened to the register if `extend`."""
        if register == "_":
            return []
        of = self.kernel.registers[register]
        if of == "p":
            return [f"{self.python[register]}[{self.where}] = {text}"]
        if type_name == "bf16":
            type_name, text = "b16", f"N.to_bfloat({text})"
        kind, bits = type_name[0], int(type_name[1:])
        if REGISTER_BITS[of] == bits:
            return [f"{self._view(register, kind)}[{self.where}] = {text}"]
        assert REGISTER_BITS[of] > bits and extend, f"{register} for {type_name}"
        return [f"{self._view(register, 's' if kind == 's' else 'b')}[{self.where}] = {text}"]

    def _address(self, operand: str, bits: int) -> str:
        base, _, offset = (part.strip() for part in operand.strip("[] ").partition("+"))
        if base not in self.python:
            start = f"{self._source(base, f'u{bits}')} + np.uint{bits}({int(offset or '0', 0)})"
            return f"np.full(M.size({self.where}), {start})"
        width = REGISTER_BITS[self.kernel.registers[base]]
        text = self._source(base, f"u{width}")
        more = int(offset or "0", 0) & ((1 << width) - 1)
        return (
            f"({text} + {self._constant(np.dtype(f'u{width // 8}').type(more))})" if more else text
        )

    def _registers(self, operand: str | list[str], kind: str) -> str:
        names = operand if isinstance(operand, list) else [operand]
        return f"[{', '.join(self._view(name, kind) for name in names)}]"


def dtype_of(kind: str, bits: int) -> str:
    return f"np.{'' if kind == 's' else 'u'}int{bits}"


def cast(text: str, dtype: str) -> str:
    return f"{dtype}({text})" if text.startswith("c_") else f"{text}.astype({dtype})"


def types_of(i: Instruction) -> list[str]:
    """Return the parts of an opcode that are types."""
    kinds = r"[busf](8|16|32|64)|pred|bf16|f16|f16x2|bf16x2"
    return [part for part in i.opcode[1:] if re.fullmatch(kinds, part)]
