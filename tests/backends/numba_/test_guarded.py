"""No native kernel reads or writes beside the memory that it was given.

Stories of the fuzz run in a process of their own, over tensors between guard pages. The long mode
also compiles all kernels with Numba's checks of bounds, which see the kernels' own memory.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch

from tests.support.guarded import GuardedHead, guarded, guarded_take
from tests.support.judging import Tally
from tests.support.mixtures import Story
from tests.support.random_heads import ModelHead, OneRank
from tests.support.random_requests import THEMES
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
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


def guarded_head(pick: random.Random) -> GuardedHead:
    head = ModelHead.make(pick, 1, exact=False)
    v, d = pick.choice(VOCABS), pick.choice(LARGE_HIDDEN if pick.random() < 0.1 else HIDDEN)
    generator = torch.Generator().manual_seed(pick.getrandbits(32))
    weight = torch.randn(v, d, generator=generator) / d**0.5
    if pick.random() < 0.3:
        weight = (4 * weight).round()
    bias = None if head.bias is None else torch.randn(v, generator=generator)
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


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("first_seed", "rows"), [(1, 250), *long((1000, 20_000))])
def test_no_kernel_touches_what_is_beside_its_tensors(first_seed, rows):
    (tally,) = run_ranks(1, stories, first_seed, rows, timeout_s=240 + rows)
    tally.require_none_wrong("guarded")


def _widths() -> int:
    """Draw from weights of all dtypes and many widths that end where a page does."""
    drawn = 0
    for dtype, width, rows in product(DTYPES, (1, 24, 33, 64), (1, 4)):
        weight = guarded(torch.randn(65, width).to(dtype), at_end=True)
        sampler = LMHeadSampler(weight, backend="numba", group="alone")
        batch = SamplingBatch.from_params([SamplingParams(seed=1)] * rows, vocab_size=65)
        hidden_states = guarded(torch.randn(rows, width).to(dtype), at_end=True)
        drawn += len(sampler(hidden_states, batch, 0).token_ids)
    return drawn


def test_a_weight_of_any_width_is_read_to_its_end_and_no_further():
    assert run_ranks(1, _widths, timeout_s=240) == [3 * 4 * (1 + 4)]


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
