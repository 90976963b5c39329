"""`tpsample generate` runs a language model and samples in its tensor-parallel LM head."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from tpsample.agreement.arguments import BackendName, ExchangeName
from tpsample.cli import report
from tpsample.cli.answers import decode, record_of
from tpsample.cli.check import check
from tpsample.cli.model import load
from tpsample.cli.requests import requests_of
from tpsample.distributed import Job, join
from tpsample.record.format import MAX_DRAWS, writable_file

PROMPTS = (
    "What is the capital of France?",
    "Write two short sentences about rivers.",
    "Suggest a name for a bakery run by cats.",
    "Why is the sky blue? Answer in one sentence.",
    "Tell me something surprising about octopuses.",
)
TEMPERATURES = (0.0, 0.5, 0.7, 0.8, 1.0)


def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to ask; repeat for a batch.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts, without the chat template.")
    ] = False,
    num_samples: Annotated[int, typer.Option(min=1, max=4096, help="Answers per prompt.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id. Default: the bundled SmolLM2-135M-Instruct."),
    ] = None,
    tp: Annotated[
        bool,
        typer.Option("--tp", help="Split the whole model over the ranks, not the LM head alone."),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Per prompt.")] = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="0 is greedy; repeat to go through them prompt by prompt, or to ask one prompt at "
            "each.  [0.7; without --prompt 0 0.5 0.7 0.8 1]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Row i draws with seed + i.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A field of SamplingParams for every prompt, such as top_k=50, top_p=0.9, "
            "'logit_bias={\"17\": -5}' or 'bad_words=[\"the\"]'; also stop. Repeat.",
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show the text of a single answer as it is written.")
    ] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not sample every token again.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Write what each token was drawn from to FILE, for tpsample verify."),
    ] = None,
    exchange: Annotated[ExchangeName, typer.Option(help="How words travel.")] = "auto",
    chunks: Annotated[int, typer.Option(min=1, help="Parts that words travel in, for p2p.")] = 1,
    backend: Annotated[BackendName, typer.Option(help="What computes.")] = "auto",
    screening: Annotated[
        Literal["none", "int8"],
        typer.Option(help="int8: read an 8-bit copy of the LM head first; the same tokens."),
    ] = "none",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto",
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds a rank waits for another before it gives up.")
    ] = 300,
) -> None:
    """Generate text for a batch of prompts, then check every token.

    Alone, under torchrun or under mpirun: each rank samples from its own rows of the LM head, and
    all get the same tokens. The rest of the model is whole on every rank, or split as well with
    --tp. The check samples every step again with one rank and with the oracle over the full logits;
    exit status 1 if a single token differs.
    """
    with report.errors():
        requests = requests_of(
            prompt or PROMPTS,
            temperature or (TEMPERATURES if not prompt else TEMPERATURES[2:3]),
            seed,
            settings or (),
            num_samples=num_samples,
        )
        if stream and len(requests) > 1:
            raise ValueError(f"stream: expected one answer, got {len(requests)}")
        if record is not None and len(requests) * max_new_tokens > MAX_DRAWS:
            raise ValueError(
                f"record: expected at most {MAX_DRAWS} tokens in a file, got {len(requests)} "
                f"answers of up to {max_new_tokens}; pass fewer by --max-new-tokens"
            )
        with join(timeout_s=timeout) as job:
            _check_record(record, job)
            if dtype == "auto":
                dtype = "float32" if job.device.type == "cpu" else "bfloat16"
            shown = report.Report(job.rank, bars=not stream)
            with shown.phases() as phase:
                loaded = phase("loading the model", 1)
                lm = load(model, job, getattr(torch, dtype), tensor_parallel=tp)
                sampler = lm.lm_head.sampler(
                    rank=job.rank,
                    world_size=job.world_size,
                    max_rows=len(requests),
                    exchange=exchange,
                    chunks=chunks,
                    backend=backend,
                    screening=None if screening == "none" else screening,
                )
                loaded()
                rows = [request.row(lm, raw=raw) for request in requests]
                room = lm.positions - max(len(row.prompt) for row in rows) + 1
                if max_new_tokens > room:  # transformers would go on, and the text would fall apart
                    raise ValueError(
                        f"max-new-tokens: expected at most {room}, because {lm.name} has "
                        f"{lm.positions} positions and the longest prompt takes some, got "
                        f"{max_new_tokens}"
                    )
                advance = phase("generating tokens", max_new_tokens)
                if stream:
                    advance = partial(shown.write, rows[0].text)
                decoded = decode(lm, rows, sampler, max_new_tokens, on_step=advance)
                sampler.check()
                line, ok = "tokens were not checked (--no-check)", True
                if not no_check:
                    drawn = record_of(lm, rows)
                    advance = phase("checking tokens", -(-len(drawn.params) // job.world_size))
                    line, ok = check(lm, drawn, job, sampler.backend, advance)

            if not stream:
                for request, row in zip(requests, rows, strict=True):
                    shown.text(request.prompt, row.params, row.text())
            lines = report.lines(lm, sampler, decoded, job, tensor_parallel=tp)
            if record is not None and job.rank == 0:
                drawn = record_of(lm, rows)
                drawn.save(record)
                note = f"{record}, {len(drawn.params)} tokens: tpsample verify {record}"
                lines.append(("record", note))
            shown.table(lines)
            shown.verdict(line, ok)
            sampler.close()
    if not ok:
        raise typer.Exit(1)


def _check_record(record: Path | None, job: Job) -> None:
    """Let every rank raise where rank 0, which alone writes, cannot write its file. Collective."""
    refusal = None
    if record is not None and job.rank == 0:
        try:
            writable_file("record", record)
        except ValueError as wrong:
            refusal = str(wrong)
    if refusal := job.gather(refusal)[0]:
        raise ValueError(refusal)
