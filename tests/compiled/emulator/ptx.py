"""The PTX text of one kernel as instructions, with scopes, labels and source lines resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

REGISTER_BITS = {"p": 1, "h": 16, "r": 32, "d": 64}
"""Bits by class of a register: predicate, half word, word, double word."""
_CLASSES = {"pred": "p"} | {
    f"{kind}{bits}": {8: "h", 16: "h", 32: "r", 64: "d"}[bits]
    for bits in (8, 16, 32, 64)
    for kind in "busf"
}


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        opcode: its name split at dots, such as ["ld", "global", "v4", "b32"].
        operands: text each, or a list for registers in braces.
        guard: a predicate register and whether it is negated, or None.
        line: of the PTX text, from 1.
        source: "file:line" of the Triton source.
    """

    opcode: list[str]
    operands: list
    guard: tuple[str, bool] | None
    line: int
    source: str
    text: str

    @property
    def name(self) -> str:
        return ".".join(self.opcode)


@dataclass
class Kernel:
    """A kernel as its text has it.

    Attributes:
        params: name and bytes of each parameter.
        registers: class by name.
        labels: the place of the instruction behind each label.
        shared: the symbols that stand for the beginning of shared memory.
        threads: of a program.
    """

    name: str
    params: list[tuple[str, int]] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    threads: int = 0


def parse(text: str) -> Kernel:
    """Return the only entry of a PTX text.

    Raises:
        NotImplementedError: a declaration that the emulator does not know.
    """
    lines = [line.split("//")[0] for line in text.splitlines()]
    entry = next(i for i, line in enumerate(lines) if ".entry" in line)
    head, name = "\n".join(lines[:entry]), re.search(r"\.entry\s+([\w$]+)", lines[entry])
    assert name, text[:80]
    if re.search(r"\.shared\b[^;\n]*\[\d+\]", head):
        raise NotImplementedError("shared memory of a fixed size")
    symbols = re.findall(r"\.extern\s+\.shared[^;]*?\s([\w$]+)\[\]", head)
    kernel = Kernel(name[1], shared=set(symbols))
    at = entry
    while lines[at].strip() != "{":
        for bits, param in re.findall(r"\.param\s+\.[a-z](\d+)\s.*?([\w$]+),?\s*$", lines[at]):
            kernel.params.append((param, int(bits) // 8))
        if found := re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", lines[at]):
            kernel.threads = int(found[1])
        at += 1
    _Body(kernel, text).read(lines, at + 1)
    return kernel


class _Body:
    """Reads the statements of a body; names of inline assembly are renamed where scopes nest."""

    def __init__(self, kernel: Kernel, text: str) -> None:
        self._kernel, self._source, self._serial = kernel, "?", 0
        self._scopes: list[dict[str, str]] = [{}]
        self._files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))

    def read(self, lines: list[str], first: int) -> None:
        pending, begun = "", 0
        for number in range(first, len(lines)):
            rest = lines[number].strip()
            if rest.startswith(".loc"):
                _, file, line, *_ = rest.split()
                self._source = f"{self._files.get(file, '?').split('/')[-1]}:{line}"
                continue
            while rest:
                if not pending:
                    rest = self._scope_or_label(rest.lstrip())
                    if not self._scopes:
                        return
                    if not rest or rest[0] in "{}":
                        continue
                    begun = number + 1
                before, semicolon, rest = rest.partition(";")
                pending = f"{pending} {before}"
                if semicolon:
                    self._statement(pending.strip(), begun)
                    pending = ""

    def _scope_or_label(self, rest: str) -> str:
        """Take a brace or a label from the beginning; return what is left."""
        if rest.startswith("{"):
            self._serial += 1
            self._scopes.append({})
            return rest[1:].lstrip()
        if rest.startswith("}"):
            self._scopes.pop()
            return rest[1:].lstrip()
        if found := re.match(r"([\w$%]+):(?!:)", rest):
            self._kernel.labels[self._own(found[1])] = len(self._kernel.instructions)
            return rest[found.end() :].lstrip()
        return rest

    def _own(self, name: str) -> str:
        """Return the name that a declaration of this scope has in the whole kernel."""
        if len(self._scopes) > 1:
            self._scopes[-1][name] = f"{name}__{self._serial}"
            return self._scopes[-1][name]
        return name

    def _statement(self, text: str, line: int) -> None:
        if not text or text.startswith(".pragma"):
            return
        if declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL):
            for name in declared[2].split(","):
                many = re.match(r"(%?\w+)<(\d+)>", name.strip())
                names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else None
                for each in names or [self._own(name.strip())]:
                    self._kernel.registers[each] = _CLASSES[declared[1]]
            return
        if text.startswith("."):
            raise NotImplementedError(f"line {line}: {text}")
        renamed = {name: own for scope in self._scopes for name, own in scope.items()}
        if renamed:
            text = re.sub(r"[%\w$]+", lambda found: renamed.get(found[0], found[0]), text)
        guard = re.match(r"@(!?)([%\w$]+)\s+", text)
        opcode, _, operands = text[guard.end() if guard else 0 :].replace("\t", " ").partition(" ")
        self._kernel.instructions.append(
            Instruction(
                opcode.replace("::", "_").split("."),
                _operands(operands),
                (guard[2], bool(guard[1])) if guard else None,
                line,
                self._source,
                " ".join(text.split()),
            )
        )


def _operands(text: str) -> list:
    """Split at the commas outside of braces and brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    found = [part.strip() for part in parts if part.strip()]
    return [
        [each.strip() for each in part.strip("{}").split(",")] if part[0] == "{" else part
        for part in found
    ]
