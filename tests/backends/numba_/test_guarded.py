"""No native kernel reads or writes beside the memory that it was given.

Stories of the fuzz run in a process of their own, over tensors between pages of memory that no
process may touch. So an access beside a tensor kills the process:

    guard page | fill … | tensor | guard page        or        guard page | tensor | fill … | guard

The fill is NaN in every floating dtype and -1 in integers. So what is read of it by mistake changes
a result, even where it does not reach the guard page. The long mode also compiles all kernels with
Numba's checks of bounds, which see the kernels' own memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fuzz.heads import ModelHead, OneRank
from tests.fuzz.judge import Tally
from tests.fuzz.requests import THEMES
from tests.fuzz.story import Story
from tests.support.ranks import RankFailed, run_ranks
from tests.support.screening import backends, problem, requests, words
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.backends.numba_.kernels import threads
from tpsample.core.tensors import Scratch

WRITTEN = (0.0, 1e-45, -1.0, 0.7, 20.0, 1e38, 3e38, float("inf"), float("nan"))
THEME = replace(THEMES["mixed"], written=WRITTEN, changes=(1, 2, 3))
VOCABS = (1, 2, 3, 5, 63, 64, 65, 66, 127, 255, 257, 511, 700, 1000)
HIDDEN = (1, 3, 7, 31, 32, 33, 64, 65, 96, 100)
LARGE_HIDDEN = (639, 640, 641, 672, 1300)
"""About as many columns as are multiplied at once."""
STEPS = 10
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE


def guarded(tensor: Tensor, *, at_end: bool = True) -> Tensor:
    """Return a contiguous copy of a tensor that ends, or begins, at a guard page."""
    if not tensor.numel():
        return tensor
    size = tensor.nbytes
    room = -(-size // PAGE) * PAGE
    whole = room + 2 * PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _libc.mmap(None, whole, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value), "no memory"
    for guard in (start, start + PAGE + room):
        assert _libc.mprotect(guard, PAGE, 0) == 0
    ctypes.memset(start + PAGE, 0xFF, room)
    begin = start + PAGE + (room - size if at_end else 0)
    memory = (ctypes.c_byte * size).from_address(begin)
    weakref.finalize(memory, _libc.munmap, start, whole)
    with torch.inference_mode(False):
        found = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        return found.copy_(tensor.detach())


def guarded_take(scratch: object, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Twin of `Scratch.take`: every shape of a name has guarded memory of its own."""
    kept = vars(scratch).setdefault("guarded", {})
    if (name, shape) not in kept:
        with torch.inference_mode(False):
            kept[name, shape] = guarded(torch.full(shape, -1, dtype=dtype, device="cpu"))
    return kept[name, shape]


@dataclass(frozen=True)
class GuardedHead(ModelHead):
    """An LM head whose weight, bias, hidden states and given logits are guarded.

    Attributes:
        at_end: whether they end at guard pages; else they begin there.
    """

    at_end: bool = True

    def placed(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return guarded(tensor, at_end=self.at_end)
        rows, columns = tensor.shape[:-1], tensor.shape[-1]
        wide = torch.empty(*rows, columns + 3, dtype=tensor.dtype, device="cpu")
        wide[..., :columns] = tensor.detach()
        return guarded(wide, at_end=self.at_end)[..., :columns]


def guarded_head(pick: random.Random) -> GuardedHead:
    head = ModelHead.make(pick, 1, exact=False)
    v, d = pick.choice(VOCABS), pick.choice(LARGE_HIDDEN if pick.random() < 0.1 else HIDDEN)
    generator = torch.Generator().manual_seed(pick.getrandbits(32))
    weight = torch.randn(v, d, generator=generator) / d**0.5
    if pick.random() < 0.3:
        weight = (4 * weight).round()
    bias = None if head.bias is None else torch.randn(v, generator=generator)
    if bias is not None and pick.random() < 0.3:  # masked: all but a few tokens
        bias[torch.randperm(v, generator=generator)[pick.choice([1, 5, 20]) :]] = -torch.inf
    sized = ModelHead.of_size(v, 1, 1)
    return GuardedHead(
        weight.to(head.weight.dtype),
        bias,
        head.scale,
        head.softcap,
        sized.shards,
        exact=False,
        at_end=pick.random() < 0.7,
    )


class Flushing(OneRank):
    """One rank, on whose thread subnormal numbers are flushed during a step."""

    def run(self, bodies):
        torch.set_flush_denormal(True)
        try:
            return super().run(bodies)
        finally:
            torch.set_flush_denormal(False)


def stories(first_seed: int, num_rows: int) -> Tally:
    """Stories over guarded tensors, on one to three threads, until so many rows are compared."""
    torch.set_num_threads(3)
    tally, seed = Tally(), first_seed
    with (
        patch.object(threads, "THREAD_WORK", 1),
        patch.object(Scratch, "take", guarded_take),
    ):
        while tally.rows < num_rows:
            pick = random.Random(seed)
            torch.set_num_threads(1 + seed % 3)
            kind = Flushing if seed % 2 else OneRank
            ranks = kind(
                0,
                guarded_head(pick),
                pick,
                from_logits=seed % 5 == 4,
                backend="numba",
                group="alone",
                screening=pick.choice([None, None, "int8"]),
                max_rows=48,
            )
            story = Story(pick, ranks.head, ranks, THEME, max_rows=12, name=f"seed {seed}")
            tally += story.run(STEPS)
            seed += 1
    return tally


@pytest.mark.heavy
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("first_seed", "rows"), [(1, 250), *long((1000, 20_000))])
def test_no_kernel_touches_what_is_beside_its_tensors(first_seed, rows):
    (tally,) = run_ranks(1, stories, first_seed, rows, timeout_s=240 + rows)
    tally.require_none_wrong("guarded")


