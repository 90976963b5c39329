"""Lists every file of the package with the first sentence of its docstring, in tpsample/FILES.md.

    python -m tests.support.files             writes the list anew
    pytest tests/test_structure.py            compares it

Folders stand in the order of the layers, so a call walks down the list.
"""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

from tests.support.commands import ROOT

PACKAGE = ROOT / "tpsample"
FILE = PACKAGE / "FILES.md"
PLAIN = {
    "FILES.md": "This list.",
    "py.typed": "Tells type checkers that the package has types.",
    "masses_vectors.json": "Test vectors of `MASSES.md`.",
    "noise_vectors.json": "Test vectors of `NOISE.md`.",
    "measured_tiles.json": "Block sizes that were measured on a GPU; `tile_table.py` reads them.",
}
"""Files without a first sentence of their own."""
_LISTED = (ROOT / "pyproject.toml").read_text().partition("\nlayers = [")[2].partition("]")[0]
LAYERS = ["__init__", *re.findall(r"\w+", _LISTED)]
HEAD = """# Every file of the package

`python -m tests.support.files` writes this list. Folders stand in the order of the layers, because
[a call walks](README.md#how-a-call-walks-through-the-files) from one to the next. Beside each file
is its first sentence."""


def page() -> str:
    """Return the list as it should be.

    Raises:
        LookupError: a file has no first sentence, or no layer has it.
    """
    paths = {FILE, *(path for path in PACKAGE.rglob("*.*") if "__pycache__" not in path.parts)}
    files = sorted((path.relative_to(PACKAGE) for path in paths), key=place)
    lines = [HEAD]
    for folder, inside in groupby(files, key=lambda file: file.parent):
        title = "tpsample" if folder == Path() else f"tpsample/{folder}"
        lines += [f"\n## {title}\n\n| file | first sentence |\n| --- | --- |"]
        lines += [f"| [{file.name}]({file}) | {first_sentence(file)} |" for file in inside]
    return "\n".join(lines) + "\n"


def first_sentence(file: Path) -> str:
    """Return the first sentence of a module or of a page, without links."""
    if file.name in PLAIN:
        return PLAIN[file.name]
    if file.suffix not in (".md", ".py"):
        raise LookupError(f"{file}: a file of this kind needs a sentence in PLAIN")
    text = (PACKAGE / file).read_text()
    if file.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = text.partition("\n")[2]
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    if not paragraph:
        raise LookupError(f"{file}: no first sentence")
    paragraph = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    return re.split(r"(?<=[.!?]) ", paragraph)[0].replace("|", "\\|")


def place(file: Path) -> tuple[object, ...]:
    """Return what files are sorted by: the files of the root first, then folders by their layer."""
    inside = len(file.parts) > 1
    top = file.parts[0].removesuffix(".py")
    if top not in LAYERS and (inside or file.suffix == ".py"):
        raise LookupError(f"{file}: pyproject.toml names no layer for it")
    return inside, LAYERS.index(top) if top in LAYERS else -1, file.parent.parts, file.name


if __name__ == "__main__":
    FILE.write_text(page())
