"""`tpsample bench` runs the benchmarks of a source checkout; a wheel does not have them."""

from __future__ import annotations

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The benchmarks read their own options, which are not imported before they are asked for."""


def bench(context: typer.Context) -> None:
    """Measure tpsample against its baselines and limits (source checkout only)."""
    try:
        from benchmarks.run import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "benchmarks":
            raise
        raise SystemExit(
            "tpsample bench: the benchmarks are in the source checkout, not in the installed "
            "package; run `make bench` there"
        ) from None
    app(context.args, prog_name="tpsample bench")
