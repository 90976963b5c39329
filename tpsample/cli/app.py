"""The commands of `tpsample`."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

import tpsample
from tpsample.cli.doctor import doctor
from tpsample.cli.generate import generate
from tpsample.cli.verify import verify

app = typer.Typer(
    name="tpsample", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for command in (generate, doctor, verify):
    app.command()(command)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure tpsample against its baselines and limits (source checkout only)."""
    arguments, name, module = context.args, "tpsample bench", "benchmarks.run"
    if arguments[:1] == ["scaling"]:
        module, name, arguments = "benchmarks.scaling", f"{name} scaling", arguments[1:]
    try:
        run = importlib.import_module(module).app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "benchmarks":
            raise
        raise SystemExit(
            "tpsample bench: the benchmarks are in the source checkout, not in the installed "
            "package; run `make bench` there"
        ) from None
    run(arguments, prog_name=name)


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
