"""A kernel as Python source: a function of each basic block, on arrays of registers.

A function `b<first>(M, I)` executes a block for the threads I of a machine M: `slice(None)` for
all, or an array of their indices. Registers are arrays over threads among the function's globals:
`r12` has the bits, `r12_i` and `r12_f` are the same memory as signed integers and as floats. A
function returns where its threads go on: pairs of an instruction's place and threads.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.compiled.emulator.memory_opcodes import MemoryOpcodes
from tests.compiled.emulator.opcodes import Opcodes
from tests.compiled.emulator.ptx import Instruction, Kernel

ENDS = ("bra", "ret", "exit", "bar", "barrier")
"""Opcodes behind which a block ends."""


class Translation(Opcodes, MemoryOpcodes):
    """The Python source of a kernel, compiled, and what its namespace needs.

    Attributes:
        blocks: by first instruction, the one behind the last.
        opcodes: by first instruction, how often a block has each opcode.
        grain: bytes of shared memory that races are looked for in together.
        unused: places of atomics whose result nothing reads, which the assembler makes reductions.
        spaces: namespaces of the functions by the number of threads, see `machine`.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        instructions = kernel.instructions
        leaders = {0, *kernel.labels.values()}
        leaders |= {at + 1 for at, i in enumerate(instructions) if i.opcode[0] in ENDS}
        starts = sorted(each for each in leaders if each < len(instructions))
        self.blocks = dict(zip(starts, [*starts[1:], len(instructions)], strict=True))
        self.opcodes = {
            start: Counter(i.name for i in instructions[start:stop])
            for start, stop in self.blocks.items()
        }
        shared = (i.opcode[-1] for i in instructions if "shared" in i.opcode)
        small = any(t in ("b8", "u8", "s8", "b16", "u16", "s16") for t in shared)
        self.grain = 1 if small else 4
        source = [line for block in self.blocks.items() for line in self._block(*block)]
        self.unused = self._unused_atomics()
        self.spaces: dict[int, Any] = {}
        self.code = compile("\n".join(source), f"<PTX of {kernel.name}>", "exec")

    def _unused_atomics(self) -> frozenset[int]:
        """Return the atomics whose result is read nowhere; a move of zero goes before each."""
        read: Counter[str] = Counter()
        for i in self.kernel.instructions:
            written = 1 if i.opcode[0] not in ("st", "cp") else 0
            for operand in i.operands[written:]:
                text = " ".join(operand) if isinstance(operand, list) else operand
                read.update(re.findall(r"%\w+", text))
        atomics = (at for at, i in enumerate(self.kernel.instructions) if i.opcode[0] == "atom")
        return frozenset(at for at in atomics if not read[self.kernel.instructions[at].operands[0]])

    def _block(self, start: int, stop: int) -> list[str]:
        lines = [f"def b{start}(M, I):"]
        for at in range(start, stop):
            i = self.kernel.instructions[at]
            try:
                found = self._instruction(i, at)
            except Exception as error:
                raise NotImplementedError(
                    f"{i.source}, line {i.line}: {i.text}: {error!r}"
                ) from error
            lines += [f"    {line}" for line in found]
        if i.opcode[0] not in ENDS:
            lines.append(f"    return [({stop}, I)]")
        return lines

    def _instruction(self, i: Instruction, at: int) -> list[str]:
        if i.opcode[0] in ENDS:
            return self._end(i, at)
        self.where = "I"
        if i.guard is None:
            return self._one(i, at)
        self.where = "J"
        guarded = [f"    {line}" for line in self._one(i, at)]
        return [f"J = M.those(I, {self._guard(i)}, {at})[0]", "if J is not None:", *guarded]

    def _guard(self, i: Instruction) -> str:
        assert i.guard
        return f"{self.python[i.guard[0]]}, {i.guard[1]}"

    def _end(self, i: Instruction, at: int) -> list[str]:
        op = i.opcode[0]
        if op in ("bra", "ret", "exit"):
            target = self.kernel.labels[i.operands[0]] if op == "bra" else -1
            if i.guard is None:
                return [f"return [({target}, I)]"]
            lines = f"T, F = M.those(I, {self._guard(i)}, {at})"
            return [lines, f"return [({target}, T), ({at + 1}, F)]"]
        if i.guard is not None:
            raise NotImplementedError("a barrier with a predicate")
        if i.opcode[1] == "warp":
            return [f"M.warps(I, {at})", f"return [({at + 1}, I)]"]
        if i.opcode[1:] != ["sync"]:
            raise NotImplementedError(i.name)
        number, count = ([int(x, 0) for x in i.operands] + [0])[:2]
        return [f"return [({at + 1}, M.arrive(I, {number}, {count}, {at}))]"]

    def _one(self, i: Instruction, at: int) -> list[str]:
        method = getattr(self, f"_op_{i.opcode[0]}", None)
        if method is None:
            raise NotImplementedError(i.name)
        return method(i, at)
