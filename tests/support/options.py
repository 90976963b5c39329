"""Lets a module parse the options of a command, and stops it there.

Reads ``[["benchmarks.run", ["--tiny"]], …]`` from its input, and prints what was wrong with each,
"" if nothing was. Each is parsed in a fork, so that torch is imported once for all.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn


class Parsed(BaseException):
    """The options are right, and nothing more is to happen."""


def _stop_after_parsing() -> None:
    """Replace what follows the parsing of options, in argparse and in typer."""
    import typer.core

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: Any, *given: Any, **named: Any) -> NoReturn:
        parse(self, *given, **named)
        raise Parsed

    def stop(*_: object) -> NoReturn:
        raise Parsed

    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[method-assign, assignment]
    typer.core.TyperCommand.invoke = stop  # type: ignore[method-assign]


def _wrong(module: str, arguments: list[str]) -> str:
    """Say what is wrong with a command, which is not run."""
    if module == "pip":
        from pip._internal.commands import create_command

        create_command(arguments[0]).parse_args(arguments[1:])
        return ""
    if module == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args(arguments)
        return ""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return f"no module named {module}"
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text()
    if not any(parser in source for parser in ("parse_args", "import app", "import main", "app()")):
        takes_a_path = "sys.argv[1" in source
        return "" if len(arguments) <= takes_a_path else f"{module} reads no options"
    _stop_after_parsing()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return f"{module} did not parse its options"


def _said(module: str, arguments: list[str]) -> str:
    """Return what `_wrong` returned, or what was printed by a parser that refused."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            return _wrong(module, arguments)
        except Parsed:
            return ""
        except SystemExit as ended:
            return "" if ended.code in (0, None) else f"{module}: {printed.getvalue().strip()}"
        except Exception as error:
            return f"{module}: {type(error).__name__}: {error}"


def _in_a_fork(module: str, arguments: list[str]) -> str:
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        os.write(sender, _said(module, arguments).encode()[:60_000] + b"\0")
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return said.rstrip("\0") if said else f"{module}: the process died"


def _import_what_many_need() -> None:
    """Once, not in every fork; what a parser of ours imports, too."""
    for module in (
        *("torch._dynamo", "torch.distributed.run", "pip._internal.commands.install"),
        "tpsample.local.triton_backend",
    ):
        importlib.import_module(module)
    _said("tpsample.cli", ["generate"])
    _said("benchmarks.run", [])


if __name__ == "__main__":
    _import_what_many_need()
    asked = [(module, tuple(arguments)) for module, arguments in json.load(sys.stdin)]
    said = {each: _in_a_fork(each[0], [*each[1]]) for each in dict.fromkeys(asked)}
    print(json.dumps([said[each] for each in asked]))
