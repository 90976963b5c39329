"""Run benchmarks and write a page for each.

python -m benchmarks.run                          all that one GPU can answer
python -m benchmarks.run single_gpu --batches 64,128
torchrun --standalone --nproc-per-node 8 -m benchmarks.run exchange
python -m benchmarks.run --tiny                   15 s on two cores of a CPU
ncu -k regex:lm_head -c 1 python -m benchmarks.run shard --batches 64    one step in a profiler
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.lab import machine
from benchmarks.lab.harness import Benchmark, Run, execute
from benchmarks.lab.page import write_page
from benchmarks.lab.problem import WrongToken
from benchmarks.lab.results import RESULT, Row
from benchmarks.lab.shapes import shape_named
from benchmarks.questions import BENCHMARKS
from tpsample.distributed import join

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_NAMES = ", ".join(BENCHMARKS)
_ASKED = ", ".join(name for name, each in BENCHMARKS.items() if not each.by_default)
_HELP = f"Any of {_NAMES}; default all but {_ASKED}."
_OTHERS = "`scaling` is a command of its own; see its --help."


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"{_HELP} {_OTHERS}"),
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Sizes for a CPU: 15 s on 2 cores.")] = False,
    shapes: Annotated[str, typer.Option(help="Such as 128256x8192,151936x4096.")] = "",
    batches: Annotated[str, typer.Option(help="Such as 1,64,256.")] = "",
    repeats: Annotated[int, typer.Option(help="Timed steps per candidate; 0 is the default.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="Where folders <topic>-<hardware>-<date> go; default results/."),
    ] = None,
) -> None:
    """Measure tpsample against its baselines and limits. Wrong ids abort a benchmark."""
    for name in names or ():
        if name not in BENCHMARKS:
            raise typer.BadParameter(f"expected any of {_NAMES}, got {name!r}; {_OTHERS}")
    settings: dict[str, object] = {"repeats": repeats} if repeats else {}
    try:
        if shapes:
            settings["shapes"] = tuple(shape_named(name) for name in shapes.split(","))
        if batches:
            settings["batches"] = tuple(int(batch) for batch in batches.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    folder = output or machine.default_output(tiny)
    with join(timeout_s=600) as job:
        if job.device.type == "cpu" and not tiny and not shapes:
            raise typer.BadParameter("no GPU here: try --tiny, or name --shapes and --batches")
        for name in names or [each.name for each in BENCHMARKS.values() if each.by_default]:
            run = Run.small(job, **settings) if tiny else Run(job, **settings)  # type: ignore[arg-type]
            run_one(BENCHMARKS[name], run, folder)


def run_one(benchmark: Benchmark, run: Run, output: Path) -> None:
    """Run a benchmark and write its page into a folder below `output`; rank 0 writes.

    Raises:
        typer.Exit: a token was wrong.
    """
    name, job = benchmark.name, run.job
    console = Console(stderr=True, quiet=job.rank != 0)
    folder = output / machine.folder_name(name, machine.describe(job.device, job.world_size))
    path = folder / RESULT if job.rank == 0 else None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name)

        def show(row: Row) -> None:
            point = f"{row['shape']} batch {row['batch']} {row['candidate']}"
            progress.update(task, description=f"{name}: {point}")

        try:
            if not execute(benchmark, run, path, on_row=show).rows:
                console.print(f"{name}: nothing measured: {' '.join(run.notes)}", soft_wrap=True)
        except WrongToken as error:
            console.print(f"[bold red]{name}: wrong token, nothing was measured: {error}")
            raise typer.Exit(1) from error
        finally:
            if path is not None and path.exists():
                console.print(f"{name}: {write_page(folder)}", soft_wrap=True)


if __name__ == "__main__":
    app()
