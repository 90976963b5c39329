"""The table of faults fits the files, and the runner tells what was noticed from what was not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import mutants
from tests.faults import FAULTS, Fault
from tests.faults.fault import faults
from tests.support.tried import need_transformers


def test_every_fault_is_a_change_of_text_that_its_file_has_once():
    for fault in FAULTS:
        count = (mutants.ROOT / fault.file).read_text().count(fault.old)
        assert count == 1, f"{fault.name}: {fault.file} has {fault.old!r} {count} times, not once"
        assert fault.old != fault.new and fault.tests, fault.name
        if fault.file.endswith(".py"):
            text = (mutants.ROOT / fault.file).read_text()
            compile(text.replace(fault.old, fault.new), fault.name, "exec")
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_table_is_read_with_lines_that_go_and_tests_that_stay():
    table = """
a.py
    one
    -     if x:
    -         return - x
    > test_pictures_are_well_formed[step.svg]
    > core/test_word.py::test_b
    two
    - 1
    + 2
    > core/test_word.py
    three
b.py
    four
    > core/test_word.py
"""
    tests = (
        "tests/test_pictures.py::test_pictures_are_well_formed[step.svg]",
        "tests/core/test_word.py::test_b",
    )
    assert faults(table) == [
        Fault("one", "a.py", "    if x:\n        return - x", "", tests),
        Fault("two", "a.py", "1", "2", ("tests/core/test_word.py",)),
        Fault("three", "a.py", "", "", ("tests/core/test_word.py",)),
        Fault("four", "b.py", "", "", ("tests/core/test_word.py",)),
    ]
    with pytest.raises(ValueError, match=r"^five: expected a test, .* the first fault of c.py"):
        faults(f"{table.rstrip()}\nc.py\n    five")
    for name in ("test_nowhere", "test_tokens_are_the_oracles[1]"):  # none and several
        with pytest.raises(ValueError, match="expected the name of one test, found it in"):
            faults(f"a.py\n    one\n    > {name}")


def _collected(session: pytest.Session, tests: set[str]) -> list[str]:
    """Names of tests that run by default: the session's own, where it has all files of `tests`."""
    names = [item.nodeid for item in session.items]
    if {test.split("::")[0] for test in tests} <= {name.split("::")[0] for name in names}:
        return names
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *tests]
    found = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, check=False)
    assert not found.returncode, found.stdout
    return found.stdout.splitlines()


def test_every_test_of_the_table_is_there_and_runs_by_default(request):
    need_transformers()  # else pytest finds none of the tests of its adapter
    tests = {test for fault in FAULTS for test in fault.tests}
    collected = _collected(request.session, tests)
    named = {name for line in collected for name in (line, line.split("[")[0], line.split("::")[0])}
    assert tests <= named, f"not there, or of the long tier: {sorted(tests - named)}"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two numbers; its test looks at one."""
    for folder in ("tpsample", "tests", "benchmarks", "launch"):
        (tmp_path / folder).mkdir()
    for file in ("pyproject.toml", "tpsample/__init__.py"):
        (tmp_path / file).touch()
    (tmp_path / "tpsample/one.py").write_text("a = 1\nb = 2\n")
    test = "from tpsample import one\n\ndef test_a():\n    while one.a == 3: pass\n"
    (tmp_path / "tests/test_one.py").write_text(f"{test}    assert one.a == 1\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts faster
    return tmp_path


@pytest.fixture
def runner(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mutants.Runner]:
    made = mutants.Runner(tmp_path_factory.mktemp("copy"), imported=())
    yield made
    made.close()


def _fault(name: str, old: str, new: str) -> Fault:
    return Fault(name, "tpsample/one.py", old, new, ("tests/test_one.py",))


def test_a_fault_that_is_noticed_is_told_from_one_that_survives(tree):
    faults = [_fault("seen", "a = 1", "a = 2"), _fault("unseen", "b = 2", "b = 3")]
    found = {fault.name: noticed for fault, noticed, _ in mutants.plant_all(faults, 1, imported=())}
    assert found == {"seen": "tests/test_one.py::test_a", "unseen": ""}


def test_the_report_names_what_survived(capsys):
    outcomes = [(_fault("seen", "a", "b"), "t.py::t", 1.0), (_fault("unseen", "a", "b"), "", 2.0)]
    assert mutants.report(outcomes) == ["unseen"]
    assert capsys.readouterr().out.splitlines() == [
        "   1 s  seen: noticed: t.py::t",
        "   2 s  unseen: SURVIVED",
        "survived: unseen",
    ]


def test_a_hang_is_ended_and_is_noticed(runner):
    (runner.copy / "tpsample/one.py").write_text("a = 3\n")
    assert runner.run(["tests/test_one.py"], 2) == "a hang, ended after 2 s"


def test_a_test_that_is_not_there_or_fails_without_a_fault_ends_the_run(tree, runner):
    with pytest.raises(RuntimeError, match="exit status 4"):
        runner.run(["tests/test_one.py::test_c"], 60)
    (tree / "tpsample/one.py").write_text("a = 2\n")
    with pytest.raises(RuntimeError, match=r"without any fault, there is tests/test_one\.py"):
        next(mutants.plant_all([_fault("", "a", "b")], 1, imported=()))
