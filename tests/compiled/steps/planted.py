"""Planted defects: of compiled texts, of launches, of the emulator. Each must be noticed, and how.

Defects of the package's source are in `tests/faults/compiled.py`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch

from tests.compiled.emulator import arithmetic
from tests.compiled.emulator.approximations import Approximations
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.machine import Machine
from tests.compiled.emulator.report import Fault, Options, Report
from tests.compiled.steps import tiny_kernels
from tests.compiled.steps.plain_steps import plain_step
from tests.compiled.steps.pushed_steps import WRONG, pushed
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference

Step: TypeAlias = Callable[[EmulatedGpu], str]
"""A function that runs with a defect; returns "", or what is wrong."""


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


def logarithms(gpu: EmulatedGpu) -> str:
    return _told(tiny_kernels.approximations, gpu)


def sums(gpu: EmulatedGpu) -> str:
    return _told(tiny_kernels.arithmetic)


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
        told: a pattern that the fault, the doubt or the wrong result must match.
        within: a context that has the defect.
        archs: none for all.
    """

    name: str
    step: Step
    told: str
    within: Callable[[EmulatedGpu], AbstractContextManager[Any]]
    archs: tuple[int, ...] = ()

    def fits(self, gpu: EmulatedGpu) -> bool:
        return gpu.arch in (self.archs or (gpu.arch,))


_TEXTS = r"""
plain | a kernel without barriers | race | bar\.sync\s+0; |
plain | copies are not waited for | nobody wrote | cp\.async\.wait_group\s+\d+; |
plain | too few copies waited for | nobody wrote|race | (cp\.async\.wait_group)\s+[1-9]; | \1 9;
plain 90 | products are not waited for | wrong | wgmma\.wait_group\.sync\.aligned\s+\d+; |
plain 90 100 | no fence before products | asynchronous proxy | fence\.proxy\.async[^;]*; |
plain 100 | sums are not waited for | wrong | mbarrier\.try_wait\S+ (\w+),[^;]*; | mov.pred \1, -1;
plain 100 | loads of sums are not waited for | wrong | tcgen05\.wait::ld[^;]*; |
plain 100 | the other phase is waited for | wrong | (try_wait[^;]*), %r\d+; | \1, 1;
plain 100 | tensor memory is kept | not given back | @%p\d+ tcgen05\.dealloc[^;]*; |
plain 100 | tensor memory of others | others | (tcgen05\.alloc[^;]*), \d+; | \1, 32;
plain | a swizzle | wrong|wrote|race|shared | xor\.b32(\s+%r\d+, %r\d+, )(\d+); | or.b32\1\2;
plain | a load without its mask | behind | @%p\d+ (ld\.global\.b32[^;]*;) | \1
plain | rows past the edge | behind | \tmin\.s32(\s+%r\d+), (%r\d+), %r\d+; | mov.b32\1, \2;
plain | the noise takes its tail elsewhere | wrong | 0f3E800000; | 0f3F000000;
plain | Philox multiplies signed numbers | wrong | mul\.wide\.u32 | mul.wide.s32
plain | a lane takes another's maximum | wrong | (shfl\.sync\.bfly[^;]*), (?:16|8), 31 | \1, 2, 31
decoded | subnormal numbers are flushed | wrong | fma\.rn\.f32 | fma.rn.ftz.f32
decoded 90 100 | a launch does not wait | before it waits | griddepcontrol\.wait; |
pushed | an arrival releases nothing | wrong | gpu\.acq_rel\.add | gpu.relaxed.add
pushed | no barrier before arrivals | wrong | bar\.sync\s+0;((?:(?!bar\.sync).)*?acq_rel) | \1
pushed | maxima of one program alone | scope .cta | gpu\.relaxed\.max\.s64 | cta.relaxed.max.s64
pushed | a push that may stay in a cache | pushes by | st\.global\.wt | st.global
pushed | the epoch is a bit off | wrong | shl\.b64(\s+%rd\d+, %rd\d+, )52; | shl.b64\g<1>53;
"""
"""Defects of texts: step and architectures, name, how it is told, pattern, replacement."""
_ARGUMENTS = """
plain | a shard begins four ids later | wrong|before | vocab_start | 4
plain | a shard ends one id later | wrong|behind | vocab_stop | 1
plain | a row's stride is two bytes off | no multiple|behind|wrong | stride_weight_v | 1
pushed | a rank is taken for the one before | wrong|before | rank | -1
"""
"""Defects of launches: step, name, how it is told, an argument, and what is added to it."""


