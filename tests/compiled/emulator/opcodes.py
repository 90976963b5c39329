"""Instructions as Python, in two tables: those with a result, and calls of the machine.

Keys are opcodes without types, `rn` and `ftz`; behind a space stands the kind of the type, if it
matters, and the number of sources. Operands are d, a, b, c and e, in their order, as the type has
them, or as the spec behind the colon says: another type, an address of 32 bits, a whole array, or
an integer. An unknown opcode or modifier raises, and so does an operand that a table leaves out.
"""

from __future__ import annotations

from string import Formatter

from tests.compiled.emulator.operands import Operands, dtype_of, types_of
from tests.compiled.emulator.ptx import Instruction

_INFIX = {
    "add": "+", "sub": "-", "mul f": "*", "mul.lo": "*", "div f": "/", "div u": "//",
    "and": "&", "or": "|", "xor": "^", "setp.eq": "==", "setp.ne": "!=",
    "setp.lt": "<", "setp.le": "<=", "setp.gt": ">", "setp.ge": ">=",
    "setp.lo": "<", "setp.ls": "<=", "setp.hi": ">", "setp.hs": ">=",
}  # fmt: skip
_UNORDERED = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
"""The comparison whose opposite is true, or which NaN makes true."""

_SHUFFLED = "{a:whole}, {b:u32}, {c:u32}, {e:u32}"

RESULTS = {
    **{name: f"{{a}} {symbol} {{b}}" for name, symbol in _INFIX.items()},
    **{f"setp.{name}": f"~({{a}} {symbol} {{b}})" for name, symbol in _UNORDERED.items()},
    "setp.ne f": "({a} < {b}) | ({a} > {b})",
    "setp.equ": "~(({a} < {b}) | ({a} > {b}))",
    "setp.num": "({a} == {a}) & ({b} == {b})",
    "setp.nan": "({a} != {a}) | ({b} != {b})",
    "mov": "{a}",
    "not": "~{a}",
    "neg": "-{a}",
    "abs": "np.abs({a})",
    "popc": "np.bitwise_count({a})",
    "fma": "N.fma{bits}({a}, {b}, {c})",
    "mad.lo": "{a} * {b} + {c}",
    "mul.hi u": "({a}.astype(U64) * {b}.astype(U64) >> U64({bits})).astype(U32)",
    "mul.wide": "{a}.astype({WIDE}) * {b}.astype({WIDE})",
    "mad.wide": "{a}.astype({WIDE}) * {b}.astype({WIDE}) + {c:{wide}}",
    "div s": "N.divided({a}, {b})",
    "div.full": "M.approximate.div({a}, {b})",
    "rem": "np.fmod({a}, {b})",
    "min": "np.minimum({a}, {b})",
    "max": "np.maximum({a}, {b})",
    **{
        f"{name}{nan} f{count}": f"N.{name}imum({bool(nan)}, {given})"
        for name in ("min", "max")
        for nan in ("", ".NaN")
        for count, given in ((2, "{a}, {b}"), (3, "{a}, {b}, {c}"))
    },
    "shl": "N.shifted_left({a}, {b:u32}, {bits})",
    "shr": "N.shifted_right({a}, {b:u32}, {bits})",
    "bfe": "N.extracted({a}, {b:u32}, {c:u32}, {signed})",
    "prmt": "N.permuted({a}, {b}, {c})",
    "selp": "np.where({c:pred}, {a}, {b})",
    **{f"{name}.approx": f"M.approximate.{name}({{a}})" for name in ("lg2", "ex2", "sqrt")},
    **{
        f"shfl.sync.{mode}": f"M.shuffle({{I}}, '{mode}', {_SHUFFLED}, {{at}})"
        for mode in ("bfly", "idx", "up")
    },
    **{
        f"redux.sync.{mode}": f"M.redux({{I}}, '{mode}', {{a}}, {{b:u32}}, {{at}})"
        for mode in ("add", "min", "max", "min.NaN", "max.NaN")
    },
    "mbarrier.try_wait.parity.shared_cta": "M.try_wait({I}, {a:address32}, {b:u32}, {at})",
}
CALLS = {
    "cp.async.commit_group": "M.commit({I}, 'copies')",
    "cp.async.wait_group": "M.wait_for({I}, 'copies', {d:integer}, {at})",
    "cp.async.bulk.prefetch.L2.global": "M.prefetch({I}, {d:address64}, {a:u32}, {at})",
    "wgmma.fence.sync.aligned": "pass",  # one array of a register has its values in order
    "wgmma.commit_group.sync.aligned": "M.commit({I}, 'products')",
    "wgmma.wait_group.sync.aligned": "M.wait_for({I}, 'products', {d:integer}, {at})",
    # Orders shared memory for products, which read it when they are waited for, after all of it.
    "fence.proxy.async.shared_cta": "M.fence_proxy({I})",
    "griddepcontrol.wait": "M.wait_for_launch({I})",
    "griddepcontrol.launch_dependents": "M.let_next_start({I})",
    "mbarrier.init.shared_cta": "M.init_barrier({I}, {d:address32}, {a:integer}, {at})",
    "mbarrier.inval.shared_cta": "M.forget_barrier({I}, {d:address32}, {at})",
}
_TENSOR = {
    "alloc.cta_group_1.sync.aligned.shared_cta": "allocate({I}, {d:address32}, {a:integer}, {at})",
    "relinquish_alloc_permit.cta_group_1.sync.aligned": "warps({I}, {at})",
    "dealloc.cta_group_1.sync.aligned": "free({I}, {d}, {a:integer}, {at})",
    "mma.cta_group_1.kind_f16": (
        "tensor_product({I}, {d:address32}, {a:u64}, {b:u64}, {c:u32}, {e:pred}, {at})"
    ),
    "commit.cta_group_1.mbarrier_arrive_one.shared_cluster": (
        "arrive_after_products({I}, {d:address32}, {at})"
    ),
    "wait_st.sync.aligned": "settle({I}, 'tensor stores', {at})",
    "wait_ld.sync.aligned": "settle({I}, 'tensor loads', {at})",
}
CALLS |= {f"tcgen05.{name}": f"M.{call}" for name, call in _TENSOR.items()}


