"""Instructions on registers as Python: arithmetic, comparison, conversion, moves."""

from __future__ import annotations

from tests.compiled.emulator.operands import Operands, cast, dtype_of, types_of
from tests.compiled.emulator.ptx import Instruction

_COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_UNORDERED = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
"""The comparison whose opposite is true, or which NaN makes true."""


class Opcodes(Operands):
    """One method per opcode; an unknown one, and an unknown modifier, raises."""

    def _result(self, i: Instruction, text: str) -> list[str]:
        """Assign to the first operand, of the last type."""
        flush = "ftz" in i.opcode and i.opcode[-1] == "f32"
        return self._into(i.operands[0], i.opcode[-1], f"flushed({text})" if flush else text)

    def _given(self, i: Instruction, count: int) -> list[str]:
        """The operands behind the first as the last type has them."""
        assert len(i.operands) == count + 1, i.text
        flush = "ftz" in i.opcode and i.opcode[-1] == "f32"
        found = [self._source(each, i.opcode[-1]) for each in i.operands[1:]]
        return [f"flushed({each})" for each in found] if flush else found

    def _allow(self, i: Instruction, *modifiers: str) -> None:
        """Refuse an opcode with other parts than types and these."""
        for part in i.opcode[1:]:
            if part not in modifiers and part not in types_of(i):
                raise NotImplementedError(part)

    def _infix(self, i: Instruction, symbol: str) -> list[str]:
        self._allow(i, "rn", "ftz")
        a, b = self._given(i, 2)
        return self._result(i, f"{a} {symbol} {b}")

    def _op_add(self, i, at):
        return self._infix(i, "+")

    def _op_sub(self, i, at):
        return self._infix(i, "-")

    def _op_and(self, i, at):
        return self._infix(i, "&")

    def _op_or(self, i, at):
        return self._infix(i, "|")

    def _op_xor(self, i, at):
        return self._infix(i, "^")

    def _op_mul(self, i, at):
        return self._infix(i, "*") if i.opcode[-1][0] == "f" else self._product(i)

    def _op_mad(self, i, at):
        return self._product(i, i.operands[3])

    def _product(self, i: Instruction, addend: str | None = None) -> list[str]:
        self._allow(i, "lo", "wide")
        mode, kind, bits = i.opcode[1], i.opcode[-1][0], int(i.opcode[-1][1:])
        a, b = (self._source(x, i.opcode[-1]) for x in i.operands[1:3])
        out, text = i.opcode[-1], f"{a} * {b}"
        if mode == "wide":
            out, wide = f"{kind}{2 * bits}", dtype_of(kind, 2 * bits)
            text = f"{cast(a, wide)} * {cast(b, wide)}"
        if addend is not None:
            text = f"({text}) + {self._source(addend, out)}"
        return self._into(i.operands[0], out, text)

    def _op_fma(self, i, at):
        self._allow(i, "rn", "ftz")
        a, b, c = self._given(i, 3)
        return self._result(i, f"N.fma{i.opcode[-1][1:]}({a}, {b}, {c})")

    def _op_div(self, i, at):
        self._allow(i, "rn", "full", "ftz")
        a, b = self._given(i, 2)
        if "full" in i.opcode:
            return self._result(i, f"M.approximate.div({a}, {b})")
        if i.opcode[-1][0] == "f":
            return self._infix(i, "/")
        return self._result(i, f"N.divided({a}, {b})" if i.opcode[1][0] == "s" else f"{a} // {b}")

    def _op_rem(self, i, at):
        self._allow(i)
        return self._result(i, "np.fmod({}, {})".format(*self._given(i, 2)))

    def _op_min(self, i, at):
        self._allow(i, "NaN")
        a, b = self._given(i, 2)
        if i.opcode[-1][0] == "f":
            return self._result(i, f"N.smaller({a}, {b}, {'NaN' in i.opcode})")
        return self._result(i, f"np.minimum({a}, {b})")

    def _op_max(self, i, at):
        self._allow(i, "NaN")
        a, b = self._given(i, 2)
        if i.opcode[-1][0] == "f":
            return self._result(i, f"N.larger({a}, {b}, {'NaN' in i.opcode})")
        return self._result(i, f"np.maximum({a}, {b})")

    def _prefix(self, i: Instruction, text: str) -> list[str]:
        self._allow(i)
        return self._result(i, text.format(*self._given(i, 1)))

    def _op_abs(self, i, at):
        return self._prefix(i, "np.abs({})")

    def _op_neg(self, i, at):
        return self._prefix(i, "-{}")

    def _op_not(self, i, at):
        return self._prefix(i, "~{}")

    def _op_popc(self, i, at):
        return self._prefix(i, "np.bitwise_count({})")

    def _op_shl(self, i, at):
        return self._shift(i, "shifted_left", "<<")

    def _op_shr(self, i, at):
        return self._shift(i, "shifted_right", ">>")

    def _shift(self, i: Instruction, helper: str, symbol: str) -> list[str]:
        self._allow(i)
        kind, bits = i.opcode[-1][0], int(i.opcode[-1][1:])
        a, amount = self._source(i.operands[1], i.opcode[-1]), i.operands[2]
        if amount.isdigit() and int(amount) < bits:
            return self._result(i, f"{a} {symbol} {dtype_of(kind, bits)}({amount})")
        return self._result(i, f"N.{helper}({a}, {self._source(amount, 'u32')}, {bits})")

    def _op_bfe(self, i, at):
        self._allow(i)
        a = self._source(i.operands[1], i.opcode[-1])
        start, length = (self._source(x, "u32") for x in i.operands[2:])
        return self._result(i, f"N.extracted({a}, {start}, {length}, {i.opcode[-1] == 's32'})")

    def _op_prmt(self, i, at):
        self._allow(i)
        return self._result(i, "N.permuted({}, {}, {})".format(*self._given(i, 3)))

    def _op_setp(self, i, at):
        name, t = i.opcode[1], i.opcode[-1]
        assert len(i.opcode) == 3 and "|" not in i.operands[0], i.text
        a, b = self._given(i, 2)
        if name in _COMPARISONS:
            text = f"{a} {_COMPARISONS[name]} {b}"
            if name == "ne" and t[-3:-2] == "f":  # NaN makes an ordered comparison false
                text = f"({text}) & ({a} == {a}) & ({b} == {b})"
        elif name in ("num", "nan"):
            text = f"({a} == {a}) & ({b} == {b})"
            text = text if name == "num" else f"~({text})"
        elif name == "equ":
            text = f"~(({a} < {b}) | ({a} > {b}))"
        else:
            text = f"~({a} {_UNORDERED[name]} {b})"
        return self._into(i.operands[0], "pred", text)

    def _op_selp(self, i, at):
        t = i.opcode[-1]
        a, b = (self._source(x, t) for x in i.operands[1:3])
        return self._result(i, f"np.where({self._source(i.operands[3], 'pred')}, {a}, {b})")

    def _op_mov(self, i, at):
        t, (to, of) = i.opcode[-1], i.operands
        if isinstance(to, list):
            bits = int(t[1:])
            part, lines = bits // len(to), [f"x = {self._source(of, f'u{bits}')}"]
            for k, register in enumerate(to):
                text = f"(x >> np.uint{bits}({k * part})).astype(np.uint{part})"
                lines += self._into(register, f"b{part}", text)
            return lines
        if isinstance(of, list):
            bits = int(t[1:])
            part = bits // len(of)
            wide = (cast(self._source(x, f"u{part}"), f"np.uint{bits}") for x in of)
            text = " | ".join(f"({x} << np.uint{bits}({k * part}))" for k, x in enumerate(wide))
            return self._into(to, f"b{bits}", text)
        return self._into(to, t, self._source(of, t))

    def _op_cvt(self, i, at):
        (to, of), register = types_of(i), i.operands[0]
        modes = [part for part in i.opcode[1:] if part not in (to, of)]
        flush, mode = "ftz" in modes, "".join(part for part in modes if part != "ftz")
        if to in ("bf16x2", "f16x2"):
            assert mode == "rn" and of == "f32" and not flush, i.name
            half = "N.to_bfloat({})" if to == "bf16x2" else "{}.astype(np.float16).view(np.uint16)"
            high, low = (half.format(self._source(x, "f32")) for x in i.operands[1:])
            text = f"({high}.astype(np.uint32) << np.uint32(16)) | {low}.astype(np.uint32)"
            return self._into(register, "b32", text)
        a = self._source(i.operands[1], of)
        a = f"flushed({a})" if flush else a
        if "bf16" in (to, of):
            assert (to, mode) in (("f32", ""), ("bf16", "rn")) and not flush, i.name
            return self._into(register, to, a)
        signed, bits = to[0] == "s", int(to[1:])
        if of[0] == to[0] == "f":
            if of == to:
                return self._into(register, to, f"N.rounded({a}, '{mode}')")
            if mode in ("rpi", "rmi", "rzi", "rni"):
                a = f"N.rounded({a}, '{mode}')"
            else:
                assert mode in ("", "rn"), i.name
            return self._into(register, to, f"{a}.astype(np.float{bits})")
        if of[0] == "f":
            text = f"N.to_integer({a}, '{mode}', {bits}, {signed})"
            return self._into(register, to, text, extend=True)
        if to[0] == "f":
            assert mode == "rn", i.name
            return self._into(register, to, f"{a}.astype(np.float{bits})")
        assert mode == "", i.name
        return self._into(register, to, cast(a, dtype_of(to[0], bits)), extend=True)

    def _approximation(self, i: Instruction, name: str) -> list[str]:
        self._allow(i, "approx", "ftz")
        a = self._source(i.operands[1], "f32")
        return self._into(i.operands[0], "f32", f"M.approximate.{name}({a}, {'ftz' in i.opcode})")

    def _op_lg2(self, i, at):
        return self._approximation(i, "lg2")

    def _op_ex2(self, i, at):
        return self._approximation(i, "ex2")

    def _op_sqrt(self, i, at):
        return self._approximation(i, "sqrt")
