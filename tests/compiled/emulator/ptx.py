"""The PTX text of one kernel as instructions, with scopes, labels and source lines resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count

REGISTER_BITS = {"p": 1, "h": 16, "r": 32, "d": 64}
"""Bits by class of a register: predicate, half word, word, double word."""
_CLASSES = {"pred": "p", "8": "h", "16": "h", "32": "r", "64": "d"}

_SCOPE = re.compile(r"\{((?:[^{};]|\{[^{};]*\})*;(?:[^{}]|\{[^{};]*\})*)\}")
"""Braces around statements, which are those of inline assembly; others hold registers."""
_PART = re.compile(r"\s*(?:\.loc\s+(\d+)\s+(\d+).*|([\w$]+):(?!:)|([^;]+);)")
"""A place in the source, a label, or a statement."""


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
        threads: of a program.
        shared: the symbols that stand for the beginning of shared memory.
        registers: class by name.
        labels: the place of the instruction behind each label.
    """

    name: str
    params: list[tuple[str, int]]
    threads: int
    shared: list[str]
    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Kernel:
    """Return the only entry of a PTX text.

    Raises:
        NotImplementedError: a declaration that the emulator does not know.
    """
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]*)"', text))
    plain = re.sub(r"//.*", "", text)
    entry = re.search(r"\.entry\s+([\w$]+)\((.*?)\)(.*?)\{", plain, re.DOTALL)
    assert entry, text[:80]
    head = plain[: entry.start()]
    if re.search(r"\.shared\b[^;\n]*\[\d+\]", head):
        raise NotImplementedError("shared memory of a fixed size")
    params = re.findall(r"\.param\s+\.[a-z](\d+)\s[^,]*?([\w$]+)\s*(?:,|$)", entry[2])
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    kernel = Kernel(
        entry[1],
        [(name, int(bits) // 8) for bits, name in params],
        int(threads[1]) if threads else 0,
        re.findall(r"\.extern\s+\.shared[^;]*?\s([\w$]+)\[\]", head),
    )
    body = _without_scopes(plain[entry.end() :])
    body = body[: body.index("\n}")]
    source, at, line = "?", 0, 1 + plain.count("\n", 0, entry.end())
    while found := _PART.match(body, at):
        file, number, label, statement = found.groups()
        begun = line + body.count("\n", at, found.start(4) if statement else at)
        line, at = line + body.count("\n", at, found.end()), found.end()
        if file:
            source = f"{files.get(file, '?')}:{number}"
        elif label:
            kernel.labels[label] = len(kernel.instructions)
        elif declared := re.match(r"\.reg\s+\.[a-z]*?(pred|\d+)\s+(.*)", statement, re.DOTALL):
            for name, _, many in re.findall(r"(%?\w+)(<(\d+)>)?", declared[2]):
                names = [f"{name}{k}" for k in range(int(many))] if many else [name]
                kernel.registers |= dict.fromkeys(names, _CLASSES[declared[1]])
        elif not statement.startswith(".pragma"):
            kernel.instructions.append(_instruction(" ".join(statement.split()), begun, source))
    if body[at:].strip():
        raise NotImplementedError(f"line {line}: {body[at : at + 80]}")
    return kernel


def _without_scopes(text: str) -> str:
    """Take the braces of inline assembly away, and give what it declares names of their own."""
    serial, changed = count(), 1

    def renamed(scope: re.Match) -> str:
        declared = re.findall(r"\.reg\s+\.\w+\s+([^;]+);", scope[1])
        names = re.findall(r"([\w$%]+)", " ".join(declared))
        names += re.findall(r"([\w$]+):(?!:)", scope[1])
        own = dict.fromkeys(names, f"__{next(serial)}")
        return re.sub(r"(?<![.%\w$])[%\w$]+", lambda word: word[0] + own.get(word[0], ""), scope[1])

    while changed:
        text, changed = _SCOPE.subn(renamed, text)
    return text


def _instruction(text: str, line: int, source: str) -> Instruction:
    if text.startswith("."):
        raise NotImplementedError(f"line {line}: {text}")
    guard = re.match(r"@(!?)([%\w$]+) ", text)
    opcode, _, rest = text[guard.end() if guard else 0 :].partition(" ")
    # At the commas outside of braces and brackets.
    parts = re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,{\[\s][^,{\[]*)", rest)
    return Instruction(
        opcode.replace("shared::cta", "shared").replace("::", "_").split("."),
        [re.findall(r"[^\s{},]+", part) if part[0] == "{" else part.strip() for part in parts],
        (guard[2], bool(guard[1])) if guard else None,
        line,
        source,
        text,
    )
