"""`tpsample generate` runs a language model and samples in its tensor-parallel LM head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor

from tpsample.cli import answers, report, requests
from tpsample.cli import trace as trace_file
from tpsample.cli.check import check
from tpsample.cli.decode import NoToken, Sampler, decode
from tpsample.cli.drafters import Drafting
from tpsample.cli.extras import how_to_install
from tpsample.cli.model import Model, load
from tpsample.cli.requests import Request
from tpsample.cli.screening import ScreenedSteps
from tpsample.cli.speculate import Speculated, decode_with_drafts
from tpsample.cli.summary import summary
from tpsample.core.vocab_shard import VocabShard
from tpsample.distributed import Job, LaunchError, join
from tpsample.errors import PeerLost
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler
from tpsample.trace import TopKTrace

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
    all get the same tokens. The check samples every step again with one rank and with the oracle
    over the full logits; exit status 1 if a single token differs. With --draft the prompts are also
    decoded plainly, and the table compares the two.
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
            ok = run(
                job,
                asked,
                model=model,
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
                    "count_screened": True,
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


def run(
    job: Job,
    asked: list[Request],
    *,
    model: str | None,
    max_new_tokens: int,
    dtype: torch.dtype,
    raw: bool,
    stream: bool,
    checked: bool,
    record_path: Path | None,
    trace_path: Path | None,
    trace_top: int,
    drafting: Drafting | None,
    options: dict[str, object],
) -> bool:
    """Load, decode, check and report. Return whether no check failed, on every rank the same."""
    shown = report.Report(job.rank, bars=not stream)
    with shown.phases() as phase:
        loaded = phase("loading the model", 1)
        lm = load(model, job, dtype)
        rows = len(asked) * (1 + (drafting.num_drafts if drafting else 0))
        sampler = shard_sampler(lm, job, rows=rows, options=options)
        params = [each.complete(lm.tokenizer, lm.eos_token_ids) for each in asked]
        prompts = [lm.prompt_token_ids(each.prompt, raw=raw) for each in asked]
        traced, trace, screened = params, None, ScreenedSteps()
        if trace_path is not None:
            k = min(trace_top, sampler.vocab_size)
            trace = TopKTrace(len(prompts), max_new_tokens, k, device=job.device)
            traced = [replace(each, logprobs=k) for each in params]
        loaded()
        ends = answers.ends_of(lm, asked)
        plain = decoded = decode(
            lm,
            prompts,
            _step(sampler, _batch(traced, prompts, sampler), trace, screened),
            max_new_tokens=max_new_tokens,
            on_step=phase("generating tokens", max_new_tokens),
            ends=ends,
            on_rows=answers.streamer(lm, asked[0], shown.piece) if stream else None,
        )
        if drafting is not None:
            batch = _batch(params, prompts, sampler)
            decoded = decode_with_drafts(
                lm,
                prompts,
                sampler,
                batch,
                drafting.drafter(lm, sampler, batch),
                num_drafts=drafting.num_drafts,
                max_new_tokens=max_new_tokens,
                on_token=phase("generating with drafts", max_new_tokens),
                ends=ends,
            )
        sampler.check()
        verdict = None
        if checked:
            verdict = check(
                lm,
                _batch(params, prompts, sampler),
                decoded.steps,
                job,
                backend=sampler.backend,
                on_step=phase("checking tokens", len(decoded.steps[job.rank :: job.world_size])),
            )

    if not stream:
        for each, request, row in zip(asked, params, decoded.rows, strict=True):
            shown.text(each.prompt, request, answers.text_of(lm, each, row))
    lines = [*summary(lm, sampler, plain, job), ("screening, rank 0", screened.line())]
    if trace is not None and trace_path is not None and job.rank == 0:
        texts = [each.prompt for each in asked]
        lines.append(("trace", trace_file.write(trace, trace_path, lm, texts, plain)))
    if record_path is not None and job.rank == 0:
        lines.append(("record", answers.record(record_path, lm, plain, prompts, params)))
    shown.table(lines)
    if drafting is not None and isinstance(decoded, Speculated):
        shown.table(decoded.summary(drafting.name, plain))
    if verdict is None:
        shown.verdict("tokens were not checked (--no-check)", ok=True)
    else:
        shown.verdict(verdict.line(job.world_size), verdict.ok)
    sampler.close()
    return verdict is None or verdict.ok


def _batch(
    params: list[SamplingParams], prompts: list[list[int]], sampler: LMHeadSampler
) -> SamplingBatch:
    """Return the requests before their first token."""
    return SamplingBatch.from_params(
        params,
        vocab_size=sampler.vocab_size,
        device=sampler.weight.device,
        prompt_token_ids=prompts,
    )


def _step(
    sampler: LMHeadSampler, batch: SamplingBatch, trace: TopKTrace | None, screened: ScreenedSteps
) -> Sampler:
    """Sample, let the batch count what was drawn, and record it if there is a trace."""

    def step(hidden_states: Tensor, positions: Tensor) -> SampleOutput:
        out = sampler(hidden_states, batch, positions)
        batch.append(out.token_ids)
        screened.add(out)
        if trace is not None:
            trace.record(out.logprobs)
        return out

    return step


def shard_sampler(lm: Model, job: Job, *, rows: int, options: dict[str, object]) -> LMHeadSampler:
    """Return a sampler over this rank's rows of the LM head."""
    vocab_size = lm.lm_head_weight.shape[0]
    shard = VocabShard.even(vocab_size, job.rank, job.world_size)
    own = slice(shard.start, shard.stop)
    return LMHeadSampler(
        lm.lm_head_weight[own],
        vocab_size=vocab_size,
        shard=shard,
        bias=None if lm.lm_head_bias is None else lm.lm_head_bias[own],
        max_rows=rows,
        **lm.head,
        **options,  # type: ignore[arg-type]
    )
