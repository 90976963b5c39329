"""Steps counted by kernel: instructions per logit, bytes of each tensor, vector widths, banks.

Counts are of PTX. The assembler joins some instructions, such as two xor, and splits others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.compiled.emulator.gpu import EmulatedGpu
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
KINDS = {
    "matrix": ("mma", "wgmma", "tcgen05", "ldmatrix", "stmatrix"),
    "transcendental": ("lg2", "ex2", "sqrt", "div"),
    "wide product": ("mul.wide", "mad.wide"),
    "fp64": ("fma.rn.f64", "add.rn.f64", "add.f64", "mul.rn.f64", "mul.f64", "sub.f64"),
    "fp32": ("fma", "add.rn", "mul.rn", "sub.rn", "abs.f", "max.f", "max.NaN"),
    "logic": ("xor", "and.b", "or.b", "not.b", "shl", "shr", "bfe", "prmt"),
    "compare, select": ("setp", "selp", "and.pred", "or.pred", "not.pred"),
    "integer": ("add.", "sub.", "mul.lo", "mad.lo", "min.", "max."),
    "global": ("ld.global", "ld.volatile.global", "st.global", "atom", "cp.async"),
    "shared": ("ld.shared", "st.shared"),
    "warp": ("shfl", "redux", "bar", "mbarrier", "elect"),
    "moves": ("mov", "ld.param", "cvt"),
}


def _kind_of(opcode: str) -> str:
    return next((kind for kind, begins in KINDS.items() if opcode.startswith(begins)), "other")


def counted_step(gpu: EmulatedGpu, name: str) -> dict[str, Any]:
    """Take a step of bf16 weights [V, D], and return what its kernels did.

    Raises:
        AssertionError: a token is wrong, a weight was not read once, more was prefetched than there
            is, or on sm_80 and sm_90 a shared access of a plain step took more cycles than it must.
    """
    rows, params, options = STEPS[name]
    generator = torch.Generator().manual_seed(rows)
    weight, hidden = (torch.randn(size, D, generator=generator).bfloat16() for size in (V, rows))
    sampler = LMHeadSampler(weight, backend="triton", max_rows=64, **options)
    requests = [SamplingParams(seed=row, **params) for row in range(rows)]
    batch = SamplingBatch.from_params(requests, vocab_size=V)
    gpu.reset(count=True)
    out = sampler(hidden, batch, torch.arange(rows))
    wanted = reference.sample(reference.logits(hidden, weight), batch, torch.arange(rows))
    assert (out.token_ids == wanted.token_ids).all()
    report, logits = gpu.report, V * max(16, 1 << (rows - 1).bit_length())
    kinds: dict[str, Counter[str]] = {}
    for (kernel, opcode), times in report.executed.items():
        kinds.setdefault(kernel, Counter())[_kind_of(opcode)] += times
    accesses = sorted(report.accesses.items())
    asked = sum(int(n[1]) for (_, opcode, _), n in accesses if "prefetch" in opcode)
    assert asked <= weight.nbytes, f"{asked} bytes are prefetched of {weight.nbytes}"
    if not options:
        assert report.reads["lm_head_kernel", "weight_ptr"] == (1, 1), report.reads
    cycles = {f"{kernel}, {op}": n.tolist() for (kernel, op), n in report.conflicts.items()}
    conflicts = {of: (parts, took) for of, (parts, took) in cycles.items() if took > parts}
    assert gpu.arch > 90 or not name.startswith("plain") or not conflicts, conflicts
    return {
        "step": name,
        "per_logit": {
            kernel: {kind: times / logits for kind, times in own.most_common()}
            for kernel, own in kinds.items()
        },
        "reads": {
            tensor: most
            for (_, tensor), most in report.reads.items()
            if tensor in ("weight_ptr", "copy_ptr")
        },
        "accesses": [
            (
                f"{kernel}, {opcode}",
                tensor,
                int(num_bytes),
                int(num_bytes // threads),
                round(32 * int(sectors) / int(num_bytes), 2),
            )
            for (kernel, opcode, tensor), (threads, num_bytes, sectors) in accesses
        ],
        "conflicts": conflicts,
    }
