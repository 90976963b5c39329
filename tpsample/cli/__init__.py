"""The command `tpsample`."""

from __future__ import annotations


def main() -> None:
    """Run the command line; without the extra it needs, say which one."""
    try:
        from tpsample.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"tpsample: the command line needs {error.name}: pip install 'tpsample[cli,hf]'"
        ) from None
    app()
