"""The command `tpsample`."""

from __future__ import annotations

import os

from tpsample.core.machine import how_to_install


def main() -> None:
    """Run the command line. Say in a line what it lacks: a package, or room for its output."""
    try:
        from tpsample.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"tpsample: the command line needs {error.name}: {how_to_install()}"
        ) from None
    try:
        app()
    except OSError as error:
        _drop_output()
        raise SystemExit(f"tpsample: {error}") from None
    except SystemExit as end:
        # Both typer and rich end with 1 then, which means something else.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _drop_output()
        raise SystemExit(CLOSED_PIPE) from None


CLOSED_PIPE = 128 + 13
"""The exit status after the reader of the output closed it, as of a program that SIGPIPE ends."""


def _drop_output() -> None:
    """Throw the rest of the output away, because it would fail once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
