"""The table that `tpsample generate` ends with, as (name, value)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpsample.agreement.dtensor import is_dtensor
from tpsample.cli.decode import Decoded
from tpsample.cli.model import Model
from tpsample.cli.report import size, started
from tpsample.distributed import Job
from tpsample.sampler import LMHeadSampler


def lines(
    lm: Model, sampler: LMHeadSampler, decoded: Decoded, job: Job, *, tensor_parallel: bool
) -> list[tuple[str, str]]:
    """Return what was generated, how fast, on what, and what travelled. Collective."""
    rows, others = len(decoded.rows), job.world_size - 1
    tokens = sum(map(len, decoded.rows))
    device = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    travels = "nothing: one rank"
    if job.world_size > 1:
        # Filtered rows exchange integers beside their words.
        integers = sampler.ranks.bytes_sent // decoded.forwards
        sent = size(sampler.exchange.bytes_sent(rows) + integers)
        gathered = size(others * sampler.vocab_size * 4 * rows / job.world_size)
        travels = f"{sent} of payload sent, instead of {gathered} of gathered logits"
    trunk = split(lm.trunk, [step.hidden_states for step in decoded.steps], job)
    if tensor_parallel and job.world_size == 1:
        trunk = [("trunk", "whole: one rank has nothing to split")]
    return [
        ("model", f"{lm.name}, vocabulary {sampler.vocab_size}"),
        ("tokens per second", f"{tokens / decoded.seconds:.1f} (all {rows} rows)"),
        ("time", f"{decoded.seconds:.1f} s for {tokens} tokens in {decoded.forwards} steps"),
        ("job", f"{started(job)}, on {device}"),
        ("backend", f"{sampler.backend}, {str(lm.lm_head_weight.dtype).removeprefix('torch.')}"),
        ("exchange", sampler.exchange.name),
        ("bytes per step and rank", travels),
        *trunk,
    ]


def drafts(found: Decoded, plain: Decoded) -> list[tuple[str, str]]:
    """Return what n-gram drafts were worth, beside plain decoding of the same requests."""
    same = sum(ours == theirs for ours, theirs in zip(found.rows, plain.rows, strict=True))
    rate = found.accepted / found.proposed if found.proposed else 0.0
    per_step = (found.accepted + found.row_steps) / found.row_steps
    tokens = sum(map(len, found.rows))
    return [
        ("draft", "ngram"),
        ("accepted", f"{rate:.1%} of {found.proposed} drafts"),
        ("tokens per target step", f"{per_step:.2f} (per row that had not ended)"),
        ("target steps", f"{found.forwards}, instead of {plain.forwards}"),
        ("time", f"{found.seconds:.1f} s for {tokens} tokens, {plain.seconds:.1f} s plainly"),
        ("same text as plain decoding", f"{same} of {len(found.rows)} rows"),
    ]


def split(
    module: torch.nn.Module, hidden_states: Sequence[Tensor], job: Job
) -> list[tuple[str, str]]:
    """Return what a split trunk did, as (name, value), and nothing if it is whole. Collective.

    Args:
        hidden_states: of every step; the ranks compare theirs, whose bits must be the same.
    """
    parameters: list[Any] = list(module.parameters())
    if not any(map(is_dtensor, parameters)):
        return []
    total = sum(each.numel() * each.element_size() for each in parameters)
    local = [each.to_local() if is_dtensor(each) else each for each in parameters]
    own = sum(each.numel() * each.element_size() for each in local)
    steps = [each.contiguous().view(torch.uint8).cpu() for each in hidden_states]
    found = job.gather([zlib.crc32(each.numpy().tobytes()) for each in steps])
    apart = sum(len(set(step)) > 1 for step in zip(*found, strict=True))
    bits = f"DIFFER BETWEEN RANKS in {apart} of" if apart else "the same bits on every rank in all"
    return [
        ("trunk", f"tensor-parallel, {size(own)} of its {size(total)} on rank 0"),
        ("hidden states", f"{bits} {len(hidden_states)} steps"),
    ]
