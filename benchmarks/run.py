"""Run benchmarks and write a page for each.

python -m benchmarks.run                          all that one GPU can answer
python -m benchmarks.run single_gpu --batches 64,128
torchrun --standalone --nproc-per-node 8 -m benchmarks.run exchange
python -m benchmarks.scaling                      starts its own ranks, for every world size
python -m benchmarks.serving                      a serving loop with the bundled model
python -m benchmarks.run --tiny                   15 s on two cores of a CPU
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.harness import NAMES, Row, Run, execute
from benchmarks.problem import WrongToken
from benchmarks.report import RESULT, write_report
from benchmarks.shapes import shape_named
from tpsample.distributed import Job, join

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_OTHERS = "`scaling` and `serving` are commands of their own; see their --help."
RESULTS = machine.ROOT / "benchmarks" / "results"


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Any of {', '.join(NAMES)}; default all. {_OTHERS}")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Sizes for a CPU: 15 s on 2 cores.")] = False,
    shapes: Annotated[str, typer.Option(help="Such as 128256x8192,151936x4096.")] = "",
    batches: Annotated[str, typer.Option(help="Such as 1,64,256.")] = "",
    repeats: Annotated[int, typer.Option(help="Timed steps per candidate; 0 is the default.")] = 0,
    shard_result: Annotated[
        Path | None,
        typer.Option(help="JSON of a shard run, for scaling_model; default this run's."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where folders <topic>-<hardware>-<date> go; default results/."),
    ] = None,
) -> None:
    """Measure tpsample against its baselines and limits. Wrong ids abort a benchmark."""
    chosen = names or list(NAMES)
    for name in chosen:
        if name not in NAMES:
            raise typer.BadParameter(f"expected any of {', '.join(NAMES)}, got {name!r}; {_OTHERS}")
    settings: dict[str, object] = {}
    try:
        if shapes:
            settings["shapes"] = tuple(shape_named(name) for name in shapes.split(","))
        if batches:
            settings["batches"] = tuple(int(batch) for batch in batches.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if repeats:
        settings["repeats"] = repeats
    if output is None:
        output = Path(tempfile.gettempdir()) / "tpsample-benchmarks" if tiny else RESULTS
    with join(timeout_s=600) as job:
        if job.device.type == "cpu" and not tiny and not shapes:
            raise typer.BadParameter("no GPU here: try --tiny, or name --shapes and --batches")
        _run_all(chosen, job, output, tiny, settings, shard_result)


def _run_all(
    names: list[str],
    job: Job,
    output: Path,
    tiny: bool,
    settings: dict[str, object],
    shard_result: Path | None,
) -> None:
    console = Console(stderr=True, quiet=job.rank != 0)
    for name in names:
        run = Run.small(job, **settings) if tiny else Run(job, **settings)  # type: ignore[arg-type]
        run.shard_result = shard_result
        record = machine.describe(job.device, job.world_size)
        folder = output / f"{name}-{machine.slug(record)}-{record['date']}"
        path = folder / RESULT if job.rank == 0 else None
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        ) as progress:
            task = progress.add_task(name)

            def show(row: Row, name: str = name) -> None:
                point = f"{row['shape']} batch {row['batch']} {row['candidate']}"
                progress.update(task, description=f"{name}: {point}")  # noqa: B023 - used at once

            try:
                if not execute(name, run, path, on_row=show).rows:
                    line = f"{name}: nothing measured: {' '.join(run.notes)}"
                    console.print(line, soft_wrap=True)
            except WrongToken as error:
                console.print(f"[bold red]{name}: wrong token, nothing was measured: {error}")
                raise typer.Exit(1) from error
            finally:
                if path is not None and path.exists():
                    console.print(f"{name}: {write_report(folder)}")
        if name == "shard" and shard_result is None and job.device.type == "cuda" and not tiny:
            shard_result = path


if __name__ == "__main__":
    app()
