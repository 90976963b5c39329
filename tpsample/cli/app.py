"""The commands of `tpsample`, one file each."""

from __future__ import annotations

from typing import Annotated

import typer

import tpsample
from tpsample.cli.bench import SETTINGS, bench
from tpsample.cli.doctor import doctor
from tpsample.cli.generate import generate
from tpsample.cli.verify import verify

app = typer.Typer(
    name="tpsample", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for command in (generate, doctor, verify):
    app.command()(command)
app.command(context_settings=SETTINGS, add_help_option=False)(bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpsample {tpsample.__version__}")
        raise typer.Exit


@app.callback()
def tpsample_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Sample next tokens where the logits are computed, on one rank or many."""
