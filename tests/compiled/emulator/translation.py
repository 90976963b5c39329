"""A kernel as Python source: a function of each basic block, on arrays of registers.

A function `b<first>(M, I)` executes a block for the threads I of a machine M: `slice(None)` for
all, or an array of their indices. Registers are arrays over threads among the function's globals:
`r12U` has the bits, `r12S` and `r12F` are the same memory as signed integers and as floats. A
function returns where its threads go on: pairs of an instruction's place and threads.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from tests.compiled.emulator import arithmetic
from tests.compiled.emulator.instructions import Instructions
from tests.compiled.emulator.operands import TYPES
from tests.compiled.emulator.ptx import REGISTER_BITS, Instruction, Kernel

_ENDS = ("bra", "ret", "exit", "bar", "barrier")
"""Opcodes behind which a block ends."""


class Translation(Instructions):
    """The Python source of a kernel, compiled.

    Attributes:
        blocks: by first instruction, the one behind the last.
        grain: bytes of shared memory that races are looked for in together.
        reductions: places of atomics whose result nothing reads.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        instructions = kernel.instructions
        leaders = {0, *kernel.labels.values()}
        leaders |= {at + 1 for at, i in enumerate(instructions) if i.opcode[0] in _ENDS}
        starts = sorted(each for each in leaders if each < len(instructions))
        self.blocks = dict(zip(starts, [*starts[1:], len(instructions)], strict=True))
        shared = (i.opcode[-1] for i in instructions if "shared" in i.opcode)
        self.grain = 1 if any(re.fullmatch(r"\w(8|16)", t) for t in shared) else 4
        source = [line for block in self.blocks.items() for line in self._block(*block)]
        self.reductions = self._reductions()
        self._spaces: dict[int, tuple[dict[str, Any], list[np.ndarray]]] = {}
        self._code = compile("\n".join(source), f"<PTX of {kernel.name}>", "exec")

    def space(self, total: int) -> dict[str, Any]:
        """Return the functions of the blocks, over registers of so many threads.

        The registers are those of the launch before with as many threads, filled with a pattern.
        """
        if total not in self._spaces:
            self._spaces[total] = self._make_space(total)
        space, blocks = self._spaces[total]
        for block in blocks:
            block.fill(0xA5)
        return space

    def _make_space(self, total: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        space, blocks = {"np": np, "N": arithmetic, "flushed": arithmetic.flushed, **TYPES}, []
        for kind, bits in REGISTER_BITS.items():
            names = [name for name in self.python.values() if name[0] == kind]
            block = np.empty((len(names), max(1, bits // 8) * total), np.uint8)
            views = {each: block.view(TYPES[f"{each}{bits}"]) for each in "USF" if bits > 1}
            if bits == 1:
                views[""] = block.view(bool)
            if bits == 64:
                views["X"] = block.view(np.float32).reshape(len(names), total, 2)
            for suffix, of in views.items():
                space.update(zip((f"{name}{suffix}" for name in names), of, strict=True))
            blocks.append(block)
        exec(self._code, space)
        return space, blocks

    def _reductions(self) -> frozenset[int]:
        """Return the atomics whose result is read nowhere; a move of zero goes before each."""
        read: Counter[str] = Counter()
        for i in self.kernel.instructions:
            written = 1 if i.opcode[0] not in ("st", "cp") else 0
            for operand in i.operands[written:]:
                text = " ".join(operand) if isinstance(operand, list) else operand
                read.update(re.findall(r"%\w+", text))
        return frozenset(
            at
            for at, i in enumerate(self.kernel.instructions)
            if i.opcode[0] == "red" or (i.opcode[0] == "atom" and not read[i.operands[0]])
        )

    def _block(self, start: int, stop: int) -> list[str]:
        lines = [f"def b{start}(M, I):"]
        for at in range(start, stop):
            i = self.kernel.instructions[at]
            try:
                lines += [f"    {line}" for line in self._instruction(i, at)]
            except Exception as error:
                told = f"{i.source}, line {i.line}: {i.text}: {error!r}"
                raise NotImplementedError(told) from error
        if i.opcode[0] not in _ENDS:
            lines.append(f"    return [({stop}, I)]")
        return lines

    def _instruction(self, i: Instruction, at: int) -> list[str]:
        guard = f"M.those(I, {self.python[i.guard[0]]}, {i.guard[1]}, {at})" if i.guard else ""
        self.where = "J" if guard else "I"
        match i.opcode:
            case ["bra" | "ret" | "exit", *_]:
                target = self.kernel.labels[i.operands[0]] if i.operands else -1
                if not guard:
                    return [f"return [({target}, I)]"]
                return [f"T, F = {guard}", f"return [({target}, T), ({at + 1}, F)]"]
            case ["bar", "warp", "sync"]:
                return [f"M.warps(I, {at})", f"return [({at + 1}, I)]"]
            case ["bar" | "barrier", "sync"] if not guard:
                number, count = ([int(x, 0) for x in i.operands] + [0])[:2]
                return [f"return [({at + 1}, M.arrive(I, {number}, {count}, {at}))]"]
            case ["bar" | "barrier", *_]:
                raise NotImplementedError(i.name)
        lines = self.one(i, at)
        if guard:
            return [f"J = {guard}[0]", "if J is not None:", *(f"    {line}" for line in lines)]
        return lines
