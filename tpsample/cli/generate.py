"""`tpsample generate` runs a language model and samples in its tensor-parallel LM head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from tpsample.cli import answers, generation, report, requests
from tpsample.cli import trace as trace_file
from tpsample.cli.decode import NoToken
from tpsample.cli.drafters import Drafting
from tpsample.cli.extras import how_to_install
from tpsample.distributed import Job, LaunchError, join
from tpsample.errors import PeerLost

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
    raw: answers.Raw = False,
    num_samples: answers.NumSamples = 1,
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
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep what is this likely beside the top.")] = 0.0,
    repetition_penalty: requests.RepetitionPenalty = 1.0,
    presence_penalty: requests.PresencePenalty = 0.0,
    frequency_penalty: requests.FrequencyPenalty = 0.0,
    logit_bias: requests.LogitBias = None,
    allow_token: requests.AllowToken = None,
    bad_word: requests.BadWord = None,
    min_tokens: requests.MinTokens = 0,
    params_file: requests.ParamsFile = None,
    stream: answers.Stream = False,
    no_check: answers.NoCheck = False,
    record: answers.RecordFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write each step's top logprobs and entropy to FILE.safetensors; plot."),
    ] = None,
    trace_top: Annotated[int, typer.Option(min=1, help="Tokens per step in the trace.")] = 20,
    draft: Annotated[
        Literal["ngram", "early-exit"] | None,
        typer.Option(help="Draft tokens and verify them; the text stays that of plain decoding."),
    ] = None,
    num_drafts: Annotated[int, typer.Option(min=1, help="Tokens drafted per step.")] = 4,
    draft_layers: Annotated[int, typer.Option(help="Layers that early-exit runs.")] = 8,
    exchange: Annotated[
        Literal["auto", "collective", "p2p", "peer", "two_level"],
        typer.Option(help="How words travel."),
    ] = "auto",
    chunks: Annotated[
        int, typer.Option(min=1, help="Parts of the vocabulary, sent while the next computes.")
    ] = 1,
    backend: Annotated[Literal["auto", "torch", "triton"], typer.Option()] = "auto",
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
    exit status 1 if a single token differs. With --draft the prompts are also decoded plainly, and
    the table compares the two.
    """
    try:
        if trace is not None:
            trace_file.check_path(trace)
        if record is not None:
            answers.check_record_path(record)
        asked = requests.asked(
            prompt or PROMPTS,
            temperature or (TEMPERATURES if not prompt else TEMPERATURES[2:3]),
            seed,
            {
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
                "logit_bias": requests.bias_of(logit_bias),
                "allowed_token_ids": allow_token or None,
                "bad_words": bad_word or (),
                "min_tokens": min_tokens,
            },
            params_file=params_file,
            num_samples=num_samples,
        )
        if stream and (len(asked) > 1 or draft):
            raise ValueError("stream: expected one answer, decoded without drafts")
        with join(timeout_s=timeout) as job:
            ok = generation.run(
                job,
                asked,
                model=model,
                tensor_parallel=tp,
                max_new_tokens=max_new_tokens,
                dtype=_dtype(dtype, job),
                raw=raw,
                stream=stream,
                checked=not no_check,
                record_path=record,
                trace_path=trace,
                trace_top=trace_top,
                drafting=Drafting(draft, num_drafts, draft_layers) if draft else None,
                options={
                    "exchange": exchange,
                    "chunks": chunks,
                    "backend": backend,
                    "screening": None if screening == "none" else screening,
                },
            )
    except ModuleNotFoundError as missing:
        report.error(f"{missing}: {how_to_install()}")
        raise typer.Exit(1) from missing
    except (LaunchError, NoToken, PeerLost, ValueError) as wrong:
        report.error(str(wrong))
        raise typer.Exit(1) from wrong
    if not ok:
        raise typer.Exit(1)


def _dtype(name: str, job: Job) -> torch.dtype:
    if name == "auto":
        name = "float32" if job.device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
