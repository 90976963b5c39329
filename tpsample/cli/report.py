"""The output of `tpsample generate`, which only rank 0 prints."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.filesize import decimal as size
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tpsample.cli.answers import Decoded
from tpsample.cli.model import Model
from tpsample.core.checks import is_dtensor
from tpsample.core.machine import how_to_install
from tpsample.distributed import Job, LaunchError
from tpsample.errors import NoToken, PeerLost
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler

_LONGEST = 1000
"""Characters of an error message."""


class Report:
    """Shows progress, texts and a table on rank 0; the same calls are silent elsewhere.

    Args:
        bars: show bars of progress, which streamed text would break.
    """

    def __init__(self, rank: int, *, bars: bool = True) -> None:
        self._console, self._bars = Console(quiet=rank != 0, highlight=False), bars
        self._written = ""

    @contextmanager
    def phases(self) -> Iterator[Callable[[str, int], Callable[[], None]]]:
        """Yield `phase(name, total)`, which starts a bar and returns what advances it."""
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        name = TextColumn("{task.description}")
        with Progress(name, *columns, console=self._console, disable=not self._bars) as progress:

            def fill() -> None:
                """Let the last bar be full: texts may end before their limit."""
                for task in progress.tasks[-1:]:
                    progress.update(task.id, total=task.completed)

            def phase(name: str, total: int) -> Callable[[], None]:
                fill()
                return partial(progress.advance, progress.add_task(name, total=total))

            yield phase
            fill()

    def text(self, prompt: str, params: SamplingParams, text: str) -> None:
        """Show one prompt, how it was sampled, and what came."""
        how = "greedy" if params.greedy else f"T={params.temperature:g} seed={params.seed}"
        self._console.print()
        self._console.print(Text.assemble((prompt, "bold"), (f"  {how}", "dim")))
        self._console.print(Text(text.strip()))

    def write(self, text_so_far: Callable[[], str]) -> None:
        """Show more of the text that is being written, once its letters are whole."""
        text = text_so_far()
        if text.startswith(self._written) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._console.print(Text(text[len(self._written) :]), end="", soft_wrap=True)
            self._written = text

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show a name and a value per line."""
        table = Table(show_header=False, box=None)
        table.add_column(style="dim")
        table.add_column()
        for name, value in rows:
            table.add_row(name, Text(value))
        self._console.print()
        self._console.print(table)

    def verdict(self, line: str, ok: bool) -> None:
        """Show the last line, green or red, in one piece."""
        self._console.print(Text(line, "green" if ok else "bold red"), soft_wrap=True)


def error(message: object) -> None:
    """Say on standard error why this rank gives up, and tell torchrun, whose report is last."""
    line = one_line(str(message))
    Console(stderr=True).print(Text(f"error: {line}", "bold red"), soft_wrap=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))


@contextmanager
def errors(more: type[Exception] = NoToken) -> Iterator[None]:
    """Turn errors of a user, and those of type `more`, into one line and exit status 1."""
    try:
        yield
    except ModuleNotFoundError as missing:
        error(f"{missing}: {how_to_install()}")
        raise typer.Exit(1) from missing
    except (LaunchError, PeerLost, ValueError, more) as wrong:
        error(wrong)
        raise typer.Exit(1) from wrong


def one_line(message: str) -> str:
    """Return a message in one line, because a file may have put anything into it."""
    shown = "".join(letter if letter.isprintable() else " " for letter in message[:_LONGEST])
    return " ".join(shown.split()) + " …" * (len(message) > _LONGEST)


def started(job: Job) -> str:
    """Say how many ranks there are, and who started them."""
    if job.source == "alone":
        return "1 rank, started by hand"
    return f"{job.world_size} rank{'s' * (job.world_size != 1)}, started by {job.source}"


def lines(
    lm: Model, sampler: LMHeadSampler, decoded: Decoded, job: Job, *, tensor_parallel: bool
) -> list[tuple[str, str]]:
    """Return what was generated, how fast, on what, and what travelled. Collective."""
    rows, others = len(decoded.rows), job.world_size - 1
    device = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    travels = "nothing: one rank"
    if job.world_size > 1:
        # Filtered rows exchange integers beside their words.
        integers = sampler.ranks.bytes_sent // decoded.forwards
        sent = size(sampler.exchange.bytes_sent(rows) + integers)
        gathered = size(others * sampler.vocab_size * 4 * rows // job.world_size)
        travels = f"{sent} of payload sent, instead of {gathered} of gathered logits"
    trunk = split(lm.causal_lm, [state for row in decoded.rows for state in row.states], job)
    if tensor_parallel and job.world_size == 1:
        trunk = [("trunk", "whole: one rank has nothing to split")]
    return [
        ("model", f"{lm.name}, vocabulary {sampler.vocab_size}"),
        *speed(decoded),
        ("job", f"{started(job)}, on {device}"),
        ("backend", f"{sampler.backend}, {str(lm.lm_head.weight.dtype).removeprefix('torch.')}"),
        ("exchange", sampler.exchange.name),
        ("bytes per step and rank", travels),
        *trunk,
    ]


def speed(decoded: Decoded) -> list[tuple[str, str]]:
    """Return how fast tokens came; the first step reads the prompts, and may compile kernels."""
    first = f"{decoded.first_s:.1f} s for the first step"
    steps, tokens = decoded.forwards - 1, sum(len(row.answer[1:]) for row in decoded.rows)
    if not steps:
        return [("time", first)]
    rate = f"{tokens / decoded.seconds:.1f} (all {len(decoded.rows)} rows, behind the first step)"
    rest = f"{decoded.seconds:.1f} s for {tokens} tokens in {steps} more"
    return [("tokens per second", rate), ("time", f"{first}, {rest}")]


def split(
    module: torch.nn.Module, hidden_states: Sequence[Tensor], job: Job
) -> list[tuple[str, str]]:
    """Return what a split trunk did, as (name, value), and nothing if it is whole. Collective.

    Args:
        hidden_states: of every token; the ranks compare theirs, whose bits must be the same.
    """
    parameters: list[Any] = list(module.parameters())
    if not any(map(is_dtensor, parameters)):
        return []
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    local = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in parameters]
    own = sum(part.numel() * part.element_size() for part in local)
    given = [states.contiguous().view(torch.uint8).cpu() for states in hidden_states]
    digests = job.gather([zlib.crc32(states.numpy().tobytes()) for states in given])
    apart = sum(len(set(token)) > 1 for token in zip(*digests, strict=True))
    bits = f"DIFFER BETWEEN RANKS for {apart} of" if apart else "the same bits on every rank for"
    return [
        ("trunk", f"tensor-parallel, {size(own)} of its {size(total)} on rank 0"),
        ("hidden states", f"{bits} {len(given)} tokens"),
    ]
