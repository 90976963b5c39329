"""Drafts of vLLM's runner V2 that are drawn, by a fake of its drafter that is the target."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import vllm_fakes as fakes
from tests.support.ranks import same_on_ranks
from tests.support.vllm_fakes import D, V
from tests.support.vllm_steps import (
    PROMPTS,
    REQUESTS,
    WEIGHT,
    drafted_v2,
    expected,
    rows_of,
    step_v2,
    v2,
)
from tpsample import SamplingBatch, UnsupportedParameter, VocabShard, reference
from tpsample.integrations import vllm_v2_drafts
from tpsample.integrations.vllm_params import to_params
from tpsample.speculative import reference as defined
from tpsample.speculative.drafting import Method, sample_draft

SLOTS = {name: slot for slot, name in enumerate(PROMPTS, 1)}


class DraftModel(nn.Module):
    """A model of a drafter, whose LM head is the target's."""

    def __init__(self, target: fakes.Model, processor: fakes.Processor) -> None:
        super().__init__()
        self.lm_head, self.logits_processor = target.lm_head, processor
        self.draft_id_to_target_id: torch.Tensor | None = None


class Drafter:
    """vLLM's drafter of a model whose LM head is the target's, which has no other layers."""

    num_speculative_steps = 2

    def __init__(self, runner, *, remaps: bool = False) -> None:
        self.draft_logits = torch.zeros(1)
        self.model = DraftModel(runner.model, fakes.Processor())
        if remaps:
            self.model.draft_id_to_target_id = torch.zeros(V)

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        """Gather the logits."""
        return hidden_states @ WEIGHT.T


def drafting(*, remaps: bool = False, rule: Method = "coupled", **config):
    """A runner with a drafter that draws; requests have taken no step."""
    runner = v2(depth=3, **config)
    runner.speculator = Drafter(runner, remaps=remaps)
    vllm_v2_drafts.attach(runner, runner.sampler, rule)
    return runner


def draft(runner, names, lengths, step=0, hidden=None) -> list[int]:
    """The next drafts of these requests, which have so many tokens; "-" is padding."""
    slots = torch.tensor([SLOTS.get(name, -1) for name in names])
    positions = torch.tensor(lengths) - 1
    if hidden is None:
        hidden = rows_of([name if name in SLOTS else "a" for name in names])
    unused = torch.zeros(1), torch.zeros(1), torch.tensor(step), None
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


RATIOS: tuple[Method, ...] = ("rejection", "block")
LAWS = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(6))
"""Hidden states of a drafter that is not the target: of two drafts, of four rows."""


def _verified(runner, names, lengths, laws=LAWS):
    """Draft two tokens of each request, verify them, and return both."""
    laws = laws[:, : len(names)]
    own = [[length + step for length in lengths] for step in (0, 1)]
    drafts = [draft(runner, names, at, step, laws[step]) for step, at in enumerate(own)]
    of_row = dict(zip(names, map(list, zip(*drafts, strict=True)), strict=True))
    return of_row, drafted_v2(runner, of_row, rows_of([name for name in names for _ in range(3)]))


@pytest.mark.parametrize("rule", RATIOS)
@pytest.mark.parametrize("how", [{}, {"remaps": True}], ids=["on shards", "gathered"])
def test_drafts_are_verified_by_their_laws_as_defined(rule, how):
    runner, names = drafting(rule=rule, **how), ["c", "a", "b", "d"]
    step_v2(runner, names[::-1], rows_of(names[::-1]))
    lengths = [len(PROMPTS[name]) + 1 for name in names]
    drafts, out = _verified(runner, names, lengths)
    batch = SamplingBatch.from_params(
        [to_params(REQUESTS[name], V, "raw_logprobs") for name in names],
        vocab_size=V,
        prompt_token_ids=[PROMPTS[name] for name in names],
        output_token_ids=[[expected(name, [])] for name in names],
    )
    laws, at = reference.logits(LAWS.flatten(0, 1), WEIGHT).view(2, 4, V), torch.tensor(lengths)
    target = runner.sampler.steps.head.kept.sampler
    for step, law in enumerate(laws):
        drawn = sample_draft(target, law, batch, at + step, step, method=rule).token_ids
        assert drawn.tolist() == [its[step] for its in drafts.values()], "a stream of its own"
    expects = defined.verify(
        reference.logits(rows_of(names), WEIGHT).unsqueeze(1).expand(-1, 3, -1),
        torch.tensor(list(drafts.values())),
        batch,
        at,
        method=rule,
        draft_logits=laws.transpose(0, 1),
    )
    counts = (expects.num_accepted + 1).tolist()
    assert out.num_sampled.tolist() == counts
    for row, count in enumerate(counts):
        assert torch.equal(out.sampled_token_ids[row, :count], expects.token_ids[row, :count])


