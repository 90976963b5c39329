"""The command `tpsample`."""

from __future__ import annotations


def how_to_install(extras: str = "cli,hf") -> str:
    """Return the command that installs some extras; no index of packages has tpsample yet."""
    return f"in a clone of tpsample, pip install '.[{extras}]'"


def main() -> None:
    """Run the command line; without the extra it needs, say which one."""
    try:
        from tpsample.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"tpsample: the command line needs {error.name}: {how_to_install()}"
        ) from None
    app()
