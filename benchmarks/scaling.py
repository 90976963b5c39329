"""Throughput over the number of ranks: one command that starts the ranks by itself.

    make scaling                              python -m benchmarks.scaling --help
    tpsample bench scaling --world-sizes 1,2,4,8 --minutes 30

The ranks of each world size are started one after the other, into one result. A run that is killed
loses the point it was at, and the same command goes on with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.lab import harness, machine, ranks
from benchmarks.lab.harness import Run
from benchmarks.lab.page import write_page
from benchmarks.lab.results import RESULT, Result, differences
from benchmarks.lab.shapes import SHAPES
from benchmarks.lab.started_ranks import StartedRanks
from benchmarks.questions import scaling as question
from benchmarks.questions.scaling_candidates import MODES
from benchmarks.run import Batches, Dtype, Shapes, known, numbers, shown, sizes, writable
from tpsample.distributed import Job, from_environment, join

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXCHANGES = ("auto", *ranks.EXCHANGES)
CPU = {"shapes": SHAPES[-1:], "batches": (1, 8, 64)}
GPU = {"shapes": SHAPES[:2], "batches": (1, 16, 64, 256)}
"""Sizes where none are named."""
TIMEOUT_S = 300.0
"""How long a rank waits for another: loading libraries and compiling may take minutes."""


@app.command()
def scaling(
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2,4,8",
    shapes: Shapes = "",
    batches: Batches = "",
    dtype: Dtype = "bf16",
    modes: Annotated[str, typer.Option(help="Kinds of requests.")] = ",".join(MODES),
    exchanges: Annotated[str, typer.Option(help=f"Any of {', '.join(EXCHANGES)}.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps per candidate.")] = 30,
    minutes: Annotated[
        float, typer.Option(help="No point is begun after this long; call again to go on.")
    ] = 60.0,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="On a CPU, more ranks than cores.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny sizes, to see that it works.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Go on with no earlier run.")] = False,
    output: Annotated[Path, typer.Option(help="Where the folder goes.")] = machine.RESULTS,
) -> None:
    """Measure tokens per second over the number of ranks; a killed run goes on where it was.

    On ranks that torchrun or another launcher has started, it measures these, and rank 0 writes.
    """
    given = from_environment(os.environ).world_size
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0))
    asked = numbers(world_sizes) if given == 1 else (given,)
    most = given if given > 1 else gpus or (max(asked) if oversubscribe else cores)
    possible = [each for each in asked if each <= most]
    if not possible:
        raise typer.BadParameter(f"world sizes {world_sizes}: at most {most} ranks fit here")
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // max(possible))))
    options = {
        "world_sizes": possible,
        "modes": known("modes", modes.split(","), MODES),
        "exchanges": known("exchanges", exchanges.split(","), EXCHANGES),
        "threads": threads,
    }
    job = Job(world_size=max(possible), device=torch.device("cuda" if gpus else "cpu"))
    named = sizes(shapes, batches, dtype) | {"repeats": repeats, "options": options}
    run = Run.small(job, **named) if tiny else Run(job, **((GPU if gpus else CPU) | named))
    if given > 1:
        with join(timeout_s=TIMEOUT_S) as job:
            if job.rank > 0:
                return measure(job, run)
            with _begun(output, run, fresh) as path:
                measure(job, run, path, 60 * minutes)
                print(_ended(path, []))
        return
    console = Console(stderr=True)
    if left := [each for each in asked if each > most]:
        what = f"{gpus} GPUs" if gpus else f"{cores} cores (--oversubscribe)"
        console.print(f"left out: W = {', '.join(map(str, left))}; this machine has {what}")
    failed = []
    with _begun(output, run, fresh) as path:
        deadline = time.monotonic() + 60 * minutes
        waiting = question.missing(Result.load(path))
        for number, world_size in enumerate(waiting):
            share = (deadline - time.monotonic()) / (len(waiting) - number)
            told = (_on_rank, run, path, share)
            with StartedRanks(world_size, *told, threads=threads) as started:
                try:
                    started.answers(started.everybody, limit_s=None)
                except EOFError:
                    failed.append(f"W = {world_size}: a rank failed, and has said why")
        console.print(f"{_ended(path, failed)}", soft_wrap=True)
    for line in failed:
        console.print(f"[bold red]{line}", soft_wrap=True)
    raise typer.Exit(bool(failed))


def _on_rank(line: Connection, run: Run, path: Path, seconds: float) -> None:
    with join(timeout_s=TIMEOUT_S) as job:
        measure(job, run, path, seconds)
        line.send("done")


def measure(job: Job, run: Run, path: Path | None = None, seconds: float = float("inf")) -> None:
    """Measure the points that the result in `path` lacks for this number of ranks. Collective.

    Args:
        path: read and written by rank 0; the others may be on other hosts.
        seconds: no point is begun after this long, by the clock of rank 0.
    """
    run.job = job
    if job.device.type == "cpu":
        torch.set_num_threads(run.options["threads"])
    console = Console(stderr=True, quiet=job.rank > 0)
    path = path if job.rank == 0 else None
    earlier = Result.load(path) if path is not None else None
    shown(console, question.benchmark(run), run, path, seconds=seconds, earlier=earlier)


@contextlib.contextmanager
def _begun(output: Path, run: Run, fresh: bool) -> Iterator[Path]:
    """Yield the file of the result that goes on or is new, and keep other runs from `output`.

    Raises:
        typer.BadParameter: it takes no file, another run is at work there, or today's folder has
            another one's.
    """
    lock = os.open(writable("--output", output), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new = harness.unmeasured(question.benchmark(run), run)
        path, record = _new_or_going_on(output, new, fresh)
        record.save(path)
        yield path
    except BlockingIOError:
        raise typer.BadParameter(f"another run is at work in {output}") from None
    finally:
        os.close(lock)


def _new_or_going_on(output: Path, new: Result, fresh: bool) -> tuple[Path, Result]:
    """Return an unfinished result of the same sizes and code and its file, or the new one."""
    today = output / machine.folder_name("scaling", new.machine) / RESULT
    if fresh:
        return today, new
    topic = f"scaling-{machine.slug(new.machine)}"
    for path in sorted(output.glob(f"{topic}-20*/{RESULT}"), reverse=True):
        try:
            old = Result.load(path)
            different = differences(old, new)
        except ValueError as error:  # of an older schema
            different = [str(error)]
        if not different and (path == today or question.missing(old)):
            return path, old
        if path == today:
            raise typer.BadParameter(
                f"{path} is of another run: {'; '.join(different)}; take --fresh to replace it, "
                "or another --output"
            )
    return today, new


def _ended(path: Path, failed: list[str]) -> Path:
    """Write the warnings and the page, whose path is returned."""
    result = Result.load(path)
    result.warnings = question.warnings(result, failed)
    result.save(path)
    return write_page(path.parent)


if __name__ == "__main__":
    app()
