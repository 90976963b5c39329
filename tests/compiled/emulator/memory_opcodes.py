"""Instructions of memory and matrices as calls of the machine, where a modifier is an argument."""

from __future__ import annotations

import re

from tests.compiled.emulator.opcodes import Opcodes
from tests.compiled.emulator.operands import dtype_of
from tests.compiled.emulator.ptx import Instruction

_ATOMICS = ("add", "max", "min", "or", "and")
_ORDERS = ("relaxed", "acq_rel", "release", "acquire")


def _parts(i: Instruction, *known: str) -> list[str]:
    """Return the parts of an opcode between its name and its type that are not these."""
    return [part for part in i.opcode[1:-1] if part not in known]


class MemoryOpcodes(Opcodes):
    """One method per opcode; an unknown modifier raises."""

    def _op_ld(self, i: Instruction, at: int) -> list[str]:
        t, (to, of) = i.opcode[-1], i.operands
        if "param" in i.opcode:
            text = f"M.param({of.strip('[] ')!r}, {dtype_of(t)})"
            return self.into(to, t, text, extend=True)
        registers = to if isinstance(to, list) else [to]
        (space,) = _parts(i, "volatile", f"v{len(registers)}")
        address = self.address(of, {"shared": 32, "global": 64}[space])
        given = f"{self.where}, {address}, {int(t[1:]) // 8}, {len(registers)}, {at}"
        lines = [f"x = M.load_{space}({given})"]
        for k, register in enumerate(registers):
            text = f"x[:, {k}]" + (f".astype({dtype_of(t)})" if t[0] == "s" else "")
            lines += self.into(register, t.replace("f", "b"), text, extend=True)
        return lines

    def _op_st(self, i: Instruction, at: int) -> list[str]:
        bits, (to, of) = int(i.opcode[-1][1:]), i.operands
        registers = of if isinstance(of, list) else [of]
        (space,) = _parts(i, "wt", f"v{len(registers)}")
        address = self.address(to, {"shared": 32, "global": 64}[space])
        values = ", ".join(self.source(x, f"u{bits}") for x in registers)
        return [f"M.store_{space}({self.where}, {address}, {bits // 8}, [{values}], {at})"]

    def _op_atom(self, i: Instruction, at: int) -> list[str]:
        t, (register, to, value) = i.opcode[-1], i.operands
        (name,), (order,) = ([x for x in i.opcode if x in kind] for kind in (_ATOMICS, _ORDERS))
        (scope,) = _parts(i, "global", name, order)
        assert t[0] in "bsu" and scope in ("cta", "gpu", "sys") and "global" in i.opcode, i.name
        given = f"{self.address(to, 64)}, {dtype_of(t)}, {self.source(value, t)}, {at}"
        call = f"M.atomic({self.where}, {name!r}, {order!r}, {scope!r}, {given})"
        return [f"x = {call}", *self.into(register, t, "x")]

    def _op_cp(self, i: Instruction, at: int) -> list[str]:
        assert re.fullmatch(r"cp\.async\.c[ag]\.shared\.global", i.name), i.name
        to, of = self.address(i.operands[0], 32), self.address(i.operands[1], 64)
        size, *given = i.operands[2:]
        bytes_given = self.source(given[0] if given else size, "u32")
        return [f"M.copy({self.where}, {to}, {of}, {int(size, 0)}, {bytes_given}, {at})"]

    def _op_ldmatrix(self, i: Instruction, at: int) -> list[str]:
        form = r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16"
        found = re.fullmatch(form, i.name)
        assert found, i.name
        registers, address = i.operands if found[1] == "ld" else reversed(i.operands)
        call = {"ld": "load_matrix", "st": "store_matrix"}[found[1]]
        given = f"{self.registers(registers, 'b')}, {self.address(address, 32)}, {bool(found[2])}"
        return [f"M.{call}({self.where}, {given}, {at})"]

    _op_stmatrix = _op_ldmatrix

    def _op_mma(self, i: Instruction, at: int) -> list[str]:
        form = r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.(?:satfinite\.)?([fs]32)\.(\w+)\.\3\.\2"
        found = re.fullmatch(form, i.name)
        assert found, i.name
        shape, out, kind = found.groups()
        d, a, b, c = (
            self.registers(x, k)
            for x, k in zip(i.operands, (out[0], "b", "b", out[0]), strict=True)
        )
        return [f"M.mma({self.where}, {shape!r}, {kind!r}, {d}, {a}, {b}, {c}, {at})"]

    def _op_wgmma(self, i: Instruction, at: int) -> list[str]:
        form = r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k\d+)\.([fs]32)\.(\w+)\.\3"
        found = re.fullmatch(form, i.name)
        assert found, i.name
        shape, out, kind = found.groups()
        d, a, b, keep, *rest = i.operands
        left = self.registers(a, "b") if isinstance(a, list) else self.view(a, "b")
        given = f"{self.registers(d, out[0])}, {left}, {self.view(b, 'b')}"
        given += f", {self.source(keep, 'pred')}, {[int(x) for x in rest]}"
        return [f"M.wgmma({self.where}, {shape!r}, {kind!r}, {given}, {at})"]

    def _op_tcgen05(self, i: Instruction, at: int) -> list[str]:
        """Loads and stores of tensor memory, a lane of it per thread; perhaps in two halves."""
        form = r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x\d+\.b32"
        found = re.fullmatch(form, i.name)
        assert found, i.name
        if found[1] == "ld":
            registers, to, *half = i.operands
        else:
            to, *half, registers = i.operands
        assert bool(half) == (found[2] == "16x32bx2"), i.text
        given = f"{self.where}, {self.registers(registers, 'b')}, {self.address(to, 32)}"
        call = {"ld": "load_tensor", "st": "store_tensor"}[found[1]]
        return [f"M.{call}({given}, {int(half[0]) if half else None}, {at})"]
