"""Says whether the commands of a README could be run: every word is one that somebody reads.

A command is taken apart until a parser can judge what is left: `make` lists what it would run, a
launcher prints what it would start, and that is looked at in turn.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.commands import ROOT, run_command

if sys.version_info >= (3, 11):
    import tomllib
else:  # an environment without it cannot check extras, and says so
    tomllib = None

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
        return options_of(shlex.join(_from_launcher(command, rest)))
    if program in ("srun", "mpirun", "env"):
        return options_of(shlex.join(_from_python(command, rest)))
    name = Path(program).name
    if name in ("pip", "torchrun"):
        return [(name, rest), *(_pip(rest) if name == "pip" else _torchrun(rest))]
    if name == "tpsample":
        return _python(["-m", "tpsample.cli", *rest])
    if name == "vllm":
        return _engine(rest)
    raise UnknownWords(f"{command!r}: nobody here knows how to run {program!r}")


def wrong_options(asked: list[Options]) -> list[str]:
    """Say what is wrong with each, "" if nothing is; torch is imported once for all."""
    child = Path(__file__).with_name("options.py")
    with tempfile.NamedTemporaryFile("w+", suffix=".json") as file:
        json.dump(asked, file)
        file.flush()
        done = run_command("bash", "-c", f"{sys.executable} {child} < {file.name}")
    if done.returncode:
        raise RuntimeError(done.stderr)
    wrong: list[str] = json.loads(done.stdout)
    return wrong


def run_as_pasted(command: str, timeout_s: float = 240) -> str:
    """Run a command in the root of the repository; return what went wrong, "" if nothing did."""
    try:
        done = run_command("bash", "-c", command, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as late:
        return str(late)
    said = (done.stdout + done.stderr)[-2000:]
    return "" if done.returncode == 0 else f"exit status {done.returncode}: {said}"


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


def _torchrun(words: list[str]) -> list[Options]:
    """Return what the script that torchrun starts would parse."""
    for place, word in enumerate(words):
        if word == "-m" or word.endswith(".py"):
            return _python(words[place:])
    raise UnknownWords(f"torchrun {shlex.join(words)}: starts no script")


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
    """Return what a launcher would start; a Slurm allocation of one node is made up for it."""
    with tempfile.TemporaryDirectory() as folder:
        scontrol = Path(folder) / "scontrol"
        scontrol.write_text("#!/bin/sh\necho node-1\n")
        scontrol.chmod(0o755)
        slurm = {"SLURM_JOB_NODELIST": "node-1", "SLURM_JOB_ID": "1"}
        path = f"{Path(sys.executable).parent}:{folder}:{os.environ['PATH']}"
        dry = words if words[:1] == ["--dry-run"] else ["--dry-run", *words]
        done = run_command(script, *dry, env={**slurm, **env, "PATH": path})
    if done.returncode:
        raise UnknownWords(f"{script} {shlex.join(words)}: {done.stderr.strip()}")
    started = shlex.split(done.stderr.strip().splitlines()[-1])
    while started[0] == "env" or _ASSIGNMENT.match(started[0]):
        started = started[1:]
    return options_of(shlex.join(started))


def _from_launcher(command: str, words: list[str]) -> list[str]:
    for place, word in enumerate(words):
        if word.startswith("launch/"):
            return words[place:]
    raise UnknownWords(f"{command!r}: starts no launcher")


def _from_python(command: str, words: list[str]) -> list[str]:
    for place, word in enumerate(words):
        if _PYTHON.match(word):
            return words[place:]
    raise UnknownWords(f"{command!r}: starts no Python")


def _pip(words: list[str]) -> list[Options]:
    """Check what pip is to install: this project with extras of its own, or a pinned package."""
    if tomllib is None:
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        if extras := re.fullmatch(r"\.\[(.*)\]", word):
            for extra in extras[1].split(","):
                if extra not in project["optional-dependencies"]:
                    raise UnknownWords(f"pip {shlex.join(words)}: there is no extra {extra!r}")
        if "==" in word and word not in (ROOT / "Makefile").read_text():
            raise UnknownWords(f"pip {shlex.join(words)}: {word} is not what the Makefile installs")
    return []


def _require_paths(paths: object) -> None:
    for path in paths:  # type: ignore[attr-defined]
        if not (ROOT / path).exists():
            raise UnknownWords(f"{path}: there is no such file")
