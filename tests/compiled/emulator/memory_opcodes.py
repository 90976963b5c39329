"""Instructions of memory, warps and matrices as Python: calls of the machine's methods."""

from __future__ import annotations

import re

from tests.compiled.emulator.operands import Operands, dtype_of
from tests.compiled.emulator.ptx import Instruction

_ATOMICS = ("add", "max", "min", "or", "and")
_MATRIX_TYPES = r"bf16|f16|s8|f32|s32"


def space_of(i: Instruction) -> str:
    """Return the state space that an instruction names."""
    (space,) = [part for part in i.opcode if part in ("global", "shared", "param")]
    return space


class MemoryOpcodes(Operands):
    """One method per opcode; an unknown one, and an unknown modifier, raises."""

    def _op_ld(self, i, at):
        t, space = i.opcode[-1], space_of(i)
        kind, bits = t[0], int(t[1:])
        if space == "param":
            dtype = {"f": f"np.float{bits}"}.get(kind) or dtype_of(kind, bits)
            text = f"M.param({i.operands[1].strip('[] ')!r}, {dtype})"
            return self._into(i.operands[0], t, text, extend=True)
        registers = i.operands[0] if isinstance(i.operands[0], list) else [i.operands[0]]
        rest = [x for x in i.opcode[1:-1] if x not in (space, "volatile", f"v{len(registers)}")]
        assert not rest, i.name
        address = self._address(i.operands[1], 32 if space == "shared" else 64)
        call = f"M.load_{space}({self.where}, {address}, {bits // 8}, {len(registers)}, {at})"
        lines = [f"x = {call}"]
        for k, register in enumerate(registers):
            text = f"x[:, {k}]" + (f".astype(np.int{bits})" if kind == "s" else "")
            lines += self._into(register, t if kind != "f" else f"b{bits}", text, extend=True)
        return lines

    def _op_st(self, i, at):
        t, space = i.opcode[-1], space_of(i)
        bits = int(t[1:])
        registers = i.operands[1] if isinstance(i.operands[1], list) else [i.operands[1]]
        rest = [x for x in i.opcode[1:-1] if x not in (space, "wt", f"v{len(registers)}")]
        assert not rest, i.name
        address = self._address(i.operands[0], 32 if space == "shared" else 64)
        values = ", ".join(self._source(x, f"u{bits}") for x in registers)
        return [f"M.store_{space}({self.where}, {address}, {bits // 8}, [{values}], {at})"]

    def _op_atom(self, i, at):
        call = self._atomic(i, i.operands[1], i.operands[2], at)
        return [f"x = {call}", *self._into(i.operands[0], i.opcode[-1], "x")]

    def _atomic(self, i: Instruction, to: str, value: str, at: int) -> str:
        t = i.opcode[-1]
        assert space_of(i) == "global" and t[0] in "bsu", i.name
        parts = [x for x in i.opcode[1:-1] if x != "global"]
        (name,) = (x for x in parts if x in _ATOMICS)
        (order,) = (x for x in parts if x in ("relaxed", "acq_rel", "release", "acquire"))
        (scope,) = set(parts) - {name, order}
        assert scope in ("cta", "gpu", "sys"), i.name
        arguments = f"{self._address(to, 64)}, {t!r}, {self._source(value, t)}"
        return f"M.atomic({self.where}, {name!r}, {order!r}, {scope!r}, {arguments}, {at})"

    def _op_cp(self, i, at):
        kind = i.opcode[1:]
        if kind == ["async", "commit_group"]:
            return [f"M.commit_copies({self.where})"]
        if kind == ["async", "wait_group"]:
            return [f"M.wait_for_copies({self.where}, {int(i.operands[0])})"]
        if kind == ["async", "bulk", "prefetch", "L2", "global"]:
            address, size = self._address(i.operands[0], 64), self._source(i.operands[1], "u32")
            return [f"M.prefetch({self.where}, {address}, {size}, {at})"]
        assert kind in (["async", how, "shared", "global"] for how in ("ca", "cg")), i.name
        to, of = self._address(i.operands[0], 32), self._address(i.operands[1], 64)
        size = int(i.operands[2], 0)
        given = self._source(i.operands[3], "u32") if len(i.operands) > 3 else f"np.uint32({size})"
        return [f"M.copy({self.where}, {to}, {of}, {size}, {given}, {at})"]

    def _op_shfl(self, i, at):
        assert i.opcode[1] == "sync" and "|" not in i.operands[0], i.text
        b, c = (self._source(x, "u32") for x in i.operands[2:4])
        given = f"{self.where}, {i.opcode[2]!r}, {self.python[i.operands[1]]}, {b}, {c}, {at}"
        return self._into(i.operands[0], "b32", f"M.shuffle({given})")

    def _op_redux(self, i, at):
        t = i.opcode[-1]
        assert i.opcode[1] == "sync" and t[0] in "su", i.name
        text = f"M.redux({self.where}, {i.opcode[2]!r}, {self._source(i.operands[1], t)}, {at})"
        return self._into(i.operands[0], t, text)

    def _op_ldmatrix(self, i, at):
        return self._matrix(i, "load_matrix", *i.operands, at)

    def _op_stmatrix(self, i, at):
        return self._matrix(i, "store_matrix", i.operands[1], i.operands[0], at)

    def _matrix(
        self, i: Instruction, call: str, registers: str | list[str], address: str, at: int
    ) -> list[str]:
        assert i.opcode[1:4] == ["sync", "aligned", "m8n8"] and i.opcode[-1] == "b16", i.name
        given = f"{self._registers(registers, 'b')}, {self._address(address, 32)}"
        return [f"M.{call}({self.where}, {given}, {'trans' in i.opcode}, {at})"]

    def _op_mma(self, i, at):
        assert i.opcode[1:3] == ["sync", "aligned"] and i.opcode[4:6] == ["row", "col"], i.name
        out, a, b, _ = i.opcode[-4:]
        assert a == b, i.name
        kind = "s" if out == "s32" else "f"
        d, c = (self._registers(x, kind) for x in (i.operands[0], i.operands[3]))
        ra, rb = (self._registers(x, "b") for x in i.operands[1:3])
        return [f"M.mma({self.where}, {i.opcode[3]!r}, {a!r}, {d}, {ra}, {rb}, {c}, {at})"]

    def _op_wgmma(self, i, at):
        kind = i.opcode[1]
        if kind == "fence":
            return ["pass"]  # orders registers, which one array of a register has in order
        if kind == "commit_group":
            return [f"M.commit_products({self.where})"]
        if kind == "wait_group":
            return [f"M.wait_for_products({self.where}, {int(i.operands[0])}, {at})"]
        assert i.opcode[1:4] == ["mma_async", "sync", "aligned"], i.name
        out, a, b = (x for x in i.opcode if re.fullmatch(_MATRIX_TYPES, x))
        shape = next(x for x in i.opcode if re.fullmatch(r"m64n\d+k\d+", x))
        assert a == b, i.name
        d = self._registers(i.operands[0], "s" if out == "s32" else "f")
        left, right, scale, *rest = i.operands[1:]
        ra = self._registers(left, "b") if isinstance(left, list) else self.python[left]
        keep = self._source(scale, "pred")
        given = f"{d}, {ra}, {self.python[right]}, {keep}, {[int(x) for x in rest]}"
        return [f"M.wgmma({self.where}, {shape!r}, {a!r}, {given}, {at})"]

    def _op_griddepcontrol(self, i, at):
        call = {"wait": "wait_for_launch", "launch_dependents": "let_next_start"}[i.opcode[1]]
        return [f"M.{call}({self.where})"]

    def _op_fence(self, i, at):
        """Order shared memory for wgmma, which reads it when it is waited for, after all of it."""
        assert i.opcode[1:] == ["proxy", "async", "shared_cta"], i.name
        return [f"M.fence_proxy({self.where})"]
