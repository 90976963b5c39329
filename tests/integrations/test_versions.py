"""The versions that are tried, refused and documented are the same everywhere."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.commands import ROOT
from tpsample.integrations import TRIED, check_version

PAGE = (ROOT / "tpsample" / "integrations" / "README.md").read_text()


@pytest.mark.parametrize(
    ("engine", "taken", "refused"),
    [
        ("vllm", ("0.32.0", "0.33.1+cpu"), ("0.31.0", "0.3", "dev")),
        ("sglang", ("0.5.23", "0.5.23.post1"), ("0.5.22", "0.5.2", "0.4.9")),
        ("transformers", ("5.23.0", "5.24.7"), ("4.57.1", "5.22.0", "5.25.0", "6.0.0.dev0")),
    ],
)
def test_other_versions_are_refused_with_the_way_out(engine, taken, refused):
    for found in taken:
        check_version(engine, found)
    for found in refused:
        tried = " or ".join(TRIED[engine])
        said = f"{tried} is supported, {found} is installed; pip install '{engine}=="
        with pytest.raises(ImportError, match=re.escape(said)) as raised:
            check_version(engine, found)
        check_version(engine, raised.value.msg.rpartition("==")[2].replace("*'", "0"))


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        *(("vllm", found) for found in ("0.34.0", "0.330", "1.0", "0.34.0.dev7+g1")),
        *(("sglang", found) for found in ("0.5.24", "0.5.230", "0.6.0", "1.0")),
    ],
)
def test_a_later_version_with_a_self_test_is_warned_of(engine, found):
    said = (
        f"{TRIED[engine][-1]} was tried, {found} is installed; it serves if its first step passes"
    )
    with pytest.warns(UserWarning, match=f"{engine} {re.escape(said)}"):
        check_version(engine, found)


def test_a_python_without_an_engine_is_told_which_has_it(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(
        ImportError, match=r"5\.20\.2 is installed; 5\.24 needs Python 3\.11 or later$"
    ):
        check_version("transformers", "5.20.2")


def test_the_table_of_versions_says_what_is_tried_and_pinned():
    pinned = [
        f"{name} {version}"
        for file in ("default.txt", "cu12.txt", "torch211.txt")
        for name, version in re.findall(
            r"^(torch|triton)==(.+)$", (ROOT / "constraints" / file).read_text(), re.MULTILINE
        )
    ]
    bounds = re.findall(
        r'^    "(torch|triton)(>=[^;"]+)', (ROOT / "pyproject.toml").read_text(), re.M
    )
    engines = [f"| {engine} | {' and '.join(versions)}" for engine, versions in TRIED.items()]
    table = PAGE[PAGE.index("## Versions") :].partition("\n## ")[0]
    for expected in (*pinned, *engines, *(f"`{name}{bound}`" for name, bound in bounds)):
        assert expected in table, expected


def test_the_extra_installs_what_the_adapter_takes_now_and_later():
    oldest, newest = TRIED["transformers"]
    major, _, minor = newest.partition(".")
    bounds = f'"transformers>={oldest},<{major}.{int(minor) + 1};'
    assert bounds in (ROOT / "pyproject.toml").read_text()
