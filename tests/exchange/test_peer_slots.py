"""Steps over slots with the `peer` exchange, whose kernels push the words of rows in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, own_shard, uneven_shards
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tests.support.virtual import SMALL_TILE, virtual
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, Status, reference
from tpsample.request.selection import Selection

V = 200
SLOTS = [[4, -1, 0, 6, 4, 2], [-1, 3, 99, 6, 1, 0], [-1] * 6]
"""Of three steps: padding, slots in any order, one that is named twice, one without a request and
one that is not there. Slot 5 is always empty."""

KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "controls": [
        {"repetition_penalty": 1.7, "logit_bias": {5: 3.0, 190: 4.0}},
        {"bad_words": [[7], [2, 3]], "frequency_penalty": 0.8},
        {},
    ],
    "filters": [{"top_k": 5}, {"top_p": 0.6, "logprobs": 2}, {}, {"top_k": 40, "top_p": 0.8}],
}


def requests_of(kind: str) -> dict[int, SamplingParams]:
    kinds = KINDS[kind]
    temperatures = (0.0, 0.7, 1.0, 1.5)
    return {
        slot: SamplingParams(
            temperature=temperatures[slot % 4], seed=70 + slot, **kinds[slot % len(kinds)]
        )
        for slot in (0, 1, 2, 3, 4, 6)
    }


class Slots:
    """A batch of slots, and beside it the oracle's tokens of each."""

    def __init__(self, kind: str) -> None:
        self.requests, self.case = requests_of(kind), Case.make(V, 6)
        self.outputs: dict[int, list[int]] = {slot: [3, 2] for slot in self.requests}
        self.batch = SamplingBatch.of_slots(7, vocab_size=V)
        tokens = {"prompt_token_ids": [[5, 7]] * 6, "output_token_ids": [[3, 2]] * 6}
        self.batch.put(list(self.requests), list(self.requests.values()), **tokens)
        self.rows: Selection | None = None

    def select(self, slots: list[int]) -> Selection:
        self.rows = self.batch.select(torch.tensor(slots), out=self.rows)
        return self.rows

    def check(self, out: Any, slots: list[int]) -> None:
        """The tokens of a step are those of a batch that is built of the drawn rows alone."""
        drawn = [i for i, s in enumerate(slots) if s in self.requests and s not in slots[:i]]
        named = [slots[i] for i in drawn]
        fresh = SamplingBatch.from_params(
            [self.requests[slot] for slot in named],
            vocab_size=V,
            prompt_token_ids=[[5, 7]] * len(named),
            output_token_ids=[self.outputs[slot] for slot in named],
        )
        logits = reference.logits(self.case.hidden_states[drawn], self.case.weight)
        expected = reference.sample(logits, fresh, self.case.positions[drawn])
        assert out.token_ids[drawn].tolist() == expected.token_ids.tolist()
        others = [i for i in range(len(slots)) if i not in drawn]
        assert out.token_ids[others].tolist() == [-1] * len(others)
        bad = [i for i in others if slots[i] != -1]
        assert (out.status == Status.BAD_SLOT).nonzero().flatten().tolist() == bad
        assert (out.status[drawn] == Status.OK).all()
        for slot, token_id in zip(named, expected.token_ids.tolist(), strict=True):
            self.outputs[slot].append(token_id)


@pytest.mark.parametrize("kind", ["controls", *long("plain", "filters")])
def test_every_virtual_rank_has_the_oracles_tokens(kind):
    slots = Slots(kind)
    case = slots.case
    world, samplers = virtual(case, uneven_shards(V, 3), chunks=2)
    for sampler in samplers:
        slots.batch.prepare(sampler.shard)
    for named in SLOTS:
        rows = slots.select(named)
        outputs = world.step(samplers, case.hidden_states, rows, case.positions)
        for out in outputs[1:]:
            assert out.token_ids.tolist() == outputs[0].token_ids.tolist()
            assert out.status.tolist() == outputs[0].status.tolist()
        slots.check(outputs[0], named)
        rows.append(outputs[0].token_ids)


def _on_a_rank() -> list[list[int]]:
    slots = Slots("controls")
    case = slots.case
    shard = own_shard(V, even=True)
    weight = case.weight[shard.start : shard.stop]
    sampler, found = LMHeadSampler(weight, shard=shard, exchange="peer"), []
    local: Any = sampler.local
    local.tile = SMALL_TILE
    for named in SLOTS[:2]:
        rows = slots.select(named)
        out = sampler(case.hidden_states, rows, case.positions)
        slots.check(out, named)
        rows.append(out.token_ids)
        found.append(out.token_ids.tolist())
    sampler.check()
    dist.barrier()
    sampler.close()
    return found


def test_processes_that_share_memory_have_the_oracles_tokens():
    first, second = run_ranks(2, _on_a_rank)
    assert first == second
