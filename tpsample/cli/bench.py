"""`tpsample bench` runs the benchmarks of a source checkout; a wheel does not have them."""

from __future__ import annotations

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The benchmarks read their own options, which are not imported before they are asked for."""


def bench(context: typer.Context) -> None:
    """Measure tpsample against its baselines and limits (source checkout only)."""
    arguments, name = context.args, "tpsample bench"
    try:
        if arguments[:1] == ["scaling"]:
            from benchmarks.scaling.command import app

            arguments, name = arguments[1:], f"{name} scaling"
        elif arguments[:1] == ["serving"]:
            from benchmarks.serving.command import app

            arguments, name = arguments[1:], f"{name} serving"
        else:
            from benchmarks.run import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "benchmarks":
            raise
        raise SystemExit(
            "tpsample bench: the benchmarks are in the source checkout, not in the installed "
            "package; run `make bench` there"
        ) from None
    app(arguments, prog_name=name)
