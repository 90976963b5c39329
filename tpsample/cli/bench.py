"""`tpsample bench`: the benchmarks of a source checkout."""

from __future__ import annotations

from typing import Any


def register(app: Any) -> None:
    """Add the command to a typer application.

    The benchmarks are not installed with the package: without a checkout beside it the command
    says so.
    """
    try:
        from benchmarks.run import bench
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "benchmarks":
            raise
        # Whatever the options are, the answer is the same.
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("bench", context_settings=anything)(_not_in_a_checkout)
    else:
        app.command("bench")(bench)


def _not_in_a_checkout() -> None:
    """Measure tpsample against its baselines and limits (source checkout only)."""
    raise SystemExit(
        "tpsample bench: the benchmarks are in the source checkout, not in the installed package; "
        "run `make bench` there"
    )
