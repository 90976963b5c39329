"""Planted defects: of compiled texts, of launches, of the emulator. Each must be noticed, and how.

Defects of the package's source are in `tests/faults/compiled.py`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
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


def _logarithms(gpu: EmulatedGpu) -> str:
    return _told(tiny_kernels.approximations, gpu)


def _tiny(name: str) -> Callable[[EmulatedGpu], str]:
    return lambda gpu: _told(getattr(tiny_kernels, name))


def _told(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except AssertionError as error:
        return f"{WRONG}: {str(error).strip().partition(chr(10))[0]}"
    return ""


@dataclass(frozen=True)
class Plant:
    """A defect.

    Attributes:
        step: a function that runs with it; returns "", or what is wrong.
        told: a pattern that the fault, the doubt or the wrong result must match.
        old, new: a pattern in the texts of the step's kernel, and its replacement.
        change: an argument's name and a number that is added to it.
        within: a defect of the emulator.
        arch: 0 for every architecture.
    """

    name: str
    step: Callable[[EmulatedGpu], str]
    told: str
    old: str = ""
    new: str = ""
    change: tuple[str, int] | None = None
    within: Callable[[], AbstractContextManager[Any]] | None = None
    arch: int = 0


_TEXTS = r"""
plain | a kernel without barriers | race | bar\.sync\s+0; |
plain | copies are not waited for | nobody wrote | cp\.async\.wait_group\s+\d+; |
plain | too few copies waited for | nobody wrote|race | (cp\.async\.wait_group)\s+[1-9]; | \1 9;
plain 90 | products are not waited for | wrong | wgmma\.wait_group\.sync\.aligned\s+\d+; |
plain 90 | no fence before products | asynchronous proxy | fence\.proxy\.async[^;]*; |
plain | a swizzle | wrong|wrote|race|shared | xor\.b32(\s+%r\d+, %r\d+, )(\d+); | or.b32\1\2;
plain | a load without its mask | behind | @%p\d+ (ld\.global\.b32[^;]*;) | \1
plain | rows past the edge | behind|before | min\.s32(\s+%r\d+), (%r\d+), %r\d+; | mov.b32\1, \2;
plain | the noise takes its tail elsewhere | wrong | 0f3E800000; | 0f3F000000;
plain | Philox multiplies signed numbers | wrong | mul\.wide\.u32 | mul.wide.s32
plain | a lane takes another's maximum | wrong | (shfl\.sync\.bfly\.b32[^;]*), 16, 31 | \1, 2, 31
decoded | subnormal numbers are flushed | wrong | fma\.rn\.f32 | fma.rn.ftz.f32
decoded 90 | a launch does not wait | before it waits | griddepcontrol\.wait; |
pushed | an arrival releases nothing | wrong | gpu\.acq_rel\.add | gpu.relaxed.add
pushed | no barrier before arrivals | wrong | bar\.sync\s+0;((?:(?!bar\.sync).)*?acq_rel) | \1
pushed | maxima of one program alone | scope .cta | gpu\.relaxed\.max\.s64 | cta.relaxed.max.s64
pushed | a push that may stay in a cache | pushes by | st\.global\.wt | st.global
pushed | the epoch is a bit off | wrong | shl\.b64(\s+%rd\d+, %rd\d+, )52; | shl.b64\g<1>53;
"""
"""Defects of texts: step and architecture, name, how it is told, pattern, replacement."""


def _own_register(self: Machine, where: Any, mode: str, register: np.ndarray, *_: Any) -> Any:
    return register[where]


def _eight_ulp(self: Approximations, x: np.ndarray, flush: bool) -> np.ndarray:
    found = np.log2(np.asarray(x, np.float64)).astype(np.float32)
    return found + 8 * np.spacing(np.maximum(np.abs(found), np.float32(1)))


def _truncated(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _plants() -> Iterator[Plant]:
    steps: dict[str, Callable[[EmulatedGpu], str]] = {
        "plain": plain, "decoded": decoded, "pushed": pushed,
    }  # fmt: skip
    for line in _TEXTS.strip().splitlines():
        where, name, told, old, new = f"{line} ".split(" | ")
        step, _, arch = where.partition(" ")
        yield Plant(name, steps[step], told, old, new.strip(), arch=int(arch or 0))
    for name, told, argument, more in (
        ("a shard begins four ids later", "wrong|before", "vocab_start", 4),
        ("a shard ends one id later", "wrong|behind", "vocab_stop", 1),
        ("a row's stride is two bytes off", "no multiple|behind|wrong", "stride_weight_v", 1),
    ):
        yield Plant(name, plain, told, change=(argument, more))
    yield Plant("a rank is taken for the one before", pushed, "wrong|before", change=("rank", -1))
    for name, step, told, of, attribute, new in (
        (
            "a logarithm is 8 ulp off",
            _logarithms,
            "times its bound",
            Approximations,
            "lg2",
            _eight_ulp,
        ),
        ("bf16 is truncated", _tiny("arithmetic"), WRONG, arithmetic, "to_bfloat", _truncated),
        ("barriers hold nobody", plain, "race", Machine, "arrive", lambda self, where, *_: where),
        ("lanes keep their own", _tiny("reductions"), WRONG, Machine, "shuffle", _own_register),
        ("copies are in no group", _tiny("dots"), WRONG, Machine, "commit_copies", lambda *_: None),
    ):
        yield Plant(
            f"emulator: {name}", step, told, within=partial(patch.object, of, attribute, new)
        )


PLANTS = tuple(_plants())


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
    kernel = "decode_kernel" if "griddepcontrol" in plant.old else "lm_head_kernel"
    if f".entry {kernel}(" not in text:
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
