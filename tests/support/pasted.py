"""Says whether the commands of a README could be run: every word is one that somebody reads.

A command is taken apart until a parser can judge what is left: `make` lists what it would run, a
launcher prints what it would start, and that is looked at in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
from torch.distributed.run import get_args_parser

from tests.support.commands import ROOT, run_command

Options = tuple[str, list[str]]
"""A module and the words that it is to parse."""

_ASSIGNMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=")
_IF_SET = re.compile(r"\$\{\w+:\+[^}]*\}")
"""An option that the Makefile passes on where its variable is set."""
_PYTHON = re.compile(r"^(.*/)?python3?$")
_BENCH = "benchmarks.run"
_IGNORED = {"test", "rm", "touch", "echo", "find", "@echo", "mkdir"}
"""Words that `make` runs around the commands that matter."""


class UnknownWords(ValueError):
    """A command has words that nothing here knows how to run."""


def options_of(command: str) -> list[Options]:
    """Return what modules would be asked to parse if a command were run.

    Raises:
        UnknownWords: its program is not known, or what it names is not there.
    """
    words = shlex.split(command)
    env = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    if not words:
        raise UnknownWords(f"{command!r} runs nothing")
    program, rest = words[0], words[1:]
    if _PYTHON.match(program):
        return _python(rest)
    if program == "make":
        return _make(rest, env)
    if program.startswith("launch/") and program.endswith(".sh"):
        return _launcher(program, rest, env)
    if program in ("salloc", "sbatch"):
        return options_of(shlex.join(_from(rest, re.compile("^launch/"))))
    if program in ("srun", "mpirun", "env"):
        return options_of(shlex.join(_from(rest, _PYTHON)))
    name = Path(program).name
    if name == "pip":
        _require_installable(rest)
        return [(name, rest)]
    if name == "torchrun":
        return [(name, rest), *_python(_from(rest, re.compile(r"^-m$|\.py$")))]
    if name == "tpsample":
        return _python(["-m", "tpsample.cli", *rest])
    if name == "vllm":
        return _engine(rest)
    raise UnknownWords(f"{command!r}: nobody here knows how to run {program!r}")


class Parsed(BaseException):
    """The options are right, and nothing more is to happen."""


def wrong_with(module: str, words: list[str]) -> str:
    """Let a module parse its options and stop there; return what is wrong with them, or ""."""
    from typer.core import TyperCommand

    def stop(*_: object) -> NoReturn:
        raise Parsed

    def parse_and_stop(self: Any, *given: Any, **named: Any) -> NoReturn:
        parse(self, *given, **named)
        raise Parsed

    parse, printed = argparse.ArgumentParser.parse_args, io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(TyperCommand, "invoke", stop),
        mock.patch.object(sys, "argv", [module, *words]),
        contextlib.redirect_stderr(printed),
        contextlib.redirect_stdout(printed),
    ):
        try:
            return _wrong(module, words)
        except Parsed:
            return ""
        except SystemExit as ended:
            return "" if ended.code in (0, None) else f"{module}: {printed.getvalue().strip()}"
        except Exception as error:
            return f"{module}: {type(error).__name__}: {error}"


def _wrong(module: str, words: list[str]) -> str:
    if module == "pip":
        from pip._internal.commands import create_command

        create_command(words[0]).parse_args(words[1:])
        return ""
    if module == "torchrun":
        get_args_parser().parse_args(words)
    spec = importlib.util.find_spec(module)
    if spec is None:
        return f"no module named {module}"
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text()
    if not any(parser in source for parser in ("parse_args", "import app", "import main", "app()")):
        takes_a_path = "sys.argv[1" in source
        return "" if len(words) <= takes_a_path else f"{module} reads no options"
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return f"{module} did not parse its options"


def _engine(words: list[str]) -> list[Options]:
    """An engine is not here to read its options, but what they name of ours is."""
    for word in words:
        module, _, name = word.rpartition(".")
        if module.startswith("tpsample."):
            path = ROOT / f"{module.replace('.', '/')}.py"
            if not path.is_file() or f"class {name}(" not in path.read_text():
                raise UnknownWords(f"{word}: no such class")
    return []


def _python(words: list[str]) -> list[Options]:
    while words[:2] == ["-m", "mpi4py"]:
        words = words[2:]
    if words[:1] == ["-m"] and len(words) > 1:
        module, rest = words[1], words[2:]
        if module.startswith("sglang."):
            return _engine(rest)
        if module == "tpsample.cli" and rest[:1] == ["bench"]:  # which reads no options itself
            own = rest[1:2] == ["scaling"]
            module, rest = (f"benchmarks.{rest[1]}", rest[2:]) if own else (_BENCH, rest[1:])
        if module == "pytest":
            _require_paths(word for word in rest if not word.startswith("-"))
            return []
        return [(module, rest)]
    if words and words[0].endswith(".py"):
        _require_paths(words[:1])
        return [(words[0][:-3].replace("/", "."), words[1:])]
    raise UnknownWords(f"python {shlex.join(words)}: expected -m MODULE or a file")


def _make(words: list[str], env: dict[str, str]) -> list[Options]:
    done = run_command("make", "--dry-run", *words, env=env)
    if done.returncode:
        raise UnknownWords(f"make {shlex.join(words)}: {done.stderr.strip()}")
    found: list[Options] = []
    for line in done.stdout.splitlines():
        line = _IF_SET.sub("", line)
        program = Path(shlex.split(line)[0]).name if line.strip() else ""
        if program in ("ruff", "mypy", "lint-imports", "pytest", "launch", ""):
            continue
        if program not in _IGNORED:
            found += options_of(line)
    return found


def _launcher(script: str, words: list[str], env: dict[str, str]) -> list[Options]:
    """Return what a launcher would start; outside of a cluster it makes up what it lacks."""
    dry = words if words[:1] == ["--dry-run"] else ["--dry-run", *words]
    done = run_command(script, *dry, env=env)
    if done.returncode:
        raise UnknownWords(f"{script} {shlex.join(words)}: {done.stderr.strip()}")
    started = shlex.split(done.stderr.strip().splitlines()[-1])
    while started[0] == "env" or _ASSIGNMENT.match(started[0]):
        started = started[1:]
    return options_of(shlex.join(started))


def _from(words: list[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the words from the first on that has a pattern, which is the program started."""
    for place, word in enumerate(words):
        if pattern.search(word):
            return words[place:]
    raise UnknownWords(f"{shlex.join(words)}: starts nothing that is known here")


def _require_installable(words: list[str]) -> None:
    """Refuse what pip could not install: extras that are not there, another pinned package."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        if extras := re.fullmatch(r"\.\[(.*)\]", word):
            for extra in extras[1].split(","):
                if extra not in project["optional-dependencies"]:
                    raise UnknownWords(f"pip {shlex.join(words)}: there is no extra {extra!r}")
        if "==" in word and word not in (ROOT / "Makefile").read_text():
            raise UnknownWords(f"pip {shlex.join(words)}: {word} is not what the Makefile installs")


def _require_paths(paths: object) -> None:
    for path in paths:  # type: ignore[attr-defined]
        if not (ROOT / path).exists():
            raise UnknownWords(f"{path}: there is no such file")
