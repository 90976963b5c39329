"""Drafts of vLLM's runner V2 that are drawn, by a fake of its drafter that is the target."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import vllm_fakes as fakes
from tests.support.ranks import same_on_ranks
from tests.support.vllm_fakes import V
from tests.support.vllm_steps import (
    PROMPTS,
    WEIGHT,
    drafted_v2,
    expected,
    rows_of,
    step_v2,
    v2,
)
from tpsample import UnsupportedParameter, VocabShard
from tpsample.integrations import vllm_v2_drafts

SLOTS = {name: slot for slot, name in enumerate(PROMPTS, 1)}


class DraftModel(nn.Module):
    """A model of a drafter, whose LM head is the target's."""

    def __init__(self, target: fakes.Model, processor: fakes.Processor) -> None:
        super().__init__()
        self.lm_head, self.logits_processor = target.lm_head, processor
        self.draft_id_to_target_id: torch.Tensor | None = None


class Drafter:
    """vLLM's drafter of a model whose LM head is the target's, which has no other layers."""

    def __init__(self, runner, *, remaps: bool = False) -> None:
        self.draft_logits = torch.zeros(1)
        self.model = DraftModel(runner.model, fakes.Processor())
        if remaps:
            self.model.draft_id_to_target_id = torch.zeros(V)

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        """Gather the logits."""
        return hidden_states @ WEIGHT.T


def drafting(*, remaps: bool = False, **config):
    """A runner with a drafter that draws; requests have taken no step."""
    runner = v2(depth=3, **config)
    runner.speculator = Drafter(runner, remaps=remaps)
    vllm_v2_drafts.attach(runner, runner.sampler)
    return runner


def draft(runner, names, lengths) -> list[int]:
    """The next drafts of these requests, which have so many tokens; "-" is padding."""
    slots = torch.tensor([SLOTS.get(name, -1) for name in names])
    positions = torch.tensor(lengths) - 1
    hidden = rows_of([name if name in SLOTS else "a" for name in names])
    unused = torch.zeros(1), torch.zeros(1), torch.tensor(0), None
    return runner.speculator.sample_draft(hidden, positions, slots, *unused).tolist()


@pytest.mark.parametrize(
    "how",
    [{}, {"remaps": True}, {"method": fakes.Int8Method()}],
    ids=["on shards", "gathered", "a target that is no product"],
)
def test_drafts_are_drawn_as_the_targets_tokens_with_filters_and_penalties(how):
    runner, names = drafting(**how), ["c", "a", "b", "d"]
    assert runner.speculator.draft_logits is None
    outputs: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(4):
        out = step_v2(runner, names, rows_of(names))
        for name, (token_id,) in zip(names, out.sampled_token_ids.tolist(), strict=True):
            assert token_id == expected(name, outputs[name]), "drawing drafts has moved no state"
            outputs[name].append(token_id)
        lengths = [len(PROMPTS[name]) + len(outputs[name]) for name in names]
        drafts = draft(runner, names, lengths)
        assert drafts == [expected(name, outputs[name]) for name in names]
    of_row = {name: [token_id] for name, token_id in zip(names, drafts, strict=True)}
    out = drafted_v2(runner, of_row, rows_of("ccaabbdd"))
    assert out.num_sampled.tolist() == [2, 2, 2, 2]


def test_padding_and_slots_without_a_request_have_a_token_that_can_be_embedded():
    runner = drafting()
    assert draft(runner, ["a", "-"], [3, 3]) == [0, 0], "no step has let a in"
    assert runner.sampler.steps.head.kept.sampler.counters()["failed_rows"] == 0
    step_v2(runner, ["a"], rows_of("a"))
    found = draft(runner, ["-", "a"], [3, 3])
    assert found[0] == 0 and found[1] == expected("a", [expected("a", [])])


def test_a_drafter_that_would_be_handed_no_logits_is_refused():
    runner = v2(depth=3)
    runner.speculator = Drafter(runner)
    runner.speculator.model.logits_processor = runner.model.processor
    with pytest.raises(UnsupportedParameter, match="--speculative-config model: it makes"):
        vllm_v2_drafts.attach(runner, runner.sampler)


def test_greedy_drafts_are_left_to_vllm():
    runner = v2(depth=3)
    drafter = runner.speculator = Drafter(runner)
    drafter.draft_logits = None
    vllm_v2_drafts.attach(runner, runner.sampler)
    assert not hasattr(drafter, "sample_draft")


def _drafts_of_two_ranks():
    shard = VocabShard.even(V, dist.get_rank(), 2)
    runner = drafting(group=None, shard=shard)
    step_v2(runner, ["a", "c"], rows_of("ac"))
    return draft(runner, ["a", "c"], [3, 4])


def test_two_ranks_draft_on_their_shards():
    first = {name: expected(name, []) for name in "ac"}
    assert same_on_ranks(2, _drafts_of_two_ranks) == [expected(n, [first[n]]) for n in "ac"]
