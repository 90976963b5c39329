"""Instructions as Python, in two tables: those with a result, and calls of the machine.

Keys of RESULTS are opcodes without types, `rn` and `ftz`; behind a space stands the kind of the
type, if it matters, and the number of sources. Keys of CALLS are patterns of whole opcodes, whose
groups are 1, 2 and 3. Operands are d, a, b, c and e, in their order, as the type has them, or as
the spec behind the colon says: another type, an address, a whole array, several arrays or numbers,
or an integer. An unknown opcode or modifier raises, and so does an operand that a table leaves out.
"""

from __future__ import annotations

import re
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
    "add.s16x2": (
        "((({a} >> U32(16)) + ({b} >> U32(16))) << U32(16)) | (({a} + {b}) & U32(0xFFFF))"
    ),
    "fma": "N.fma({a}, {b}, {c})",
    "mad.lo": "{a} * {b} + {c}",
    "mul.hi u": "({a}.astype(U64) * {b}.astype(U64) >> U64({bits})).astype(U32)",
    "mul.wide": "{a}.astype({WIDE}) * {b}.astype({WIDE})",
    "mad.wide": "{a}.astype({WIDE}) * {b}.astype({WIDE}) + {c:{wide}}",
    "div s": "N.divided({a}, {b})",
    **{f"div.{how}": "M.approximate.div({a}, {b})" for how in ("full", "approx")},
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
    **{
        f"atom.global.{scope}.{order}.{name}": (
            f"M.atomic({{I}}, '{name}', '{order}', '{scope}', {{a:address}}, {{T}}, {{b}}, {{at}})"
        )
        for scope in ("cta", "gpu", "sys")
        for order in ("relaxed", "acq_rel", "release", "acquire")
        for name in ("add", "max", "min", "or", "and")
    },
    "mbarrier.try_wait.parity.shared": "M.try_wait({I}, {a:address}, {b:u32}, {at})",
}
CALLS = {
    r"st\.(global|shared)(?:\.wt)?(?:\.v[24])?\.[bfsu](\d+)": (
        "store_{1}({I}, {d:address}, {2} // 8, {a:list{2}}, {at})"
    ),
    r"red\.global\.(cta|gpu|sys)\.(relaxed|release)\.(add|max|min|or|and)\.([bsu]\d+)": (
        "atomic({I}, '{3}', '{2}', '{1}', {d:address}, {T}, {a:{4}}, {at})"
    ),
    r"cp\.async\.c[ag]\.shared\.global": (
        "copy({I}, {d:address}, {a:address}, {b:integer}, {c:u32}, {at})"
    ),
    r"cp\.async\.commit_group": "commit({I}, 'copies')",
    r"cp\.async\.wait_group": "wait_for({I}, 'copies', {d:integer}, {at})",
    r"cp\.async\.bulk\.prefetch\.L2\.global": "prefetch({I}, {d:address}, {a:u32}, {at})",
    r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16": (
        "load_matrix({I}, {d:arraysb}, {a:address}, {1!r}, {at})"
    ),
    r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16": (
        "store_matrix({I}, {a:arraysb}, {d:address}, {1!r}, {at})"
    ),
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.(?:satfinite\.)?([fs])32\.(\w+)\.\3\.(?:\2)32": (
        "mma({I}, {1}, {3!r}, {d:arrays{2}}, {a:arraysb}, {b:arraysb}, {c:arrays{2}}, {at})"
    ),
    # One array of a register has its values in order, so nothing is left to do.
    r"wgmma\.fence\.sync\.aligned": "warps({I}, {at})",
    r"wgmma\.commit_group\.sync\.aligned": "commit({I}, 'products')",
    r"wgmma\.wait_group\.sync\.aligned": "wait_for({I}, 'products', {d:integer}, {at})",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.([fs])32\.(\w+)\.\3": (
        "wgmma({I}, {1}, {3!r}, {d:arrays{2}}, {a:whole}, {b:whole}, {c:pred}, {rest}, {at})"
    ),
    # Orders shared memory for products, which read it when they are waited for, after all of it.
    r"fence\.proxy\.async\.shared": "fence_proxy({I})",
    r"griddepcontrol\.wait": "wait_for_launch({I})",
    r"griddepcontrol\.launch_dependents": "let_next_start({I})",
    r"mbarrier\.init\.shared\.b64": "init_barrier({I}, {d:address}, {a:integer}, {at})",
    r"mbarrier\.inval\.shared\.b64": "forget_barrier({I}, {d:address}, {at})",
    r"tcgen05\.alloc\.cta_group_1\.sync\.aligned\.shared\.b32": (
        "allocate({I}, {d:address}, {a:integer}, {at})"
    ),
    r"tcgen05\.relinquish_alloc_permit\.cta_group_1\.sync\.aligned": "warps({I}, {at})",
    r"tcgen05\.dealloc\.cta_group_1\.sync\.aligned\.b32": "free({I}, {d:b32}, {a:integer}, {at})",
    r"tcgen05\.mma\.cta_group_1\.kind_f16": (
        "tensor_product({I}, {d:address}, {a:u64}, {b:u64}, {c:u32}, {e:pred}, {at})"
    ),
    r"tcgen05\.commit\.cta_group_1\.mbarrier_arrive_one(?:\.shared_cluster)?\.b64": (
        "arrive_after_products({I}, {d:address}, {at})"
    ),
    r"tcgen05\.wait_(ld|st)\.sync\.aligned": "settle({I}, 'tensor {1}', {at})",
    r"tcgen05\.ld\.sync\.aligned\.32x32b\.x\d+\.b32": (
        "load_tensor({I}, {d:arraysb}, {a:address}, None, {at})"
    ),
    r"tcgen05\.st\.sync\.aligned\.32x32b\.x\d+\.b32": (
        "store_tensor({I}, {a:arraysb}, {d:address}, None, {at})"
    ),
    r"tcgen05\.ld\.sync\.aligned\.16x32bx2\.x\d+\.b32": (
        "load_tensor({I}, {d:arraysb}, {a:address}, {b:integer}, {at})"
    ),
    r"tcgen05\.st\.sync\.aligned\.16x32bx2\.x\d+\.b32": (
        "store_tensor({I}, {b:arraysb}, {d:address}, {a:integer}, {at})"
    ),
}