def _widths() -> int:
    """Draw from weights of all dtypes and many widths that end where a page does, also with
    logprobs, which need all exact logits."""
    drawn = 0
    for dtype, width, rows, logprobs in product(DTYPES, (1, 24, 33, 64), (1, 4), (None, 1)):
        weight = guarded(torch.randn(65, width).to(dtype), at_end=True)
        sampler = LMHeadSampler(weight, backend="numba", group="alone")
        params = [SamplingParams(seed=1, logprobs=logprobs)] * rows
        batch = SamplingBatch.from_params(params, vocab_size=65)
        hidden_states = guarded(torch.randn(rows, width).to(dtype), at_end=True)
        drawn += len(sampler(hidden_states, batch, 0).token_ids)
    return drawn


def test_a_weight_of_any_width_is_read_to_its_end_and_no_further():
    assert run_ranks(1, _widths, timeout_s=240) == [3 * 4 * (1 + 4) * 2]


def _copies() -> int:
    """Draw over 8-bit copies that end, or begin, where a page does, and hold the words."""
    compared = 0
    for width, rows, start, at_end in product((1, 33, 64), (1, 4, 7), (0, 5, 63), (False, True)):
        case, shard = problem("normal", 130, rows, width), VocabShard(start, start + 130)
        definition, native = backends(case, shard, "int8")
        for name in ("quantised", "scale", "norm", "residual_norm"):
            setattr(native.copy, name, guarded(getattr(native.copy, name), at_end=at_end))
        batch = SamplingBatch.from_params(requests(rows), vocab_size=start + 130)
        step = case.hidden_states, batch, torch.arange(rows), 1, 3
        for own, expected in zip(words(native, *step)[0], words(definition, *step)[0], strict=True):
            assert torch.equal(own, expected)
            compared += rows
    return compared


def test_a_copy_is_read_to_its_ends_and_no_further():
    assert run_ranks(1, _copies, timeout_s=240) == [3 * 3 * 2 * 3 * (1 + 4 + 7)]


CHECKED = """
import sys
import numba
from tests.backends.numba_.test_guarded import stories

assert numba.config.BOUNDSCHECK
stories(*map(int, sys.argv[1:])).require_none_wrong("guarded, bounds checked")
"""


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_no_kernel_indexes_outside_of_an_array(pytestconfig):
    cache = str(pytestconfig.cache.mkdir("checked"))
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": cache}
    command = [sys.executable, "-c", CHECKED, "50000", "4000"]
    found = subprocess.run(command, env=environment, text=True, capture_output=True)
    print(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr


def _touch(beside: int, *, at_end: bool) -> int:
    return _at(guarded(torch.arange(5), at_end=at_end), beside)


def _at(tensor: torch.Tensor, place: int) -> int:
    return ctypes.c_int64.from_address(tensor.data_ptr() + 8 * place).value


@pytest.mark.parametrize(("beside", "at_end"), [(5, True), (-1, False)])
def test_a_guard_page_ends_a_process_that_touches_it(beside, at_end):
    assert run_ranks(1, partial(_touch, 0, at_end=at_end)) == [0]
    with pytest.raises(RankFailed, match="the process died"):
        run_ranks(1, partial(_touch, beside, at_end=at_end))
    fill = guarded(torch.arange(5), at_end=at_end)
    assert _at(fill, -1 if at_end else 5) == -1
