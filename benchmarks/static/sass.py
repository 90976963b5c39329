"""Reads a kernel's SASS: instructions by pipe, spills, matrix instructions, memory order.

Everything works on `opcodes(text)`, the instructions of `nvdisasm` output in address order, and
needs neither Triton nor a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

PIPES = ("alu", "imad", "fp", "mufu", "convert", "memory", "other")

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_MATRIX = re.compile(r"(HMMA|HGMMA|IMMA|IGMMA|UTC[A-Z]*MMA)(\.|$)")
_PIPE_OF = {
    "alu": "IADD IADD3 LOP LOP3 PLOP3 SHF LEA ISETP SEL IMNMX VIMNMX VIMNMX3 VIADD VIADDMNMX "
    "PRMT IABS SGXT BMSK POPC FLO MOV P2R R2P VOTE",
    "imad": "IMAD IMUL",
    "fp": "FADD FADD2 FMUL FMUL2 FFMA FFMA2 FSETP FSEL FSET FMNMX FMNMX3 FCHK",
    "mufu": "MUFU",
    "convert": "I2F I2FP F2I F2IP I2I F2F F2FP I2IP FRND",
    "memory": "LD LDG LDS LDSM LDC LDL LDGSTS LDGDEPBAR LDTM ST STG STS STSM STL STTM SHFL RED "
    "REDG ATOM ATOMG ATOMS BAR MEMBAR FENCE CCTL",
}
_GLOBAL_MEMORY = {"LD", "LDG", "ST", "STG", "RED", "REDG", "ATOM", "ATOMG"}
_PIPE = {name: pipe for pipe, names in _PIPE_OF.items() for name in names.split()}


def opcodes(sass: str) -> list[str]:
    """Every instruction's opcode with its modifiers, in address order, padding left out.

    >>> opcodes("        /*00b0*/  @P0 REDG.E.MAX.S64.STRONG.SYS desc[UR6][R2.64], R4 ;")
    ['REDG.E.MAX.S64.STRONG.SYS']
    """
    return [op for op in _INSTRUCTION.findall(sass) if op != "NOP"]


def main_loop(sass: str) -> list[str]:
    """Instructions of the innermost loop with matrix instructions; [] if there is none.

    The loop of the product: a label up to the last branch back to it.

    >>> main_loop(".L_x_1:\\n /*0010*/ HMMA.16816 R0 ;\\n /*0020*/ BRA `(.L_x_1) ;\\n")
    ['HMMA.16816', 'BRA']
    """
    ops: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(ops)
            continue
        ops += opcodes(line)
        target = _BRANCH.search(line)
        if target and target[1] in labels:
            loops.append(ops[labels[target[1]] :])
    return min((loop for loop in loops if matrix_instruction(loop) != "-"), key=len, default=[])


def matrix_instructions(ops: Sequence[str]) -> int:
    """How many matrix instructions there are."""
    return sum(_MATRIX.match(op) is not None for op in ops)


def pipe_counts(ops: Sequence[str]) -> Counter[str]:
    """Instructions by the unit that executes them; uniform and control flow are "other"."""
    return Counter(map(pipe_of, ops))


def pipe_of(op: str) -> str:
    """The unit that executes an instruction.

    >>> pipe_of("FADD.FTZ"), pipe_of("UIADD3")
    ('fp', 'other')
    """
    return _PIPE.get(op.split(".")[0], "other")


def spills(ops: Sequence[str]) -> int:
    """Loads and stores of local memory: registers that did not fit."""
    return sum(op.split(".")[0] in ("LDL", "STL") for op in ops)


def matrix_instruction(ops: Sequence[str]) -> str:
    """The family of matrix instruction: HMMA, HGMMA (wgmma), UTCHMMA (tcgen05), of integers IMMA or
    IGMMA, or "-"."""
    families = {match[1] for op in ops if (match := _MATRIX.match(op))}
    return "+".join(sorted(families)) or "-"


def push_order_faults(ops: Sequence[str]) -> list[str]:
    """List what is wrong with the memory order of a kernel that sends its peers words; [] if right.

    - A push is a store of system scope (ST/STG .64 .STRONG.SYS): words carry their own epoch, so no
      flag or fence follows, and a link need not support atomics.
    - Nothing waits for the link: no barrier of system scope anywhere. A release push is one too.
    - Every arrival counter (an atomic add of GPU scope) has a CTA barrier between it and the
      maxima published before: without it the thread that counts can be ahead of other warps'
      maxima, and the last program misses candidates.
    - Words are cleared behind a CTA barrier after they are read: several threads may hold copies of
      a word, and one that clears it early would take it from the others.
    """
    faults = []
    if not any(_is(op, "ST", "64", "SYS") or _is(op, "ST", "128", "SYS") for op in ops):
        faults.append("no push: expected a ST…64…SYS")
    for op in ops:
        if _is(op, "ATOM", "SYS") or _is(op, "RED", "SYS"):
            faults.append(f"push by an atomic of another GPU: {op}")
    faults += [f"waits for the link to drain: {op}" for op in ops if _is(op, "MEMBAR", "SYS")]

    arrivals, published, barrier, reading = 0, False, False, False
    for op in ops:
        if _is(op, "RED", "MAX.S64", "GPU") or _is(op, "ATOM", "MAX.S64", "GPU"):
            published, barrier = True, False
        elif op.startswith("BAR."):
            barrier, reading = True, False
        elif _is(op, "LD", "64", "SYS"):
            reading = True
        elif reading and _is(op, "ST", "64") and not _is(op, "ST", "SYS"):
            faults.append(f"no CTA barrier between reading the words and clearing them: {op}")
        elif _is(op, "RED", "ADD", "GPU") or _is(op, "ATOM", "ADD", "GPU"):
            arrivals += 1
            if not published:
                faults.append(f"arrival counted before any maximum was published: {op}")
            elif not barrier:
                faults.append(f"no CTA barrier between the published maxima and {op}")
    if not arrivals:
        faults.append("no arrival counter: expected an atomic add of GPU scope")
    return faults


def overlap_faults(ops: Sequence[str], *, first: bool, ahead: bool = True) -> list[str]:
    """List what is wrong with a kernel that overlaps another one; [] if it is right.

    Args:
        first: whether it comes first: it then prefetches its weights before it has made its
            streams, which it stores, and lets the other one start behind its product. The other
            one waits for its end before it touches memory.
        ahead: whether the first has weights to prefetch.
    """
    names = [op.split(".")[0] for op in ops]
    faults = []
    if first:
        stores = (place for place, name in enumerate(names) if name in ("ST", "STG"))
        if ahead and "UBLKPF" not in names[: next(stores, None)]:
            faults.append("no prefetch before the noise: expected UBLKPF before the first store")
        products = [place for place, op in enumerate(ops) if _MATRIX.match(op)]
        if "PREEXIT" not in names[max(products, default=0) :]:
            faults.append("the next kernel waits for the end: expected PREEXIT behind the product")
    else:
        touches = (place for place, name in enumerate(names) if name in _GLOBAL_MEMORY)
        if "ACQBULK" not in names[: next(touches, None)]:
            faults.append("does not wait for the kernel before: expected ACQBULK before memory")
    return faults


def early_exit_faults(ops: Sequence[str]) -> list[str]:
    """List what is wrong with a kernel that has nothing to do in rows that are done; [] if right.

    Its first load is the row's flag, and it can exit before it loads anything else.
    """
    first_exit = next((i for i, op in enumerate(ops) if op == "EXIT"), len(ops))
    loads = sum(_is(op, "LD") for op in ops[:first_exit])
    return [] if loads == 1 else [f"{loads} loads before the first exit: expected the flag alone"]


def _is(op: str, family: str, *modifiers: str) -> bool:
    """`op` is RED or REDG (ATOM or ATOMG, MEMBAR, …) with these dotted modifiers."""
    name, _, rest = op.partition(".")
    return name in (family, f"{family}G") and all(f".{m}." in f".{rest}." for m in modifiers)
