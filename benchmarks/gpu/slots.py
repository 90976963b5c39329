"""Steps over slots, tried in section `features` of the GPU check.

A step is captured with padding in all of its rows, and replayed while only what is on the device
changes: which slots its rows name, the positions, and requests that come to slots. Ids are compared
with the oracle of a batch that is built of the drawn rows alone. Then one more step is eager:
without filters it neither waits for the device nor allocates, and a request that comes allocates
nothing either.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks.lab.allocations import Operators, allocated_on_gpu, noise_on_gpu
from benchmarks.lab.problem import Problem, gate, make_sampler
from benchmarks.lab.timing import captured
from tpsample import SampleOutput, SamplingBatch, SamplingParams, Status, reference
from tpsample.request.selection import Selection

SLOT_KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({},),
    "controls": (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logit_bias": {5: 4.0, 8: -3.0}, "bad_words": [[7], [2, 3]]},
        {"min_tokens": 9, "stop_token_ids": [1, 4], "temperature": 0.0},
        {},
    ),
    "filters": ({"top_k": 40, "top_p": 0.8}, {"top_p": 0.9}, {"min_p": 0.02}, {}),
}
"""Controls of the requests in turn, on top of their temperature and seed."""

_PROMPT = [2, 11, 17]


class SlotSteps:
    """A step over the slots of a batch, and a dictionary of what is in them."""

    def __init__(self, problem: Problem, kind: str) -> None:
        self.problem, self.kinds, self.pick = problem, SLOT_KINDS[kind], random.Random(1)
        self.device, rows = problem.weight.device, problem.rows
        self.batch = SamplingBatch.of_slots(
            2 * rows, vocab_size=problem.vocab_size, device=self.device
        )
        self.there: dict[int, tuple[SamplingParams, list[int]]] = {}
        self.slots = torch.full((rows,), -1, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros_like(self.slots)
        self.sampler = make_sampler(problem.weight, rows)
        self.out = SampleOutput.empty(self.slots, None)
        self.rows: Selection | None = None
        for slot in range(rows):
            self.come(slot)
        self.batch.prepare(self.sampler.shard)

    def come(self, slot: int) -> None:
        """Let a new request take a slot."""
        seed = self.pick.getrandbits(60)
        fields = {"temperature": 0.8, "seed": seed, **self.kinds[slot % len(self.kinds)]}
        self.there[slot] = SamplingParams(**fields), []
        self.batch.put(slot, self.there[slot][0], prompt_token_ids=[_PROMPT])

    def step(self) -> None:
        self.rows = self.batch.select(self.slots, out=self.rows)
        self.sampler(self.problem.hidden_states, self.rows, self.positions, out=self.out)
        self.rows.append(self.out.token_ids)

    def name(self, first_position: int) -> list[int]:
        """Let the step have other slots, in any order, with padding and an empty slot among them;
        and other positions."""
        chosen = self.pick.sample(sorted(self.there), self.problem.rows - 2)
        chosen += [-1, 2 * self.problem.rows - 1]
        self.pick.shuffle(chosen)
        self.slots.copy_(torch.tensor(chosen))
        self.positions.copy_(torch.arange(len(chosen)) + first_position)
        return chosen

    def check(self, chosen: list[int]) -> int:
        """Compare the ids of a step with the oracle, and return how many near ties differ."""
        problem, weight = self.problem, self.problem.weight
        drawn = [row for row, slot in enumerate(chosen) if slot in self.there]
        named = [self.there[chosen[row]] for row in drawn]
        batch = SamplingBatch.from_params(
            [params for params, _ in named],
            vocab_size=problem.vocab_size,
            device=self.device,
            prompt_token_ids=[_PROMPT] * len(named),
            output_token_ids=[output for _, output in named],
        )
        logits = reference.logits(problem.hidden_states[drawn], weight)
        got = self.out.token_ids.tolist()
        status = [Status.BAD_SLOT if slot >= 0 else Status.OK for slot in chosen]
        for row in drawn:
            status[row] = Status.OK
        if self.out.status.tolist() != status:
            raise AssertionError(f"slots {chosen}: status {self.out.status.tolist()}")
        given = (logits, batch, self.positions[drawn], weight.shape[1])
        differ = gate(self.out.token_ids[drawn], *given).near_ties
        for row, (_, output) in zip(drawn, named, strict=True):
            output.append(got[row])
        if any(got[row] != -1 for row in range(len(chosen)) if row not in drawn):
            raise AssertionError(f"slots {chosen}: a row that is not drawn has a token")
        return differ


def steps_over_slots(problem: Problem, kind: str, dry_run: bool) -> str:
    """Replay steps over slots, and count what one allocates; a dry run repeats the step."""
    steps, on_gpu = SlotSteps(problem, kind), problem.weight.device.type == "cuda"
    replay, differ, key = captured(steps.step, steps.device), 0, steps.batch.capture_key
    replays = 2 if dry_run else 12
    for number in range(replays):
        chosen = steps.name(7 * number)
        for slot in chosen:
            if slot in steps.there and steps.pick.random() < 0.3:
                steps.come(slot)
        if steps.batch.capture_key != key:
            raise AssertionError("the graph would have to be captured again")
        replay()
        differ += steps.check(chosen)
    if kind != "filters":
        for _ in range(3):  # a CPU looks once why a third step has the same positions
            steps.step()
        if on_gpu:
            noise = noise_on_gpu(steps.step)
            if allocations := allocated_on_gpu(lambda: steps.come(0)):
                raise AssertionError(f"a request that comes: {allocations} allocations")
        else:
            with Operators() as found:
                steps.step()
            # Where ranks compare them, on a CPU, digests of the tokens so far are kept.
            noise = "" if kind == "controls" else ", ".join(found.made)
        if noise:
            raise AssertionError(f"a step over slots: {noise}")
    return f"{replays} replays, {differ} near ties"
