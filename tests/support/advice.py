"""Every piece of advice in the texts of the package, found by reading its source.

A text is advice if a clause of it begins with a verb that tells the reader to do something.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tpsample

PACKAGE = Path(tpsample.__file__).parent
VERBS = (
    "add|allow|append|ask|assign|build|call|capture|check|choose|compare|convert|decode|did you "
    "mean|draw|drop|export|free|give|hide|import|install|keep|leave|let|load|look|make|move|name|"
    "pad|pass|pip install|put|read|redistribute|refresh|remove|repeat|reset|restart|run|say|see|"
    "send|set|start|switch|take|try|turn|uninstall|use|wait|write"
)
ADVICE = re.compile(rf"(?:[;:.,] |^)(?:(?:or|and|else) )*(?:{VERBS})\b[ .]", re.IGNORECASE)


def advices() -> dict[str, str]:
    """Return the texts of the package that have advice, with `{}` for what is filled in, and the
    file of each."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for text in _texts(tree, _docstrings(tree)):
            if " " in text and ADVICE.search(text):
                found[text] = str(path.relative_to(PACKAGE))
    return found


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the nodes of texts that stand alone, which are docstrings."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _texts(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    """Yield the texts under a node, those in several parts as one, but no help of options."""
    if id(node) in docstrings and isinstance(node, ast.Constant):
        return
    if isinstance(node, ast.keyword) and node.arg == "help":
        return
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _texts(child, docstrings)
