"""A plain step counted: instructions per logit, bytes of each tensor, vector widths, banks.

Counts are of PTX. The assembler joins some instructions, such as two xor, and splits others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.compiled.emulator.gpu import EmulatedGpu
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference

V, D = 2048, 512
ROWS = (1, 16, 64)
_KINDS = (
    ("matrix", ("mma", "wgmma", "ldmatrix", "stmatrix")),
    ("transcendental", ("lg2", "ex2", "sqrt", "div")),
    ("wide product", ("mul.wide", "mad.wide")),
    ("fp32", ("fma", "add.rn", "mul.rn", "sub.rn", "abs.f", "max.f", "max.NaN")),
    ("logic", ("xor", "and.b", "or.b", "not.b", "shl", "shr", "bfe", "prmt")),
    ("compare, select", ("setp", "selp", "and.pred", "or.pred", "not.pred")),
    ("integer", ("add.", "sub.", "mul.lo", "mad.lo", "min.", "max.")),
    ("global", ("ld.global", "st.global", "atom", "cp.async")),
    ("shared", ("ld.shared", "st.shared")),
    ("warp", ("shfl", "redux", "bar")),
    ("moves", ("mov", "ld.param", "cvt")),
)


def kind_of(opcode: str) -> str:
    return next((kind for kind, begins in _KINDS if opcode.startswith(begins)), "other")


def counted_step(gpu: EmulatedGpu, rows: int) -> dict[str, Any]:
    """Take a plain step of bf16 weights [V, D], and return what its kernels did.

    Raises:
        AssertionError: a token is wrong, a weight was not read exactly once, more was prefetched
            than there is, or an access of shared memory took more cycles than it must.
    """
    generator = torch.Generator().manual_seed(rows)
    weight, hidden = (torch.randn(size, D, generator=generator).bfloat16() for size in (V, rows))
    sampler = LMHeadSampler(weight, backend="triton", max_rows=64)
    batch = SamplingBatch.from_params([SamplingParams(seed=r) for r in range(rows)], vocab_size=V)
    gpu.reset(count=True)
    out = sampler(hidden, batch, torch.arange(rows))
    wanted = reference.sample(reference.logits(hidden, weight), batch, torch.arange(rows))
    assert (out.token_ids == wanted.token_ids).all()
    report, logits = gpu.report, V * max(16, 1 << (rows - 1).bit_length())
    kinds: Counter[str] = Counter()
    for opcode, times in report.executed.items():
        kinds[kind_of(opcode)] += times
    asked = sum(int(n[1]) for (op, of), n in report.accesses.items() if "prefetch" in op)
    assert report.reads["lm_head_kernel", "weight_ptr"] == (1, 1), report.reads
    assert asked <= weight.nbytes, f"{asked} bytes are prefetched of {weight.nbytes}"
    parts, cycles = sum(report.conflicts.values())
    assert parts == cycles, f"bank conflicts: {cycles} cycles for {parts} accesses"
    return {
        "rows": rows,
        "per_logit": {kind: times / logits for kind, times in kinds.most_common()},
        "accesses": [
            {
                "opcode": opcode,
                "tensor": tensor,
                "bytes": int(num_bytes),
                "bytes_per_thread": int(num_bytes // threads),
                "sector_bytes_per_byte": 32 * int(sectors) / int(num_bytes),
            }
            for (opcode, tensor), (threads, num_bytes, sectors) in sorted(report.accesses.items())
        ],
        "shared_cycles": cycles / parts,
    }
