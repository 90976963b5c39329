"""An exception of a signal's handler is raised at whatever instruction of a step it arrives.

Afterwards the next step of one rank is right. Several ranks reset first.
"""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.interrupts import Interrupt, interrupt_after, interrupt_at
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import (
    LMHeadSampler,
    PeerLost,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    verify,
)
from tpsample.backends.numba_.kernels import threads
from tpsample.request import selection
from tpsample.request.step_batch import StepBatch

V, D, B = 300, 24, 4
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "temperature": 2.0},
    "logprobs": {"logprobs": 2, "min_p": 0.01},
    "controls": {"repetition_penalty": 1.5, "logit_bias": {7: 3.0}, "bad_words": [[3, 4]]},
}
KINDS = (*FIELDS, "logits", "int8", "slots", "verify", "moved")


class Steps:
    """A step of one kind, which can be taken again and again."""

    def __init__(self, kind: str, **options: Any) -> None:
        g = torch.Generator().manual_seed(5)
        self.weight, self.hidden = torch.randn(V, D, generator=g), torch.randn(B, D, generator=g)
        fields = FIELDS.get(kind, {"top_p": 0.9})
        params = [SamplingParams(seed=i, **fields) for i in range(B)]
        shard = options.get("shard", VocabShard(0, V))
        self.own = self.weight[shard.start : shard.stop].clone()
        screening = "int8" if kind == "int8" else None
        self.sampler = LMHeadSampler(self.own, vocab_size=V, screening=screening, **options)
        tokens = [[i, 3] for i in range(B)]
        self.rows = SamplingBatch.from_params(params, vocab_size=V, output_token_ids=tokens)
        self.kind, self.shard = kind, shard
        self.expected = self.take()

    def take(self) -> list[Any]:
        """Take the step; return what it says."""
        rows, hidden = self.rows, self.hidden
        if self.kind == "slots":
            rows = rows.select(torch.arange(B).flip(0))
        if self.kind == "moved":
            self.own.data = self.own.clone()
        if self.kind == "verify":
            drafts = torch.tensor([[1, 2]] * B)
            out: Any = verify(
                self.sampler, hidden.unsqueeze(1).repeat(1, 3, 1), drafts, rows, 4, method="block"
            )
        elif self.kind == "logits":
            logits = hidden @ self.weight.T
            out = self.sampler.sample_logits(logits[:, self.shard.start : self.shard.stop], rows, 4)
        else:
            out = self.sampler(hidden, rows, 4)
        told = [out.token_ids.tolist(), out.status.tolist()]
        if self.kind == "logprobs":
            told.append(out.logprobs.values.tolist())
        return told


def chosen(count: int, of: int, seed: int) -> list[int]:
    """So many different instructions, in random order."""
    return random.Random(seed).sample(range(1, of + 1), min(count, of))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "instants"), [(kind, 8) for kind in KINDS] + long(*((kind, 50) for kind in KINDS))
)
def test_the_step_after_an_interrupted_one_is_right(two_threads, kind, instants):
    steps = Steps(kind, backend="numba")
    # The first steps compare and warn, so they have more instructions than later ones.
    instructions = min(interrupt_at(None, steps.take) for _ in range(4))
    for instruction in chosen(instants, instructions, seed=instants):
        with pytest.raises(Interrupt):
            interrupt_at(instruction, steps.take)
        assert steps.take() == steps.expected, f"after instruction {instruction}"


def test_no_interrupt_is_lost_where_threads_begin(two_threads):
    """A callback of ctypes would lose one that comes at its first instructions."""
    steps, within = Steps("plain", backend="numba"), threads.__file__
    instructions = interrupt_at(None, steps.take, within)
    for instruction in range(1, instructions + 1):
        with pytest.raises(Interrupt):
            interrupt_at(instruction, steps.take, within)
        assert steps.take() == steps.expected, f"after instruction {instruction}"
    assert instructions > 10


def test_another_weight_is_noticed_after_an_interrupt():
    """At every instruction that follows the weight, whose 8-bit copy is then of the old one."""
    steps = Steps("int8", backend="numba")
    rebind, instruction, raised = steps.sampler.pipeline.caller.rebind_aliases, 0, True
    while raised:
        instruction += 1
        steps.own.data = -steps.own.clone()
        try:
            interrupt_at(instruction, rebind)
            raised = False
        except Interrupt:
            pass
        with pytest.raises(ValueError, match=r"call sampler\.refresh"):
            steps.take()
        steps.sampler.refresh()
        steps.take()
    assert instruction > 20