class _Operand:
    """An operand, formatted as a spec says."""

    def __init__(self, of: Operands, operand: str | list[str], t: str, flush: bool) -> None:
        self._of, self._operand, self._t, self._flush = of, operand, t, flush

    def __format__(self, spec: str) -> str:
        operand = self._operand
        if spec.startswith("address"):
            return self._of.address(operand, int(spec[7:]))
        if spec == "whole":
            return self._of.view(operand, "b")
        if spec == "integer":
            return str(int(operand, 0))
        found = self._of.source(operand, spec or self._t)
        return f"flushed({found})" if self._flush and not spec else found


class Opcodes(Operands):
    """The tables, and a method for each opcode that they do not describe."""

    def one(self, i: Instruction, at: int) -> list[str]:
        """Return an instruction as Python statements."""
        types = types_of(i)
        key = ".".join(x for x in i.opcode if x not in (*types, "rn", "ftz"))
        t = types[0] if types else "b32"
        of_kind = (f"{key} {t[0]}{len(i.operands) - 1}", f"{key} {t[0]}", key)
        form = CALLS.get(key) or next((RESULTS[each] for each in of_kind if each in RESULTS), None)
        if form is None or (key == "mov" and any(isinstance(x, list) for x in i.operands)):
            return getattr(self, f"_op_{i.opcode[0]}")(i, at)
        flush = "ftz" in i.opcode and t in ("f32", "f32x2")
        # Of two types, as in add.f32.bf16, the second is that of all sources but the last.
        last, narrow = len(i.operands) - 1, types[1] if len(types) > 1 else t
        operands = {
            name: _Operand(self, x, narrow if 0 < k < last else t, flush)
            for k, (name, x) in enumerate(zip("dabce", i.operands, strict=False))
        }
        used = {name for _, name, _, _ in Formatter().parse(form) if name} | {"d"}
        assert set(operands) <= used and len(i.operands) < 6, i.text
        wide = f"{t[0]}{2 * int(t[1:])}" if "wide" in i.opcode else ""
        text = form.format(
            **operands, I=self.where, at=at, bits=t[1:].partition("x")[0], signed=t[0] == "s",
            wide=wide, WIDE=dtype_of(wide),
        )  # fmt: skip
        if key in CALLS:
            return [text]
        result = "pred" if i.opcode[0] in ("setp", "mbarrier") else wide or t
        flush &= result == t
        return self.into(i.operands[0], result, f"flushed({text})" if flush else text)

    def _op_elect(self, i: Instruction, at: int) -> list[str]:
        """The first lane of a whole warp."""
        lane, predicate = i.operands[0].split("|")
        first = self.into(predicate, "pred", f"M.special['%laneid'][{self.where}] == 0")
        return [f"M.warps({self.where}, {at})", *self.into(lane, "b32", "U32(0)"), *first]

    def _op_mov(self, i: Instruction, at: int) -> list[str]:
        """Parts of a register, or a register of parts."""
        bits, (to, of) = int(i.opcode[-1][1:]), i.operands
        part = bits // len(to if isinstance(to, list) else of)
        if isinstance(to, list):
            lines = [f"x = {self.source(of, f'u{bits}')}"]
            for k, register in enumerate(to):
                text = f"(x >> U{bits}({k * part})).astype(U{part})"
                lines += self.into(register, f"b{part}", text)
            return lines
        wide = (f"{self.source(x, f'u{part}')}.astype(U{bits})" for x in of)
        text = " | ".join(f"({x} << U{bits}({k * part}))" for k, x in enumerate(wide))
        return self.into(to, f"b{bits}", text)

    def _op_cvt(self, i: Instruction, at: int) -> list[str]:
        (to, of), register = types_of(i), i.operands[0]
        modes = [part for part in i.opcode[1:] if part not in (to, of)]
        mode = "".join(part for part in modes if part != "ftz")
        given = [self.source(x, of) for x in i.operands[1:]]
        if "ftz" in modes:
            given = [f"flushed({a})" for a in given]
        if to in ("bf16x2", "f16x2"):
            assert mode == "rn" and of == "f32", i.name
            half = "N.to_bfloat({})" if to == "bf16x2" else "{}.astype(F16).view(U16)"
            high, low = (f"{half.format(a)}.astype(U32)" for a in given)
            return self.into(register, "b32", f"({high} << U32(16)) | {low}")
        (a,) = given
        if "bf16" in (to, of):
            assert (to, mode) in (("f32", ""), ("bf16", "rn")), i.name
            return self.into(register, to, a)
        if of[0] == "f" and to[0] != "f":
            text = f"N.to_integer({a}, '{mode}', {to[1:]}, {to[0] == 's'})"
            return self.into(register, to, text, extend=True)
        if of[0] != "f":
            assert mode == ("rn" if to[0] == "f" else ""), i.name
        elif of == to or mode not in ("", "rn"):
            a = f"N.rounded({a}, '{mode}')"
        return self.into(register, to, f"{a}.astype({dtype_of(to)})", extend=to[0] != "f")
