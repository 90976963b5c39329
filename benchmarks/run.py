"""Run benchmarks and write a page for each.

python -m benchmarks.run                          all that one GPU can answer
python -m benchmarks.run single_gpu --batches 64,128
torchrun --standalone --nproc-per-node 8 -m benchmarks.run exchange
python -m benchmarks.run --tiny                   15 s on two cores of a CPU
ncu -k regex:lm_head -c 1 python -m benchmarks.run shard --batches 64    one step in a profiler
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.lab import machine
from benchmarks.lab.harness import Benchmark, Run, execute, unmeasured
from benchmarks.lab.page import write_page
from benchmarks.lab.problem import DTYPES, WrongToken
from benchmarks.lab.results import POINT, RESULT, Result, Row, differences
from benchmarks.lab.shapes import shape_named
from benchmarks.questions import BENCHMARKS
from tpsample.distributed import join

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_NAMES = ", ".join(BENCHMARKS)
_ASKED = ", ".join(name for name, each in BENCHMARKS.items() if not each.by_default)
_HELP = f"Any of {_NAMES}; default all but {_ASKED}."
_OTHERS = "`scaling` is a command of its own; see its --help."

Shapes = Annotated[str, typer.Option(help="Such as 128256x8192,151936x4096.")]
Batches = Annotated[str, typer.Option(help="Such as 1,64,256.")]
Dtype = Annotated[str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.")]


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"{_HELP} {_OTHERS}"),
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Sizes for a CPU: 15 s on 2 cores.")] = False,
    shapes: Shapes = "",
    batches: Batches = "",
    dtype: Dtype = "bf16",
    repeats: Annotated[
        int, typer.Option(min=0, help="Timed steps per candidate; 0 is the default.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Where folders <topic>-<hardware>-<date> go; default results/."
        ),
    ] = None,
    onto: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder whose page gets these rows as well, also of another dtype.",
        ),
    ] = None,
) -> None:
    """Measure tpsample against its baselines and limits. Wrong ids abort a benchmark."""
    known(f"names ({_OTHERS})", names or (), BENCHMARKS)
    settings = sizes(shapes, batches, dtype) | ({"repeats": repeats} if repeats else {})
    folder = writable("--output", output or (machine.TINY_RESULTS if tiny else machine.RESULTS))
    if onto is not None:
        writable("--onto", onto)
    with join(timeout_s=600) as job:
        if job.device.type == "cpu" and not tiny and not shapes:
            raise typer.BadParameter("no GPU here: try --tiny, or name --shapes and --batches")
        for name in names or [each.name for each in BENCHMARKS.values() if each.by_default]:
            run = Run.small(job, **settings) if tiny else Run(job, **settings)
            run_one(BENCHMARKS[name], run, folder, onto)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of an option, each once.

    Raises:
        typer.BadParameter: they are no numbers of at least 1.
    """
    words = dict.fromkeys(text.split(","))
    if wrong := [word for word in words if not word.isdecimal() or int(word) < 1]:
        raise typer.BadParameter(f"expected numbers of at least 1, got {wrong[0]!r}")
    return tuple(int(word) for word in words)


def known(option: str, names: Collection[str], expected: Collection[str]) -> list[str]:
    """Return the names that an option has.

    Raises:
        typer.BadParameter: one is unknown.
    """
    if wrong := [name for name in names if name not in expected]:
        raise typer.BadParameter(
            f"{option}: expected any of {', '.join(expected)}, got {wrong[0]!r}"
        )
    return list(names)


def writable(option: str, folder: Path) -> Path:
    """Return the folder of an option, which is made if it is not there.

    Raises:
        typer.BadParameter: it takes no file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(
            f"{folder} takes no result: {error.strerror}; name another folder",
            param_hint=f"'{option}'",
        ) from None
    return folder


def sizes(shapes: str, batches: str, dtype: str) -> dict[str, Any]:
    """Return the fields of a `Run` that options name.

    Raises:
        typer.BadParameter: there is no such shape, number or dtype.
    """
    found: dict[str, Any] = {"dtype": known("dtype", [dtype], DTYPES)[0]}
    try:
        if shapes:
            found["shapes"] = tuple(shape_named(name) for name in shapes.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return found | ({"batches": numbers(batches)} if batches else {})


def run_one(benchmark: Benchmark, run: Run, output: Path, onto: Path | None) -> None:
    """Run a benchmark and write its page into a folder below `output`; rank 0 writes.

    Args:
        onto: a folder in place of that one, whose result goes on.

    Raises:
        typer.Exit: a token was wrong.
        typer.BadParameter: the result in `onto` is of another benchmark, machine or settings.
    """
    name, job = benchmark.name, run.job
    console = Console(stderr=True, quiet=job.rank != 0)
    here = machine.describe(job.device, job.world_size)
    folder = onto or output / machine.folder_name(name, here)
    path = folder / RESULT if job.rank == 0 else None
    earlier = _earlier(benchmark, run, path) if onto and path else None
    try:
        if not shown(console, benchmark, run, path, earlier=earlier).rows:
            console.print(f"{name}: nothing measured: {' '.join(run.notes)}", soft_wrap=True)
    except WrongToken as error:
        console.print(f"[bold red]{name}: wrong token, nothing was measured: {error}")
        raise typer.Exit(1) from error
    finally:
        if path is not None and path.exists():
            console.print(f"{name}: {write_page(folder)}", soft_wrap=True)


def _earlier(benchmark: Benchmark, run: Run, path: Path) -> Result | None:
    """Return the result in a file, which goes on with another dtype too; None without the file."""
    if not path.exists():
        return None
    old, new = Result.load(path), unmeasured(benchmark, run)
    dtypes = dict.fromkeys([*old.settings["dtype"].split(", "), run.dtype])
    old.settings["dtype"] = new.settings["dtype"] = ", ".join(dtypes)
    wrong = differences(old, new)
    if old.benchmark != new.benchmark or wrong:
        told = "; ".join(wrong) or f"it answers {old.benchmark}"
        raise typer.BadParameter(f"onto: {path} is of another run: {told}")
    return old


def shown(
    console: Console, benchmark: Benchmark, run: Run, path: Path | None, **options: Any
) -> Result:
    """`execute` a benchmark, and show where it is and which candidates it leaves out."""
    name = benchmark.name
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    # No thread of its own may run while a step is timed.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(name)

        def show(rows: list[Row]) -> None:
            for row in rows:
                point = ", ".join(f"{name} {row[name]}" for name in POINT if name in row)
                text = f"{name}: {point}, {row['candidate']}"
                progress.update(task, description=text, refresh=True)
                if "why" in row:
                    said = f"{point}: {row['candidate']} left out: {row['why']}"
                    progress.console.print(said, soft_wrap=True)

        return execute(benchmark, run, path, on_rows=show, **options)


if __name__ == "__main__":
    app()