def _eight_ulp(self: Approximations, x: np.ndarray) -> np.ndarray:
    found = np.log2(np.asarray(x, np.float64)).astype(np.float32)
    return found + 8 * np.spacing(np.maximum(np.abs(found), np.float32(1)))


def _truncated(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


_EMULATOR: tuple[tuple[str, Step, str, Any, str, Callable[..., Any]], ...] = (
    ("a logarithm is 8 ulp off", logarithms, "its bound", Approximations, "lg2", _eight_ulp),
    ("bf16 is truncated", sums, WRONG, arithmetic, "to_bfloat", _truncated),
    ("barriers hold nobody", plain, "race", Machine, "arrive", lambda self, where, *_: where),
    ("lanes keep their own", plain, WRONG, Machine, "shuffle", lambda self, at, _, a, *b: a[at]),
    ("work is in no group", plain, "nobody wrote|wrong", Machine, "commit", lambda *_: None),
)
"""Defects of the emulator: name, step, how it is told, and what takes the place of a method."""


def _edited(gpu: EmulatedGpu, old: str, new: str) -> AbstractContextManager[Any]:
    kernel = "decode_kernel" if "griddepcontrol" in old else "lm_head_kernel"

    def edit(text: str) -> str:
        is_its = f".entry {kernel}(" in text
        return re.sub(old, new, text, flags=re.DOTALL) if is_its else text

    return patch.object(gpu, "edit", edit)


def _changed(gpu: EmulatedGpu, old: str, new: int) -> AbstractContextManager[Any]:
    return patch.object(gpu, "change", lambda name, value: value + new * (name == old))


def _plants(table: str, within: Callable[..., Any], last: Callable[[str], Any]) -> list[Plant]:
    steps: dict[str, Step] = {"plain": plain, "decoded": decoded, "pushed": pushed}
    found = []
    for line in table.strip().splitlines():
        where, name, told, old, new = f"{line} ".split(" | ")
        step, *archs = where.split()
        context = partial(within, old=old, new=last(new))
        found.append(Plant(name, steps[step], told, context, tuple(map(int, archs))))
    return found


PLANTS = (
    *_plants(_TEXTS, _edited, str.strip),
    *_plants(_ARGUMENTS, _changed, int),
    *(
        Plant(f"emulator: {name}", step, told, lambda gpu, of=of: patch.object(*of))
        for name, step, told, *of in _EMULATOR
    ),
)


def noticed(gpu: EmulatedGpu, step: Step, within: AbstractContextManager[Any]) -> str:
    """Return what a step says with a defect, or without one."""
    gpu.report = Report()
    gpu.options = Options(weak=step is pushed, order=2 if step is pushed else None)
    with within:
        try:
            found = step(gpu)
        except Fault as fault:
            found = str(fault)
    return "; ".join([*([found] if found else []), *gpu.report.doubts])


def check_planted(gpu: EmulatedGpu, plants: Sequence[Plant]) -> list[tuple[str, str]]:
    """Return the name of each defect that goes unnoticed, or is noticed by something else.

    Prints how each was noticed.
    """
    wrong = []
    for step in dict.fromkeys(plant.step for plant in plants):
        if found := noticed(gpu, step, contextlib.nullcontext()):
            wrong.append(("no defect", found))
    for plant in plants:
        found = noticed(gpu, plant.step, plant.within(gpu))
        print(f"planted, {plant.name}: {found[:140] or 'NOT NOTICED'}", file=sys.stderr, flush=True)
        if not re.search(plant.told, found):
            wrong.append((plant.name, found))
    return wrong
