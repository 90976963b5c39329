"""The code blocks of a README, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from tests.support.commands import ROOT

MEASURED = "benchmarks/results/"
"""Pages below this folder say how a number was measured, at a commit of theirs."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file, relative to the root of the repository.
        line: where the fence is.
        language: the word behind the fence; "" if there is none.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def readmes() -> list[str]:
    """Every README of the repository, that of the root first."""
    skipped = (".", "build", "dist")
    tops = [top for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith(skipped)]
    found = [ROOT / "README.md", *(path for top in tops for path in top.rglob("README.md"))]
    pages = [str(path.relative_to(ROOT)) for path in found]
    return sorted(pages, key=lambda page: (page.count("/"), page))


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page in order.

    Raises:
        ValueError: a fence is not closed, or code is indented, so that it has no language.
    """
    text = (ROOT / page).read_text() if text is None else text
    blocks: list[Block] = []
    inside: tuple[int, str, list[str]] | None = None
    previous = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"^\s*```(\w*)\s*$", line)
        if inside is None and fence:
            inside = (number, fence[1], [])
        elif inside is not None and fence:
            start, language, lines = inside
            blocks.append(Block(page, start, language, "\n".join(lines) + "\n"))
            inside = None
        elif inside is not None:
            inside[2].append(line)
        elif line.startswith("    ") and not previous.strip():
            raise ValueError(f"{page}:{number}: indented code has no language; fence it")
        previous = line
    if inside is not None:
        raise ValueError(f"{page}:{inside[0]}: a fence that nothing closes")
    return blocks


def commands_of(text: str) -> list[str]:
    """The commands of a shell block: joined lines without comments, apart where && parts them.

    >>> commands_of('pip install a && pip install b  # twice')
    ['pip install a', 'pip install b']
    """
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=False, punctuation_chars="&;|<>()")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                commands.append(" ".join(words))
                words = []
    return commands
