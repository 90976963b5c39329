"""Checks how docstrings, comments and pages are worded: `python -m tests.english`.

A reader who has never seen the code stumbles over sentences whose subject is a question word, and
over long ones. A noun that "of which" or "of those" replaces is as hard to find. The rules find all
three. Code in pages, tables by spaces, quoted names and the measured pages under benchmarks/results
are left out.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

RULES = {
    "name the subject in place of a question word": re.compile(
        r"(?:^|(?<=[.!?:]\s))(?:What|Which|Who)\b[^.?!]*(?:[.!]|$)"
    ),
    "repeat the noun in place of": re.compile(r"\bof (?:which|whom|those)\b"),
}
"""Advice, and what it is given for."""

LONGEST = 25
"""The most words of a sentence. A colon and a semicolon end one, too."""

ROOT = Path(__file__).resolve().parent.parent

_NAMES = re.compile(r"(?:`[^`]*`|\"[^\"]*\")(?:,? (?:and |or )?`[^`]*`)*")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])[)*]*\s+")
_TABLE_LINE = re.compile(r"\S {2,}\S")
_ENTRY = re.compile(r"\s*(?:[-*] |\d+\. |[\w*]+(?:, \w+)*: )")


def findings(text: str) -> list[str]:
    """Return the advice that a paragraph calls for, each with the words that it is about."""
    plain = _NAMES.sub("x", " ".join(text.split()))
    sentences = [] if _TABLE_LINE.search(text) else _SENTENCE_END.split(plain)
    return [
        f"{advice}: {found.group()[:60]}"
        for advice, pattern in RULES.items()
        for found in pattern.finditer(plain)
    ] + [
        f"split a sentence of {count} words: {sentence[:60]}"
        for sentence in sentences
        if (count := len(re.findall(r"\S*\w\S*", sentence))) > LONGEST
    ]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield number of the first line, and text, of each paragraph, with its line breaks.

    An entry of a list, or of arguments, is a paragraph, and so is each cell of a table. Lines that
    are indented otherwise than the line before them begin another, as formulas do.
    """
    lines: list[str] = []
    indent_before: int | None = None
    for number, line in enumerate([*text.splitlines(), ""]):
        row, entry = line.lstrip().startswith("|"), _ENTRY.match(line)
        indent = len(line) - len(line.lstrip())
        if lines and (row or entry or not line.strip() or indent_before not in (None, indent)):
            yield number - len(lines), "\n".join(lines)
            lines = []
        if row:
            yield from ((number, cell.strip()) for cell in line.split("|"))
        elif line.strip():
            lines.append(line)
        # The line after the first one of an entry may have any indentation.
        indent_before = None if entry else indent


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph of docstrings, attribute docstrings and comments."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                for number, part in paragraphs(inspect.cleandoc(text)):
                    yield node.lineno + number, part
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.removeprefix("#").removeprefix(" "))
        elif comment and token.type != tokenize.NL:
            first = token.start[0] - len(comment)
            yield from ((first + number, part) for number, part in paragraphs("\n".join(comment)))
            comment = []


def page_texts(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph of a Markdown page, without its code."""
    lines = page.splitlines()
    code = False
    for number, line in enumerate(lines):
        fence = line.lstrip().startswith("```")
        code ^= fence
        if code or fence:
            lines[number] = ""
    for number, text in paragraphs("\n".join(lines)):
        yield number + 1, text.strip(" *#")


def main() -> int:
    """Print every finding in the files of this repository; return 1 if there is one."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    failed = False
    for name in listed.stdout.split():
        if name.startswith("benchmarks/results/") or not (ROOT / name).exists():
            continue
        texts = python_texts if name.endswith(".py") else page_texts
        for line, text in texts((ROOT / name).read_text()):
            for finding in findings(text):
                print(f"{name}:{line}: {finding}")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
