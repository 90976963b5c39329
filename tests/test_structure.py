"""The house rules that a program can check: names, sizes and the glossary."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import tpsample
from tests.support import files

PACKAGE = Path(tpsample.__file__).parent
MAX_ROOT_MODULES = 10


def _classes() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        found.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return found


def test_no_class_name_is_used_twice() -> None:
    twice = [name for name, count in _classes().items() if count > 1]
    assert twice == []


def test_no_class_has_exactly_one_subclass() -> None:
    """A class and its only subclass are one idea cut in half, unless the lab has another."""
    bases: Counter[str] = Counter()
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "benchmarks/lab").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.update(re.sub(r"\[.*", "", ast.unparse(b)).split(".")[-1] for b in node.bases)
    own = set(_classes())
    assert len(own & set(bases)) > 3
    assert {name for name in own if bases[name] == 1} == set()


def test_the_words_of_the_glossary_are_those_of_the_code() -> None:
    glossary = [line for line in (tpsample.__doc__ or "").splitlines() if re.match(r"    \w", line)]
    named = {name for line in glossary for name in re.findall(r"`([A-Z]\w+)[`.]", line)}
    assert len(glossary) > 20 and len(named) > 8
    assert named - set(_classes()) == set()


def test_the_root_has_few_modules() -> None:
    modules = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert len(modules) <= MAX_ROOT_MODULES, modules


def test_the_list_of_files_is_current() -> None:
    assert files.FILE.read_text() == files.page(), "run `python -m tests.support.files`"


def test_a_file_without_a_sentence_or_a_layer_is_noticed() -> None:
    assert files.first_sentence(Path("core/word.py")).startswith("A candidate (score, token id)")
    for wrong in ("core/new.json", "core/tables.bin"):
        with pytest.raises(LookupError, match="needs a sentence"):
            files.first_sentence(Path(wrong))
    with pytest.raises(LookupError, match="names no layer"):
        files.place(Path("rooms/new.py"))
