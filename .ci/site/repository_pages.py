"""A hook of MkDocs: the pages of the repository and the files that they link.

READMEs stay beside the code that they describe, also on the site. It begins with the first of them
and follows the links. A program becomes a page with its code, and a folder one with a list.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("README.md", "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each text, program and folder that is linked; other files as they are."""
    todo = list(FIRST)
    while todo:
        place = todo.pop()
        if files.get_file_from_path(place):
            continue
        origin = ROOT / place.removesuffix(".md")
        if (ROOT / place).is_file() and not place.endswith(".md"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))
            continue
        if (ROOT / place).is_file():
            text = (ROOT / place).read_text()
        elif origin.is_file():
            text = _program(origin)
        else:
            text = _listing(ROOT / dirname(place))
        files.append(File.generated(config, place, content=text))
        todo += [there for link in LINK.findall(text) if (there := _place(place, link))]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the pages of programs and folders."""

    def redirected(link: re.Match[str]) -> str:
        there = _place(page.file.src_uri, link[0])
        return "/".join([".."] * page.file.src_uri.count("/") + [there]) if there else link[0]

    return LINK.sub(redirected, markdown)


def _place(page: str, link: str) -> str | None:
    """Return the place on the site of a linked file or folder; None if there is none."""
    there = normpath(join(dirname(page), link))
    path = ROOT / there
    if path.is_dir():
        return f"{there}/README.md" if (path / "README.md").exists() else f"{there}/index.md"
    if path.suffix == ".py" and path.is_file():
        return f"{there}.md"
    return there if path.is_file() else None


def _program(path: Path) -> str:
    """Return a page with the code of a program. A search finds examples, but no tests."""
    name = path.relative_to(ROOT).as_posix()
    hidden = "---\nsearch: {exclude: true}\n---\n" if name.startswith("tests/") else ""
    return f"{hidden}# {name}\n\n````python\n{path.read_text()}````\n"


def _listing(folder: Path) -> str:
    """Return a page that lists the programs and the pages of a folder."""
    lines = [f"# {folder.relative_to(ROOT)}\n"]
    for path in sorted(folder.glob("*.py")):
        summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        lines.append(f"* [{path.name}]({path.name}): {summary}")
    for path in sorted(folder.glob("*/README.md")):
        lines.append(f"* [{path.parent.name}]({path.parent.name}/README.md)")
    return "\n".join(lines) + "\n"
