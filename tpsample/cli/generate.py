"""`tpsample generate`: a language model, sampled through a tensor-parallel fused LM head."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer

from tpsample.batch import SamplingBatch
from tpsample.cli import report
from tpsample.cli.check import check
from tpsample.cli.decode import Decoded, decode
from tpsample.cli.model import Model, load
from tpsample.distributed import Job, LaunchError, join
from tpsample.errors import PeerLost
from tpsample.params import SamplingParams
from tpsample.sampler import LMHeadSampler
from tpsample.vocab_shard import VocabShard

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
        list[str] | None,
        typer.Option(help="What to ask; repeat for a batch. One alone is asked per temperature."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id. Default: the bundled SmolLM2-135M-Instruct."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Per prompt.")] = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="0 is greedy; repeat to go through them row by row.  [0 0.5 0.7 0.8 1]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Row i draws with seed + i.")] = 0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep what is this likely beside the top.")] = 0.0,
    exchange: Annotated[
        Literal["auto", "collective", "p2p", "peer", "two_level"],
        typer.Option(help="How words travel."),
    ] = "auto",
    chunks: Annotated[
        int, typer.Option(min=1, help="Parts of the vocabulary, sent while the next computes.")
    ] = 1,
    backend: Annotated[Literal["auto", "torch", "triton"], typer.Option()] = "auto",
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
    over the full logits; exit status 1 if a single token differs.
    """
    try:
        prompts, params = _batch(
            prompt or list(PROMPTS),
            temperature or list(TEMPERATURES),
            seed,
            {"top_k": top_k, "top_p": top_p, "min_p": min_p},
        )
        with join(timeout_s=timeout) as job:
            ok = _generate(
                job,
                prompts,
                params,
                model=model,
                max_new_tokens=max_new_tokens,
                dtype=_dtype(dtype, job),
                options={"exchange": exchange, "chunks": chunks, "backend": backend},
            )
    except ModuleNotFoundError as missing:
        report.error(f"{missing}: pip install 'tpsample[cli,hf]'")
        raise typer.Exit(1) from missing
    except (LaunchError, PeerLost, ValueError) as wrong:
        report.error(str(wrong))
        raise typer.Exit(1) from wrong
    if not ok:
        raise typer.Exit(1)


def _batch(
    prompts: list[str], temperatures: list[float], seed: int, filters: dict[str, float]
) -> tuple[list[str], list[SamplingParams]]:
    """One prompt and its parameters per row; one prompt alone is repeated per temperature."""
    if len(prompts) == 1:
        prompts = prompts * len(temperatures)
    params = [
        SamplingParams(
            temperature=temperatures[row % len(temperatures)],
            seed=seed + row,
            **filters,  # type: ignore[arg-type]
        )
        for row in range(len(prompts))
    ]
    return prompts, params


def _dtype(name: str, job: Job) -> torch.dtype:
    if name == "auto":
        name = "float32" if job.device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _generate(
    job: Job,
    prompts: list[str],
    params: list[SamplingParams],
    *,
    model: str | None,
    max_new_tokens: int,
    dtype: torch.dtype,
    options: dict[str, object],
) -> bool:
    """Load, decode, check, report; whether the check passed, the same on every rank."""
    shown = report.Report(job.rank)
    with shown.phases() as phase:
        loaded = phase("loading the model", 1)
        lm = load(model, job, dtype)
        sampler = _shard_sampler(lm, job, rows=len(prompts), options=options)
        batch = SamplingBatch.from_params(params, vocab_size=sampler.vocab_size, device=job.device)
        loaded()
        decoded = decode(
            lm,
            [lm.prompt_token_ids(prompt) for prompt in prompts],
            lambda hidden_states, positions: sampler(hidden_states, batch, positions),
            max_new_tokens=max_new_tokens,
            on_step=phase("generating tokens", max_new_tokens),
        )
        sampler.check()
        own_steps = len(decoded.steps[job.rank :: job.world_size])
        verdict = check(
            lm,
            batch,
            decoded.steps,
            job,
            backend=sampler.backend,
            on_step=phase("checking tokens", own_steps),
        )

    for prompt, request, row in zip(prompts, params, decoded.rows, strict=True):
        shown.text(prompt, request, lm.tokenizer.decode(row, skip_special_tokens=True))
    shown.table(_summary(lm, sampler, decoded, job))
    shown.verdict(verdict.line(job.world_size), verdict.ok)
    sampler.close()
    return verdict.ok


def _shard_sampler(lm: Model, job: Job, *, rows: int, options: dict[str, object]) -> LMHeadSampler:
    """A sampler over this rank's rows of the LM head."""
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


def _summary(
    lm: Model, sampler: LMHeadSampler, decoded: Decoded, job: Job
) -> list[tuple[str, str]]:
    rows, others = len(decoded.rows), job.world_size - 1
    tokens = sum(map(len, decoded.rows))
    device = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    # Filtered rows exchange integers beside their words.
    integers = sampler.exchange.integers.bytes_sent // len(decoded.steps)
    sent = sampler.exchange.bytes_sent(rows) + integers
    gathered = others * sampler.vocab_size * 4 * rows / job.world_size
    return [
        ("model", f"{lm.name}, vocabulary {sampler.vocab_size}"),
        ("tokens per second", f"{tokens / decoded.seconds:.1f} (all {rows} rows)"),
        ("time", f"{decoded.seconds:.1f} s for {tokens} tokens in {len(decoded.steps)} steps"),
        ("ranks", f"{job.world_size} on {device} ({job.source})"),
        ("backend", f"{sampler.backend}, {str(lm.lm_head_weight.dtype).removeprefix('torch.')}"),
        ("exchange", sampler.exchange.name),
        (
            "bytes per step and rank",
            f"{report.size(sent)} sent, instead of {report.size(gathered)} of gathered logits",
        ),
    ]
