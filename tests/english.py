"""Checks how docstrings, comments and pages are worded: `python -m tests.english`.

A reader who has never seen the code stumbles over sentences whose subject is a question word, and
over a noun that "of which" or "of those" replaces. The rules find both. Code in pages, quoted
names and the measured pages under benchmarks/results are left out.
"""

from __future__ import annotations

import ast
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

ROOT = Path(__file__).resolve().parent.parent


def findings(text: str) -> list[str]:
    """Return the advice that a text calls for, each with the words that it is about."""
    plain = re.sub(r"`[^`]*`|\"[^\"]*\"", "x", " ".join(text.split()))
    return [
        f"{advice}: {found.group()[:60]}"
        for advice, pattern in RULES.items()
        for found in pattern.finditer(plain)
    ]


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, attribute docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from ((node.lineno, part) for part in text.split("\n\n"))
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("# "))
        elif comment and token.type != tokenize.NL:
            yield token.start[0] - 1, " ".join(comment)
            comment = []


def page_texts(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph of a Markdown page, without its code."""
    code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield from ((number, cell.strip(" *#")) for cell in line.split("|"))


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
