"""A step over slots allocates no memory on the device, and neither do requests that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.lab.allocations import Operators, noise_on_cpu
from tests.support.slots import D, V, sampler_of
from tpsample import SampleOutput, SamplingBatch, SamplingParams, VocabShard
from tpsample.request.selection import Selection

SLOTS = torch.tensor([3, -1, 0, 3, 99, 2])
CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6, "min_tokens": 2, "stop_token_ids": [5, 6]},
    {"logit_bias": {3: 4.0}, "allowed_token_ids": list(range(40))},
    {"temperature": 0.0, "frequency_penalty": 1.5, "bad_words": [[5], [3, 4]]},
    {},
]
FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.7, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    {"top_k": 4, "logprob_token_ids": [3]},
    {"min_p": 0.1},
    {},
]
KINDS = {"plain": [{}] * 4, "controls": CONTROLS, "filters": FILTERS}


def slots_of(kinds: list[dict[str, Any]], device: str = "cpu") -> SamplingBatch:
    """A batch of four slots whose controls have a state of a shard, as on a GPU."""
    batch = SamplingBatch.of_slots(4, vocab_size=V, device=device)
    for slot, kind in enumerate(kinds):
        change(batch, slot, kind)
    batch.prepare(VocabShard(3, V))
    batch.prepare(VocabShard(0, V))
    controls = batch.select(torch.zeros(1, dtype=torch.int32, device=device))._view_of(1).controls
    if controls is not None:
        controls.tables.keeps_digests = False
    return batch


def change(batch: SamplingBatch, slot: int, kind: dict[str, Any]) -> None:
    """A request leaves a slot, and another comes to it."""
    batch.free(slot)
    tokens = {"prompt_token_ids": [[1, 2, 3]], "output_token_ids": [[4, 5, 5]]}
    batch.put(slot, SamplingParams(**{"seed": slot, **kind}), **tokens)


@pytest.mark.parametrize("name", ["plain", "controls"])
def test_a_step_over_slots_allocates_nothing(name, monkeypatch):
    batch, sampler = slots_of(KINDS[name]), sampler_of("triton")
    masks = name == "controls"
    hidden_states, positions = torch.randn(6, D), torch.arange(6)
    if masks:
        batch.forced_token_ids = torch.tensor([-1, 7, -1, -1])

    def step(
        slots: torch.Tensor, rows: Selection | None = None, out: SampleOutput | None = None
    ) -> tuple[Selection, SampleOutput]:
        rows = batch.select(slots, out=rows)
        out = sampler(hidden_states, rows, positions, out=out)
        rows.append(out.token_ids)
        return rows, out

    kept = step(torch.full_like(SLOTS, -1))
    with Operators() as operators:
        _, out = step(SLOTS, *kept)
    assert operators.made == []
    assert (out.token_ids >= 0).tolist() == [True, False, True, False, False, True]
    if name == "plain":  # the copy that tpsample/README.md tells of
        monkeypatch.setattr("tpsample.core.tensors.READ_ON", ())
        assert noise_on_cpu(lambda: step(SLOTS, *kept)) == "aten.copy_.default"
    with Operators() as operators:  # the count sees what it forbids
        step(SLOTS)
    assert len(operators.made) > 9


def test_what_a_gpu_reads_of_slots_with_filters_allocates_nothing(monkeypatch):
    monkeypatch.setattr("tpsample.core.tensors.READ_ON", ())
    batch = slots_of(FILTERS)
    rows, others = batch.select(SLOTS), SLOTS.flip(0)
    rows._view_of(6)
    with Operators() as operators:
        view = batch.select(others, out=rows)._view_of(6)
    assert operators.made == []
    assert view.plan.filters.column("top_k").tolist() == [V] * 6
    assert view.plan.logprobs.top_of.tolist() == [0, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("name", list(KINDS))
def test_requests_come_and_go_without_allocations_on_the_device(name):
    """Torch's device "meta" is, as a GPU is, another one than the host's."""
    kinds = KINDS[name]
    batch = slots_of(kinds, "meta")
    with Operators("meta") as operators:
        for slot in (0, 1, 2, 3, 1):
            change(batch, slot, kinds[slot])
    assert operators.made == []
    with Operators("meta") as operators:  # the count sees what it forbids
        batch.permute([1, 0, 2, 3])
    assert operators.made
