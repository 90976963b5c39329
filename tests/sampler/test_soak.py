"""Many steps, ranks out of step with each other, epochs that wrap: no error, no growth.

`pytest -m long` takes 10^5 steps of the host exchanges and 10^4 of the interpreted `peer`, at
0.2 s each; each test prints what it did.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.heads import ModelHead, OneRank
from tests.fuzz.judge import Tally
from tests.fuzz.story import Story
from tests.support.cases import Case, even_shards, own_sampler
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tests.support.virtual import peer_of, virtual
from tpsample import SamplingBatch
from tpsample.core.word import EPOCH_MAX
from tpsample.request.step import Inputs

WORLD_SIZE = 2
CASE = Case.make(24, 3, hidden_size=4)
MAX_GROWTH_MB = 2
"""In the second half; in the first, torch's flight recorder fills with 1 kB per collective."""


def _resident_mb() -> float:
    """After what is freed went back to the system: it comes to 4 MB, more or less by chance."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Growth:
    """Of the resident memory in the second half of the steps."""

    def __init__(self, num_steps: int, limit_mb: float = MAX_GROWTH_MB) -> None:
        self._half, self._limit_mb, self._at_half = num_steps // 2, limit_mb, 0.0

    def step(self, number: int) -> None:
        if number == self._half:
            self._at_half = _resident_mb()

    def mb(self) -> float:
        """How much; raises if memory is not flat."""
        growth = _resident_mb() - self._at_half
        assert growth < self._limit_mb, f"{growth:.2f} MB in half of the steps"
        return growth


def _steps() -> tuple[list[tuple[Inputs, SamplingBatch, Tensor]], list[list[int]]]:
    """Steps of other rows in turn, and the tokens of each."""
    some = [CASE.rows(index) for index in ([0, 1, 2], [2], [1, 0])]
    steps = [(Inputs(rows.hidden_states), rows.batch, rows.positions) for rows in some]
    return steps, [rows.oracle().token_ids.tolist() for rows in some]


def _virtual_soak(num_steps: int, first_epoch: int) -> str:
    """Ranks of `peer` in one process, in a random order that lets any of them run ahead.

    A rank may start its next step before another has finished this one: as far ahead as the
    protocol lets ranks get.
    """
    steps, expected = _steps()
    _, samplers = virtual(CASE, even_shards(24, WORLD_SIZE), chunks=2)
    for sampler in samplers:
        sampler.exchange.epoch.fill_(first_epoch)
    pick, growth, ahead = random.Random(0), Growth(num_steps), 0
    started, outputs = [0] * WORLD_SIZE, [None] * WORLD_SIZE
    for number in range(num_steps):
        kind = number % 3
        growth.step(number)
        for rank in pick.sample(range(WORLD_SIZE), WORLD_SIZE):
            if started[rank] == number:
                outputs[rank] = samplers[rank].pipeline.start(*steps[kind])
                started[rank] += 1
        for rank in pick.sample(range(WORLD_SIZE), WORLD_SIZE):
            out = samplers[rank].pipeline.finish(outputs[rank])
            assert out.token_ids.tolist() == expected[kind], f"step {number}, rank {rank}"
            if pick.random() < 0.3 and number + 1 < num_steps:
                outputs[rank] = samplers[rank].pipeline.start(*steps[(number + 1) % 3])
                started[rank] += 1
                ahead += 1
    for sampler in samplers:
        sampler.check()
        assert (sampler.exchange.memory.own == 0).all()
    wraps = (first_epoch + num_steps) // EPOCH_MAX
    return f"peer: {num_steps} steps, {wraps} wraps, {ahead} ahead, {growth.mb():+.1f} MB in half"


def _process_soak(exchange: str, num_steps: int, delay_s: float) -> str:
    """gloo ranks, each delayed at random by itself."""
    steps, expected = _steps()
    sampler = own_sampler(CASE.weight, exchange=exchange, chunks=2)
    if exchange == "peer":
        peer_of(sampler).epoch.fill_(EPOCH_MAX - num_steps // 2)
    own, growth = random.Random(dist.get_rank()), Growth(num_steps)
    for number in range(num_steps):
        growth.step(number)
        if own.random() < 0.1:
            time.sleep(own.random() * delay_s)
        out = sampler.pipeline.finish(sampler.pipeline.start(*steps[number % 3]))
        assert out.token_ids.tolist() == expected[number % 3], f"step {number}"
        if number % 50 == 49:
            sampler.compare(steps[number % 3][0].tensor)
    sampler.check()
    if exchange == "peer":
        dist.barrier()
        assert (peer_of(sampler).memory.own == 0).all()
    sampler.close()
    return f"{exchange}: {num_steps} steps, {growth.mb():+.1f} MB in half"


def _changing_soak(num_steps: int, size: int, limit_mb: float) -> tuple[str, Tally]:
    """Rows with controls and filters come and go; plain steps and verification; a weight that
    asks for gradients, as a module's own does. One step in fifty is judged."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pick = random.Random(3)
    head = ModelHead.of_size(size, 8, world_size)
    options = {"exchange": "collective", "backend": "torch", "max_rows": 32}
    ranks = OneRank(rank, head, pick, gradients=True, **options)
    story = Story(pick, head, ranks, max_rows=6, judged=lambda number: number % 50 == 0)
    growth = Growth(2, limit_mb)
    for half in range(2):
        growth.step(half)
        story.run(num_steps // 2)
    line = f"{world_size} ranks: {story.judge.number} changing steps, {growth.mb():+.2f} MB in half"
    ranks.close()
    return line, story.judge.tally


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("world_size", "num_steps", "size", "limit_mb"),
    [(1, 400, 2000, 1.0), *long((1, 20_000, 300, 0.5), (2, 20_000, 300, 0.5))],
)
def test_a_changing_batch_does_not_grow(world_size, num_steps, size, limit_mb):
    how = {"timeout_s": 60 + num_steps / 3, "group_timeout_s": 300}
    for line, tally in run_ranks(world_size, _changing_soak, num_steps, size, limit_mb, **how):
        print("soak,", line)
        tally.require_none_wrong("soak")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("num_steps", "first_epoch"), [(30, EPOCH_MAX - 20), *long((10_000, 1))])
def test_virtual_ranks_out_of_step_through_the_wrap(num_steps, first_epoch):
    print("soak,", _virtual_soak(num_steps, first_epoch))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("exchange", "world_size", "num_steps", "delay_s"),
    [
        ("collective", 2, 200, 0.01),
        ("p2p", 2, 200, 0.01),
        ("peer", 3, 24, 0.1),
        *long(
            ("collective", 2, 100_000, 0.002),
            ("p2p", 2, 100_000, 0.002),
            ("peer", 2, 1000, 0.002),
            ("peer", 4, 20, 0.1),
        ),
    ],
)
def test_delayed_processes(exchange, world_size, num_steps, delay_s):
    how = {"timeout_s": 240 + num_steps / 10, "group_timeout_s": 300}
    print("soak,", *run_ranks(world_size, _process_soak, exchange, num_steps, delay_s, **how))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("tpsample-")]
