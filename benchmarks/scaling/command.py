"""The command: starts the ranks of each world size, one after the other, into one result."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.lab import harness, machine, quiet, ranks
from benchmarks.lab.page import write_page
from benchmarks.lab.results import RESULT, Result
from benchmarks.lab.shapes import TINY, shape_named
from benchmarks.scaling import plan
from benchmarks.scaling.candidates import MODES
from benchmarks.scaling.plan import Settings
from benchmarks.scaling.ranks import TIMEOUT_S, measure_missing
from tpsample.distributed import from_environment, join

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

GPU_SHAPES, GPU_BATCHES = "128256x8192,151936x4096", "1,16,64,256"
CPU_SHAPES, CPU_BATCHES = "49152x576", "1,8,64"
EXCHANGES = ("auto", *ranks.EXCHANGES)
LOG = "ranks.log"
"""The standard error of the ranks, beside the result; also the lock of the folder."""

END_S = 60.0
"""How long ranks may take to end; torchrun waits 30 s for its own."""

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@app.command()
def scaling(
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2,4,8",
    shapes: Annotated[str, typer.Option(help="Such as 128256x8192,151936x4096.")] = "",
    batches: Annotated[str, typer.Option(help="Such as 1,64,256.")] = "",
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
    try:
        asked = _numbers(world_sizes) if given == 1 else (given,)
        most = given if given > 1 else gpus or (max(asked) if oversubscribe else cores)
        possible = tuple(each for each in asked if each <= most)
        settings = Settings(
            possible,
            tuple(
                shape_named(name).name
                for name in (shapes or (GPU_SHAPES if gpus else CPU_SHAPES)).split(",")
            )
            if shapes or not tiny
            else (TINY.name,),
            _numbers(batches or ("1,3" if tiny else GPU_BATCHES if gpus else CPU_BATCHES)),
            _known("modes", modes, MODES),
            repeats,
            int(os.environ.get("OMP_NUM_THREADS", max(1, cores // max(possible, default=1)))),
            tiny and not shapes,
            _known("exchanges", exchanges, EXCHANGES),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if given > 1:
        return _on_given_ranks(output, settings, fresh, minutes * 60)
    console = Console(stderr=True)
    if not possible:
        raise typer.BadParameter(f"world sizes {world_sizes}: at most {most} ranks fit here")
    if left := [each for each in asked if each > most]:
        what = f"{gpus} GPUs" if gpus else f"{cores} cores (--oversubscribe)"
        console.print(f"left out: W = {', '.join(map(str, left))}; this machine has {what}")
    device = torch.device("cuda" if gpus else "cpu")
    described = machine.describe(device, max(possible))
    folder, record = _start_or_go_on(output, described, settings, fresh)
    failed = []
    if not plan.complete(record):
        with _alone(folder) as lock:
            # The ranks of a killed command write until they let go of the lock, so all is there.
            folder, record = _start_or_go_on(output, described, settings, fresh)
            record.sessions.append(harness.session())
            failed = _run(folder, record, minutes * 60, console, lock)
    console.print(f"{write_page(folder)}", soft_wrap=True)
    for line in failed:
        console.print(f"[bold red]{line}", soft_wrap=True)
    raise typer.Exit(bool(failed))


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(int(each) for each in text.split(",")))
    if min(numbers) < 1:
        raise ValueError(f"expected numbers of at least 1, got {text}")
    return numbers


def _known(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"{option}: expected any of {', '.join(known)}, got {wrong[0]!r}")
    return names


def _on_given_ranks(output: Path, settings: Settings, fresh: bool, seconds: float) -> None:
    """Measure on the ranks that this process is one of, on this host or on several."""
    with join(timeout_s=TIMEOUT_S) as job:
        if job.rank > 0:
            return measure_missing(job, None)
        described = machine.describe(job.device, job.world_size)
        folder, record = _start_or_go_on(output, described, settings, fresh)
        with _alone(folder):
            record.sessions.append(harness.session())
            record.save(folder / RESULT)
            measure_missing(job, folder / RESULT, seconds, lambda point, _: print(point))
            _end(folder, [])
        print(write_page(folder))


def _start_or_go_on(
    output: Path, described: dict[str, Any], settings: Settings, fresh: bool
) -> tuple[Path, Result]:
    """Return the folder of an unfinished run of the same sizes and code, or a new one's.

    Raises:
        typer.BadParameter: today's folder has another run.
    """
    topic = f"scaling-{machine.slug(described)}"
    folder = output / f"{topic}-{described['date']}"
    if fresh:
        return folder, plan.unmeasured(described, settings)
    for path in sorted(output.glob(f"{topic}-20*/{RESULT}"), reverse=True):
        try:
            record = Result.load(path)
            differences = plan.differences(record, described, settings)
        except ValueError as error:  # of an older schema
            differences = [str(error)]
        if not differences and (path.parent == folder or not plan.complete(record)):
            return path.parent, record
        if path.parent == folder:
            raise typer.BadParameter(
                f"{path} is of another run: {'; '.join(differences)}; take --fresh to replace it, "
                "or another --output"
            )
    return folder, plan.unmeasured(described, settings)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Keep other runs away from a folder; yield the descriptor that does so.

    The ranks inherit it, because those of a command that was killed write their point to its end.

    Raises:
        typer.BadParameter: another run is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise typer.BadParameter(
                f"another run is at work in {folder}; the ranks of one that was killed end with "
                "the point they are at"
            ) from None
        yield log.fileno()


def _run(folder: Path, record: Result, seconds: float, console: Console, lock: int) -> list[str]:
    """Measure what is missing, world size after world size; return what failed."""
    path, failed = folder / RESULT, []
    record.save(path)
    deadline = time.monotonic() + seconds
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeRemainingColumn(), TextColumn("left")),
    )
    settings = Settings.of(record)
    waiting = [w for w in settings.world_sizes if plan.missing(record, w)]
    with Progress(*columns, console=console) as progress:
        total = sum(len(plan.missing(record, w)) for w in waiting)
        task = progress.add_task("starting", total=total)
        for number, world_size in enumerate(waiting):
            share = (deadline - time.monotonic()) / (len(waiting) - number)
            progress.update(task, description=f"W = {world_size}, starting")
            with _ranks(world_size, path, share, settings.threads, lock) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if (point := _point(line)) is None:
                        continue
                    said = f"W = {world_size}, {point['shape']}, B = {point['batch']}"
                    progress.update(task, advance=1, description=f"{said}, {point['mode']}")
                    for each in point["left_out"]:
                        text = f"{said}: {each['candidate']} left out: {each['why']}"
                        progress.console.print(text, soft_wrap=True)
                if process.wait() != 0:
                    why = f"the ranks ended with code {process.returncode}; see {folder / LOG}"
                    failed.append(f"W = {world_size}: {why}")
    _end(folder, failed)
    return failed


def _end(folder: Path, failed: list[str]) -> None:
    measured = Result.load(folder / RESULT)
    measured.sessions[-1] |= {"ended": harness.now(), "after": quiet.load()}
    measured.warnings = plan.warnings(measured, failed)
    measured.save(folder / RESULT)


@contextlib.contextmanager
def _ranks(
    world_size: int, path: Path, seconds: float, threads: int, lock: int
) -> Iterator[subprocess.Popen[str]]:
    """Start the ranks of a world size, which write to `path`; they end with the context."""
    command = ["-m", "benchmarks.scaling.ranks", str(path.resolve()), str(seconds)]
    if world_size > 1:
        # --local-addr: torchrun waits for ever on a machine that cannot resolve its own name.
        start = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node"
        command = [*start.split(), str(world_size), *command]
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    paths = [str(machine.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}

    def ended(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, ended)
    process = subprocess.Popen(
        [sys.executable, *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=lock,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # torchrun has to end its ranks, because each is the leader of a session of its own.
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _point(line: str) -> dict[str, Any] | None:
    """Return a point that the ranks have printed, or None for any other line."""
    try:
        point = json.loads(line)
    except ValueError:
        return None
    return point if isinstance(point, dict) and "mode" in point else None