def test_emitted_tokens_follow_the_targets_law_whatever_drafted_them():
    runner, names, steps = drafting(rule="rejection"), ["a", "d"], 500
    step_v2(runner, names, rows_of(names))
    firsts, accepted = [], 0
    for at in range(10, 10 + steps):  # each position has noise of its own
        runner.sampler.req_states.total_len.gpu[:] = at
        _, out = _verified(runner, names, [at, at])
        firsts.append(out.sampled_token_ids[:, 0])
        accepted += out.num_sampled > 1
    for row, name in enumerate(names):
        temperature = REQUESTS[name].temperature
        law, draft_law = (
            (reference.logits(hidden, WEIGHT)[0] / temperature).softmax(0)
            for hidden in (rows_of([name]), LAWS[0, row : row + 1])
        )
        found = torch.stack(firsts)[:, row].bincount(minlength=V) / steps
        likely = law.topk(6).indices
        assert (found - law)[likely].abs().max() < 4 * (0.25 / steps) ** 0.5
        taken = float(law.minimum(draft_law).sum())
        assert abs(int(accepted[row]) / steps - taken) < 4 * (0.25 / steps) ** 0.5


def test_certain_drafts_are_verified_by_a_ratio_too():
    runner = v2(depth=3)
    vllm_v2_drafts.attach(runner, runner.sampler, "rejection")
    step_v2(runner, ["a"], rows_of("a"))
    logits = reference.logits(rows_of("aaa"), WEIGHT).unsqueeze(0)
    batch = SamplingBatch.from_params(
        [to_params(REQUESTS["a"], V, "raw_logprobs")], vocab_size=V, prompt_token_ids=[[1, 2]]
    )
    drafts = logits[0, :2].argmax(dim=1).unsqueeze(0)
    expects = defined.verify(logits, drafts, batch, 3, method="rejection")
    out = drafted_v2(runner, {"a": drafts[0].tolist()}, rows_of("aaa"))
    count = int(expects.num_accepted) + 1
    assert out.num_sampled.tolist() == [count]
    assert torch.equal(out.sampled_token_ids[0, :count], expects.token_ids[0, :count])


def test_a_row_without_drafts_has_the_same_token_whether_others_have_some():
    for _, name in zip(range(4), "acdb", strict=True):
        alone, beside = (drafting(rule="rejection") for _ in range(2))
        drafted = "c" if name != "c" else "a"
        out = drafted_v2(beside, {name: [], drafted: [5, 9]}, rows_of([name, *[drafted] * 3]))
        assert (
            step_v2(alone, [name], rows_of(name)).sampled_token_ids[0, 0]
            == (out.sampled_token_ids[0, 0])
        )


def _ratio_on_two_ranks():
    runner = drafting(rule="rejection", group=None, shard=VocabShard.even(V, dist.get_rank(), 2))
    step_v2(runner, ["c", "a"], rows_of("ca"))
    drafts, out = _verified(runner, ["c", "a"], [4, 3])
    return drafts, out.sampled_token_ids.tolist(), out.num_sampled.tolist()


def test_two_ranks_verify_by_a_ratio_what_one_does():
    runner = drafting(rule="rejection")
    step_v2(runner, ["c", "a"], rows_of("ca"))
    drafts, out = _verified(runner, ["c", "a"], [4, 3])
    expects = drafts, out.sampled_token_ids.tolist(), out.num_sampled.tolist()
    assert same_on_ranks(2, _ratio_on_two_ranks) == expects


def _drafts_of_two_ranks():
    shard = VocabShard.even(V, dist.get_rank(), 2)
    runner = drafting(group=None, shard=shard)
    step_v2(runner, ["a", "c"], rows_of("ac"))
    return draft(runner, ["a", "c"], [3, 4])


def test_two_ranks_draft_on_their_shards():
    first = {name: expected(name, []) for name in "ac"}
    assert same_on_ranks(2, _drafts_of_two_ranks) == [expected(n, [first[n]]) for n in "ac"]
