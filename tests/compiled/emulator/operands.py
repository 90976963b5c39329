"""Operands of an instruction as Python expressions, and assignments to registers.

The expressions name types as PTX does, in upper case: `U32`, `S64`, `F16`; b is as u.
"""

from __future__ import annotations

import re

import numpy as np

from tests.compiled.emulator.ptx import REGISTER_BITS, Instruction, Kernel

TYPES = {
    f"{kind}{bits}": np.dtype(f"{name}{bits // 8}").type
    for kind, name in (("U", "u"), ("S", "i"), ("F", "f"))
    for bits in (8, 16, 32, 64)
    if kind != "F" or bits > 8
}
VIEWS = {"b": "U", "u": "U", "s": "S", "f": "F"}
"""By kind of a type, the array of a register that has its bits so."""

SHARED_BASE = 1024
"""Where shared memory of a program begins; the system keeps 1 KB before it."""


class Operands:
    """The names of a kernel's Python source.

    Attributes:
        where: the name of the threads that the instruction is executed for.
        python: of every register, its name in Python.
    """

    where: str

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        classes = enumerate(kernel.registers.items())
        self.python = {name: f"{kind}{number}" for number, (name, kind) in classes}

    def view(self, register: str, kind: str) -> str:
        """Return the whole array of a register, seen as b, u, s or f, or as pairs of f."""
        return self.python[register] + VIEWS.get(kind, kind) * (kind != "p")

    def source(self, operand: str, t: str) -> str:
        """Return an expression of an operand, as a type says."""
        if t == "pred":
            if operand in ("0", "1", "-1"):
                return str(operand != "0")
            bare = f"{self.python[operand.lstrip('!')]}[{self.where}]"
            return f"(~{bare})" if operand.startswith("!") else bare
        if t == "bf16":
            return f"N.from_bfloat({self.source(operand, 'b16')})"
        if t == "f32x2":
            return f"{self.view(operand, 'X')}[{self.where}]"
        kind, bits = t[0], int(t[1:])
        if operand in self.python:
            of = REGISTER_BITS[self.kernel.registers[operand]]
            if of == bits:
                return f"{self.view(operand, kind)}[{self.where}]"
            assert of > bits, f"{operand} has fewer bits than {t}"
            return f"{self.view(operand, 'b')}[{self.where}].astype({dtype_of(t)})"
        if operand.startswith("%globaltimer"):
            return "M.globaltimer()"
        if operand.startswith("%"):
            return f"M.special[{operand!r}][{self.where}]"
        if literal := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", operand):
            return f"U{bits}(0x{literal[1]}).view({dtype_of(t)})"
        if operand in self.kernel.shared:
            return f"U{bits}({SHARED_BASE})"
        assert kind != "f", f"the integer {operand} as a float"
        value = int(operand.rstrip("U"), 0) & ((1 << bits) - 1)
        return f"U{bits}({value}).view({dtype_of(t)})" if kind == "s" else f"U{bits}({value})"

    def into(self, register: str, t: str, text: str, extend: bool = False) -> list[str]:
        """Return the assignment of an expression, widened to the register if `extend`."""
        if register == "_":
            return []
        of = self.kernel.registers[register]
        if t == "bf16":
            t, text = "b16", f"N.to_bfloat({text})"
        kind = "p" if of == "p" else "X" if t == "f32x2" else t[0]
        if of != "p" and kind != "X" and REGISTER_BITS[of] != int(t[1:]):
            assert REGISTER_BITS[of] > int(t[1:]) and extend, f"{register} for {t}"
            kind = "s" if kind == "s" else "b"
        return [f"{self.view(register, kind)}[{self.where}] = {text}"]

    def address(self, operand: str) -> str:
        base, _, offset = (part.strip() for part in operand.strip("[] ").partition("+"))
        more = int(offset or "0", 0)
        if base not in self.python:
            return f"np.full(M.size({self.where}), {self.source(base, 'u32')} + {more})"
        width = REGISTER_BITS[self.kernel.registers[base]]
        text = self.source(base, f"u{width}")
        return f"({text} + U{width}({more % (1 << width)}))" if more else text


def dtype_of(t: str) -> str:
    return t.upper().replace("B", "U")


def types_of(i: Instruction) -> list[str]:
    """Return the parts of an opcode that are types."""
    kinds = r"[busf](8|16|32|64)|pred|bf16|(f16|bf16|f32)x2"
    return [part for part in i.opcode[1:] if re.fullmatch(kinds, part)]
