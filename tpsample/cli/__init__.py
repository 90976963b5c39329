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
        # The rest of the output is thrown away, because it would fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(f"tpsample: {error}") from None