class _Operand:
    """An operand, formatted as a spec says."""

    def __init__(self, of: Operands, operand: str | list[str], t: str, flush: bool) -> None:
        self._of, self._operand, self._t, self._flush = of, operand, t, flush

    def __format__(self, spec: str) -> str:
        of, operand = self._of, self._operand
        several = operand if isinstance(operand, list) else [operand]
        if spec == "address":
            return of.address(operand)
        if spec == "integer":
            return str(int(operand, 0))
        if spec.startswith("list"):
            return f"[{', '.join(of.source(each, f'u{spec[4:]}') for each in several)}]"
        if spec.startswith("arrays"):
            return f"[{', '.join(of.view(each, spec[6:]) for each in several)}]"
        if spec == "whole":
            return of.view(operand, "b")
        found = of.source(operand, spec or self._t)
        return f"flushed({found})" if self._flush and not spec else found


class Instructions(Operands):
    """The tables, and a method for each opcode that they do not describe."""

    def one(self, i: Instruction, at: int) -> list[str]:
        """Return an instruction as Python statements."""
        types = types_of(i)
        t = types[0] if types else "b32"
        key = ".".join(x for x in i.opcode if x not in (*types, "rn", "ftz"))
        keys = (f"{key} {t[0]}{len(i.operands) - 1}", f"{key} {t[0]}", key)
        form = next((RESULTS[each] for each in keys if each in RESULTS), "")
        calls = ((re.fullmatch(each, i.name), call) for each, call in CALLS.items())
        found, call = next((each for each in calls if each[0]), (None, ""))
        if not (form or call) or (key == "mov" and any(isinstance(x, list) for x in i.operands)):
            return getattr(self, f"_op_{i.opcode[0]}")(i, at)
        flush = "ftz" in i.opcode and t in ("f32", "f32x2")
        used = {name for _, name, _, _ in Formatter().parse(form or call) if name}
        names = "dabc" if "rest" in used else "dabce"
        # Of two types, as in add.f32.bf16, the second is that of all sources but the last.
        last, narrow = len(i.operands) - 1, types[1] if len(types) > 1 else t
        operands = {
            name: _Operand(self, x, narrow if 0 < k < last else t, flush)
            for k, (name, x) in enumerate(zip(names, i.operands, strict=False))
        }
        rest = [int(x, 0) for x in i.operands[len(names) :]]
        left = operands.keys() - used - ({"d"} if form else set())
        assert not left and (not rest or "rest" in used), i.text
        wide = f"{t[0]}{2 * int(t[1:])}" if "wide" in i.opcode else ""
        text = (form or call).format(
            *((found, *found.groups()) if found else ()),
            **operands, I=self.where, at=at, rest=rest, T=dtype_of(t), WIDE=dtype_of(wide),
            wide=wide, bits=t[1:].partition("x")[0], signed=t[0] == "s",
        )  # fmt: skip
        if call:
            return [f"M.{text}"]
        result = "pred" if i.opcode[0] in ("setp", "mbarrier") else wide or t
        flush &= result == t
        return self.into(i.operands[0], result, f"flushed({text})" if flush else text)

    def _op_ld(self, i: Instruction, at: int) -> list[str]:
        t, (to, of) = i.opcode[-1], i.operands
        registers = to if isinstance(to, list) else [to]
        if i.opcode[1] == "param":
            return self.into(to, t, f"M.param({of.strip('[] ')!r}, {dtype_of(t)})", extend=True)
        space = re.fullmatch(r"ld(?:\.volatile)?\.(global|shared)(?:\.v[24])?\.\w+", i.name)
        assert space, i.name
        given = f"{self.where}, {self.address(of)}, {int(t[1:]) // 8}, {len(registers)}, {at}"
        lines = [f"x = M.load_{space[1]}({given})"]
        for k, register in enumerate(registers):
            text = f"x[:, {k}]" + (f".astype({dtype_of(t)})" if t[0] == "s" else "")
            lines += self.into(register, t.replace("f", "b"), text, extend=True)
        return lines

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
            assert (to, mode) in (("f32", ""), ("f64", ""), ("bf16", "rn")), i.name
            return self.into(register, to, f"{a}.astype(F64)" if to == "f64" else a)
        if of[0] == "f" and to[0] != "f":
            text = f"N.to_integer({a}, '{mode}', {to[1:]}, {to[0] == 's'})"
            return self.into(register, to, text, extend=True)
        if of[0] != "f":
            assert mode == ("rn" if to[0] == "f" else ""), i.name
        elif of == to or mode not in ("", "rn"):
            a = f"N.rounded({a}, '{mode}')"
        return self.into(register, to, f"{a}.astype({dtype_of(to)})", extend=to[0] != "f")
