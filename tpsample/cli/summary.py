"""The table that `tpsample generate` ends with."""

from __future__ import annotations

import torch

from tpsample.cli import report
from tpsample.cli.decode import Decoded
from tpsample.cli.model import Model
from tpsample.distributed import Job
from tpsample.sampler import LMHeadSampler


def summary(lm: Model, sampler: LMHeadSampler, decoded: Decoded, job: Job) -> list[tuple[str, str]]:
    """Return what was generated, how fast, on what, and what travelled, as (name, value)."""
    rows, others = len(decoded.rows), job.world_size - 1
    tokens = sum(map(len, decoded.rows))
    device = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    travels = "nothing: one rank"
    if job.world_size > 1:
        # Filtered rows exchange integers beside their words.
        integers = sampler.ranks.bytes_sent // len(decoded.steps)
        sent = report.size(sampler.exchange.bytes_sent(rows) + integers)
        gathered = report.size(others * sampler.vocab_size * 4 * rows / job.world_size)
        travels = f"{sent} of payload sent, instead of {gathered} of gathered logits"
    return [
        ("model", f"{lm.name}, vocabulary {sampler.vocab_size}"),
        ("tokens per second", f"{tokens / decoded.seconds:.1f} (all {rows} rows)"),
        ("time", f"{decoded.seconds:.1f} s for {tokens} tokens in {len(decoded.steps)} steps"),
        ("job", f"{report.started(job)}, on {device}"),
        ("backend", f"{sampler.backend}, {str(lm.lm_head_weight.dtype).removeprefix('torch.')}"),
        ("exchange", sampler.exchange.name),
        ("bytes per step and rank", travels),
    ]
