"""Steps whose accesses are counted: weights are read once, shared memory without conflicts."""

from __future__ import annotations

from typing import Any

import torch

from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.report import Options
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference

V, D = 2048, 512
STEPS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain, B = 1": (1, {}, {}),
    "plain, B = 16": (16, {}, {}),
    "plain, B = 64": (64, {}, {}),
    "screened, B = 16": (16, {}, {"screening": "int8"}),
    "top_k and top_p, B = 16": (16, {"top_k": 50, "top_p": 0.9}, {}),
}
"""Rows, parameters of their requests, and options of the sampler."""


def counted_step(gpu: EmulatedGpu, name: str) -> list[str]:
    """Take a step of bf16 weights [V, D], and return what is wrong with it.

    A token, a weight that was not read once, or more prefetched than there is. On sm_80 and sm_90
    also a shared access of a plain step that took more cycles than it must.
    """
    rows, params, options = STEPS[name]
    generator = torch.Generator().manual_seed(rows)
    weight, hidden = (torch.randn(size, D, generator=generator).bfloat16() for size in (V, rows))
    sampler = LMHeadSampler(weight, backend="triton", max_rows=64, **options)
    requests = [SamplingParams(seed=row, **params) for row in range(rows)]
    batch = SamplingBatch.from_params(requests, vocab_size=V)
    gpu.options, before = Options(count=True), gpu.report.prefetched
    out = sampler(hidden, batch, torch.arange(rows))
    wanted = reference.sample(reference.logits(hidden, weight), batch, torch.arange(rows))
    report, prefetched = gpu.report, gpu.report.prefetched - before
    cycles = {f"{kernel}, {op}": n.tolist() for (kernel, op), n in report.conflicts.items()}
    conflicts = {of: (parts, took) for of, (parts, took) in cycles.items() if took > parts}
    read = report.reads["lm_head_kernel", "weight_ptr"]
    found = {
        "wrong tokens": (out.token_ids != wanted.token_ids).any(),
        f"{prefetched} bytes are prefetched": prefetched > weight.nbytes,
        f"weights are read {read} times": not options and read != (1, 1),
        f"conflicts of banks {conflicts}": gpu.arch <= 90
        and name.startswith("plain")
        and conflicts,
    }
    return [f"{name}: {what}" for what, is_so in found.items() if is_so]
