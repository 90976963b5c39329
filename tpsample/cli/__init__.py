"""The command `tpsample`."""

from __future__ import annotations

from tpsample.core.machine import how_to_install


def main() -> None:
    """Run the command line; without a package that it needs, say which, and how to install it."""
    try:
        from tpsample.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"tpsample: the command line needs {error.name}: {how_to_install()}"
        ) from None
    app()
