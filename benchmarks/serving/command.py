"""The options of the experiment."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks import machine
from benchmarks.harness import execute
from benchmarks.problem import WrongToken
from benchmarks.report import RESULT, write_report
from benchmarks.run import RESULTS
from benchmarks.serving.experiment import ServingRun, tiny_model
from tpsample.cli.model import load
from tpsample.distributed import join

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serving(
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face id; default the bundled model.")
    ] = None,
    slots: Annotated[str, typer.Option(help="Requests decoded together, such as 4,16.")] = "4,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests in a round.")] = 32,
    scale: Annotated[
        float, typer.Option(help="Of the trace's lengths: prompts of 27 to 4085 tokens.")
    ] = 0.1,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per candidate.")] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A random model, to see it work.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where the folder goes; default results/.")
    ] = None,
) -> None:
    """Serve the same requests by tpsample and from whole logits, on one rank or under torchrun."""
    try:
        counts = tuple(int(each) for each in slots.split(","))
        if min(counts) < 1:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"slots: expected numbers such as 4,16, got {slots!r}") from None
    if not scale > 0:
        raise typer.BadParameter(f"scale: expected a number above 0, got {scale}")
    if output is None:
        output = Path(tempfile.gettempdir()) / "tpsample-benchmarks" if tiny else RESULTS
    with join(timeout_s=600) as job:
        loaded = tiny_model(job.device) if tiny else load(model, job, torch.bfloat16)
        run = ServingRun(
            job,
            shapes=(),
            batches=(3,) if tiny else counts,
            repeats=1 if tiny else repeats,
            tiny=tiny,
            model=loaded,
            requests=6 if tiny else requests,
            scale=0.05 if tiny else scale,
        )
        record = machine.describe(job.device, job.world_size)
        folder = output / f"serving-{machine.slug(record)}-{record['date']}"
        console = Console(stderr=True, quiet=job.rank != 0)
        path = folder / RESULT if job.rank == 0 else None
        try:
            execute("serving", run, path)
        except WrongToken as error:
            console.print(f"[bold red]wrong token, nothing was measured: {error}")
            raise typer.Exit(1) from error
        if path is not None:
            console.print(f"{write_report(folder)}", soft_wrap=True)
