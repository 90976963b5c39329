"""Planted defects: of compiled texts, of launches, of the emulator. Each must be noticed, and how.

Defects of the package's source are in `tests/faults/compiled.py`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.compiled import tiny_kernels
from tests.compiled.emulator import arithmetic
from tests.compiled.emulator.approximations import Approximations
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.machine import Machine
from tests.compiled.emulator.report import Fault
from tests.compiled.plain_steps import plain_step
from tests.compiled.pushed_steps import WRONG, pushed
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference


def plain(gpu: EmulatedGpu) -> str:
    return WRONG if plain_step(5, dtype=torch.bfloat16).wrong else ""


def decoded(gpu: EmulatedGpu) -> str:
    """Three greedy rows whose logits differ by less than the smallest normal number."""
    weight = torch.arange(300).float()[:, None] * 2.0**-148 * torch.ones(1, 40)
    hidden = torch.ones(3, 40)
    batch = SamplingBatch.from_params([SamplingParams(temperature=0)] * 3, vocab_size=300)
    out = LMHeadSampler(weight, backend="triton", max_rows=3)(hidden, batch, 0)
    expected = reference.sample(reference.logits(hidden, weight), batch, 0)
    return WRONG if (out.token_ids != expected.token_ids).any() else ""


def tiny(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except AssertionError as error:
        return f"{WRONG}: {str(error).strip().partition(chr(10))[0]}"
    return ""


@dataclass(frozen=True)
class Plant:
    """A defect.

    Attributes:
        step: what runs with it; returns "", or what is wrong.
        told: a pattern that the fault, the doubt or the wrong result must match.
        old, new: a pattern in the texts of `kernel`, and its replacement.
        change: an argument's name and what is added to it.
        within: a defect of the emulator.
        arch: 0 for every architecture.
    """

    name: str
    step: Callable[[EmulatedGpu], str]
    told: str
    old: str = ""
    new: str = ""
    kernel: str = "lm_head_kernel"
    change: tuple[str, int] | None = None
    within: Callable[[], AbstractContextManager[Any]] | None = None
    arch: int = 0


def _attribute(of: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(of, name, new)


def _eight_ulp(self: Approximations, x: np.ndarray, flush: bool) -> np.ndarray:
    found = np.log2(np.asarray(x, np.float64)).astype(np.float32)
    return found + 8 * np.spacing(np.maximum(np.abs(found), np.float32(1)))


def _truncated(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


_BARRIER = r"bar\.sync\s+0;"
_UNWRITTEN = "shared memory that nobody wrote"
PLANTS = (
    # Shared memory, asynchronous copies and products.
    Plant("a kernel without barriers", plain, "race", _BARRIER),
    Plant("copies are not waited for", plain, _UNWRITTEN, r"cp\.async\.wait_group\s+\d+;"),
    Plant(
        "a group of copies too few is waited for",
        plain,
        f"{_UNWRITTEN}|race|{WRONG}",
        r"cp\.async\.wait_group\s+[1-9];",
        "cp.async.wait_group 9;",
    ),
    Plant(
        "products are not waited for",
        plain,
        WRONG,
        r"wgmma\.wait_group\.sync\.aligned\s+\d+;",
        arch=90,
    ),
    Plant(
        "no fence before products",
        plain,
        "asynchronous proxy",
        r"fence\.proxy\.async[^;]*;",
        arch=90,
    ),
    Plant(
        "a swizzle",
        plain,
        f"{WRONG}|{_UNWRITTEN}|race|shared",
        r"xor\.b32(\s+%r\d+, %r\d+, )(\d+);",
        r"or.b32\1\2;",
    ),
    # Addresses, masks and shards.
    Plant("a load without its mask", plain, "behind", r"@%p\d+ (ld\.global\.b32[^;]*;)", r"\1"),
    Plant(
        "rows past the edge are read",
        plain,
        "behind|before",
        r"min\.s32(\s+%r\d+), (%r\d+), %r\d+;",
        r"mov.b32\1, \2;",
    ),
    Plant("a shard begins four ids later", plain, f"{WRONG}|before", change=("vocab_start", 4)),
    Plant("a shard ends one id later", plain, f"{WRONG}|behind", change=("vocab_stop", 1)),
    Plant(
        "a row's stride is two bytes off",
        plain,
        "no multiple of|behind|wrong",
        change=("stride_weight_v", 1),
    ),
    # Noise.
    Plant("the noise takes its tail elsewhere", plain, WRONG, "0f3E800000;", "0f3F000000;"),
    Plant("Philox multiplies signed numbers", plain, WRONG, r"mul\.wide\.u32", "mul.wide.s32"),
    Plant(
        "a lane takes another's maximum",
        plain,
        WRONG,
        r"(shfl\.sync\.bfly\.b32[^;]*), 16, 31",
        r"\1, 2, 31",
    ),
    Plant("subnormal numbers are flushed", decoded, WRONG, r"fma\.rn\.f32", "fma.rn.ftz.f32"),
    # Order of memory.
    Plant("an arrival releases nothing", pushed, WRONG, r"gpu\.acq_rel\.add", "gpu.relaxed.add"),
    Plant(
        "no barrier between the maxima and the arrival",
        pushed,
        WRONG,
        r"bar\.sync\s+0;((?:(?!bar\.sync).)*?atom\.global\.gpu\.acq_rel)",
        r"\1",
    ),
    Plant(
        "maxima of one program alone",
        pushed,
        "scope .cta",
        r"gpu\.relaxed\.max\.s64",
        "cta.relaxed.max.s64",
    ),
    Plant("a push that may stay in a cache", pushed, "pushes by", r"st\.global\.wt", "st.global"),
    Plant(
        "the epoch is a bit off",
        pushed,
        WRONG,
        r"shl\.b64(\s+%rd\d+, %rd\d+, )52;",
        r"shl.b64\g<1>53;",
    ),
    Plant("a rank is taken for the one before it", pushed, f"{WRONG}|before", change=("rank", -1)),
    Plant(
        "a launch does not wait for the one before",
        decoded,
        "before it waits",
        r"griddepcontrol\.wait;",
        kernel="decode_kernel",
        arch=90,
    ),
    # The emulator.
    Plant(
        "emulator: a logarithm is 8 ulp off",
        lambda gpu: tiny(tiny_kernels.approximations, gpu),
        "times its bound",
        within=_attribute(Approximations, "lg2", _eight_ulp),
    ),
    Plant(
        "emulator: bf16 is truncated",
        lambda gpu: tiny(tiny_kernels.arithmetic),
        WRONG,
        within=_attribute(arithmetic, "to_bfloat", _truncated),
    ),
    Plant(
        "emulator: barriers hold nobody",
        plain,
        f"race|{WRONG}|{_UNWRITTEN}",
        within=_attribute(Machine, "arrive", lambda self, where, *_: where),
    ),
    Plant(
        "emulator: lanes keep their own",
        lambda gpu: tiny(tiny_kernels.reductions),
        WRONG,
        within=_attribute(Machine, "shuffle", lambda self, where, mode, a, *_: a[where]),
    ),
    Plant(
        "emulator: groups of copies are forgotten",
        lambda gpu: tiny(tiny_kernels.dots),
        f"{WRONG}|{_UNWRITTEN}",
        within=_attribute(Machine, "commit_copies", lambda self, where: None),
    ),
)


def noticed(gpu: EmulatedGpu, plant: Plant | None, step: Callable[[EmulatedGpu], str]) -> str:
    """Return what a step says with a defect, or without one."""
    gpu.reset(weak=step is pushed, order=2 if step is pushed else None)
    with contextlib.ExitStack() as stack:
        if plant is not None and plant.within is not None:
            stack.enter_context(plant.within())
        if plant is not None and plant.old:
            stack.enter_context(patch.object(gpu, "edit", lambda text: _edited(text, plant)))
        if plant is not None and plant.change is not None:
            name, more = plant.change
            change = lambda given, value: value + more * (given == name)  # noqa: E731
            stack.enter_context(patch.object(gpu, "change", change))
        try:
            found = step(gpu)
        except Fault as fault:
            found = str(fault)
    return "; ".join([*([found] if found else []), *gpu.report.doubts])


def _edited(text: str, plant: Plant) -> str:
    if f".entry {plant.kernel}(" not in text:
        return text
    return re.sub(plant.old, plant.new, text, flags=re.DOTALL)


def check_planted(gpu: EmulatedGpu) -> list[tuple[str, str]]:
    """Return the name of each defect that goes unnoticed, or is noticed by something else.

    Prints how each was noticed.
    """
    wrong = []
    plants = [plant for plant in PLANTS if plant.arch in (0, gpu.arch)]
    for step in dict.fromkeys(plant.step for plant in plants):
        if found := noticed(gpu, None, step):
            wrong.append(("no defect", found))
    for plant in plants:
        found = noticed(gpu, plant, plant.step)
        print(f"planted, {plant.name}: {found[:140] or 'NOT NOTICED'}", file=sys.stderr, flush=True)
        if not re.search(plant.told, found):
            wrong.append((plant.name, found))
    return wrong