def five_slots() -> SamplingBatch:
    batch = SamplingBatch.of_slots(5, vocab_size=V)
    batch.put(range(5), [SamplingParams(seed=slot) for slot in range(5)])
    return batch


def test_a_selection_that_is_used_again_reads_its_own_slots_after_an_interrupt():
    batch, rows, instruction, ended = five_slots(), None, 0, False
    while not ended:
        instruction += 1
        named = [(instruction + row) % 5 for row in range(3)]
        rows = batch.select(torch.tensor(named), out=rows)
        with suppress(Interrupt):
            interrupt_at(instruction, partial(getattr, rows, "seed"), selection.__file__)
            ended = True
        assert rows.seed.tolist() == named, f"after instruction {instruction}"
    assert instruction > 100


def test_a_selection_that_was_interrupted_is_refused_or_whole():
    batch, instruction, refused, ended = five_slots(), 0, 0, False
    whole, rows = [4, 3, 2], batch.select(torch.tensor([4, 3, 2]))
    while not ended:
        instruction += 1
        named = [(instruction + row) % 5 for row in range(3)]
        with suppress(Interrupt):
            again = partial(batch.select, torch.tensor(named), out=rows)
            interrupt_at(instruction, again, selection.__file__)
            ended = True
        try:
            seeds = rows._view_of(3).seed.tolist()
        except ValueError:
            refused += 1
            continue
        assert seeds in (whole, named), f"after instruction {instruction}"
        whole = seeds
    assert refused > 9


def test_what_is_written_after_an_interrupted_verification_is_read():
    batch, sampler = five_slots(), LMHeadSampler(torch.randn(V, D), backend="torch")
    rows, drafts = batch.select(torch.tensor([3, 1])), torch.zeros(2, 1).long()
    with pytest.raises(Interrupt), patch.object(StepBatch, "_note_step", side_effect=Interrupt):
        verify(sampler, torch.randn(2, 2, D), drafts, rows, 4)
    batch.seed[1] = 77
    assert rows._view_of(2).seed.tolist() == [3, 77]
    batch.seed[1] = 78
    assert rows._with_drafts(drafts).seed.tolist() == [3, 3, 78, 78]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "instants"), [("plain", 40), ("top_p", 20), *long(("plain", 500), ("top_p", 500))]
)
def test_no_signal_is_lost(two_threads, kind, instants):
    steps = Steps(kind, backend="numba")
    pick = random.Random(instants)
    for _ in range(instants):
        caught = False
        try:
            with interrupt_after(pick.uniform(2e-5, 0.01)) as came:
                while not came:
                    assert steps.take() == steps.expected
        except Interrupt:
            caught = True
        assert caught, "an exception was lost"
        assert steps.take() == steps.expected


def _on_two_ranks(kind: str, instants: int) -> int:
    """Rank 1 is interrupted; whatever both see of it, they reset and take the next step."""
    rank, interrupted = dist.get_rank(), 0
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1 * slowness()))
    shard = VocabShard.even(V, rank, 2)
    steps = Steps(kind, backend="numba", shard=shard, group=group)
    alone = Steps(kind, backend="torch", group="alone")
    assert steps.expected == alone.expected
    instructions = interrupt_at(None, steps.take)
    both = [0, 0]
    dist.all_gather_object(both, instructions)
    for instruction in chosen(instants, both[1], seed=instants):
        try:
            if rank == 1:
                interrupt_at(instruction, steps.take)
            else:
                steps.take()
        except Interrupt:
            interrupted += 1
        except (PeerLost, RankMismatch):
            assert rank == 0
        steps.sampler.reset()
        assert steps.take() == steps.expected, f"after instruction {instruction}"
    return interrupted


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "instants"), [("plain", 6), *long(("plain", 150), ("top_p", 150))]
)
def test_ranks_reset_after_an_interrupt(kind, instants):
    found = run_ranks(2, _on_two_ranks, kind, instants, timeout_s=60 + 20 * instants)
    assert found == [0, instants]
