"""One run of `tpsample generate`: load a model, decode with it, check the tokens, report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tpsample.agreement.dtensor import is_dtensor
from tpsample.cli import answers, report
from tpsample.cli import tensor_parallel as split
from tpsample.cli import trace as trace_file
from tpsample.cli.check import check
from tpsample.cli.decode import Sampler, decode
from tpsample.cli.drafters import Drafting
from tpsample.cli.model import Model, load
from tpsample.cli.requests import Request
from tpsample.cli.speculate import Speculated, decode_with_drafts
from tpsample.cli.summary import summary
from tpsample.core.vocab_shard import VocabShard
from tpsample.distributed import Job
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler
from tpsample.trace import TopKTrace


def run(
    job: Job,
    asked: list[Request],
    *,
    model: str | None,
    tensor_parallel: bool,
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
        lm = load(model, job, dtype, tensor_parallel=tensor_parallel)
        rows = len(asked) * (1 + (drafting.num_drafts if drafting else 0))
        sampler = shard_sampler(lm, job, rows=rows, options=options)
        params = [each.complete(lm.tokenizer, lm.eos_token_ids) for each in asked]
        prompts = [lm.prompt_token_ids(each.prompt, raw=raw) for each in asked]
        traced, trace = params, None
        if trace_path is not None:
            k = min(trace_top, sampler.vocab_size)
            trace = TopKTrace(len(prompts), max_new_tokens, k, device=job.device)
            traced = [replace(each, logprobs=k) for each in params]
        loaded()
        ends = answers.ends_of(lm, asked)
        plain = decoded = decode(
            lm,
            prompts,
            _step(sampler, _batch(traced, prompts, sampler), trace),
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
    lines = summary(lm, sampler, plain, job)
    lines += split.lines(lm.trunk, [step.hidden_states for step in plain.steps], job)
    if tensor_parallel and job.world_size == 1:
        lines.append(("trunk", "whole: one rank has nothing to split"))
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


def _step(sampler: LMHeadSampler, batch: SamplingBatch, trace: TopKTrace | None) -> Sampler:
    """Sample, let the batch count what was drawn, and record it if there is a trace."""

    def step(hidden_states: Tensor, positions: Tensor) -> SampleOutput:
        out = sampler(hidden_states, batch, positions)
        batch.append(out.token_ids)
        if trace is not None:
            trace.record(out.logprobs)
        return out

    return step


def shard_sampler(lm: Model, job: Job, *, rows: int, options: dict[str, object]) -> LMHeadSampler:
    """Return a sampler over this rank's rows of the LM head."""
    weight, bias, shard = lm.lm_head_weight, lm.lm_head_bias, None
    vocab_size = weight.shape[0]
    if not is_dtensor(weight):  # which brings its shard
        shard = VocabShard.even(vocab_size, job.rank, job.world_size)
        own = slice(shard.start, shard.stop)
        weight, bias = weight[own], None if bias is None else bias[own]
    return LMHeadSampler(
        weight,
        vocab_size=vocab_size,
        shard=shard,
        bias=bias,
        max_rows=rows,
        **lm.head,
        **options,  # type: ignore[arg-type]
    )
