"""The options of the experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.lab import machine
from benchmarks.run import run_one
from benchmarks.serving.experiment import BENCHMARK, ServingRun, tiny_model
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
        run_one(BENCHMARK, run, output or machine.default_output(tiny))
