"""Positions, seeds, tokens so far and masks have to move on from step to step."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_heads import V, head
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    sample_draft,
    verify,
)
from tpsample.request import moving_on

D, B = 4, 3


def sampler_of() -> LMHeadSampler:
    return LMHeadSampler(head(1)[1], backend="torch")


def batch_of(**fields: Any) -> SamplingBatch:
    params = [SamplingParams(**{"seed": 7 + row, **fields}) for row in range(B)]
    return SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=[[3, 4]] * B)


def states(step: int = 0) -> torch.Tensor:
    return torch.randn(B, D, generator=torch.Generator().manual_seed(step))


@contextmanager
def nothing_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def told_once(text: str) -> Iterator[None]:
    """One warning, at a line of this file."""
    with pytest.warns(UserWarning, match=text) as warned:
        yield
    assert [Path(each.filename) for each in warned] == [Path(__file__)]


REPEATS = "^positions: the rows draw again at positions"


@pytest.mark.parametrize("of", ["batch", "selection", "given logits"])
def test_positions_that_do_not_move_on_are_told_of_once(of):
    sampler, batch = sampler_of(), batch_of()

    def step(number: int) -> None:
        rows = batch.select(torch.tensor([2, 0, 1])) if of == "selection" else batch
        if of == "given logits":
            sampler.sample_logits(torch.randn(B, V), rows, 5)
        else:
            sampler(states(number), rows, 5)

    with told_once(REPEATS):
        for number in range(6):
            step(number)


def test_positions_from_0_again_with_other_states_are_told_of():
    sampler, batch = sampler_of(), batch_of()
    with nothing_told():
        for position in range(4):
            sampler(states(position), batch, position)
        sampler(states(0), batch, 0)  # the same text once more
        sampler(states(1), batch, 1)
    with told_once(REPEATS):
        for position in range(4):
            sampler(states(9 + position), batch, torch.full((B,), position))


def test_steps_that_draw_again_on_purpose_are_not_told_of():
    sampler, other, batch = sampler_of(), sampler_of(), batch_of()
    greedy, slots = batch_of(temperature=0), torch.arange(B)
    drafts = torch.zeros(B, 0, dtype=torch.int64)
    with nothing_told():
        for position in range(4):
            sampler(states(), batch, position)
            sampler(states(), batch, position)  # a trial of the same step
            other(states(1), batch, position)  # its drafter
            sampler(states(), greedy, 3)
        for seed in range(4):  # other seeds at one position
            batch.seed.copy_(slots + 10 * seed)
            sampler(states(seed), batch, 9)
        for position in range(20, 24):
            verify(sampler, states().unsqueeze(1), drafts, batch, position)
        for position in range(30, 34):
            copy.deepcopy(batch).append(sampler(states(), batch, position).token_ids)


def test_drafts_and_their_verification_are_not_told_of():
    drafter, target, batch = sampler_of(), sampler_of(), batch_of()
    with nothing_told():
        for first in range(4, 10, 3):
            ahead = [drafter(states(first + k), batch, first + k).token_ids for k in range(2)]
            given = torch.stack([states(20 + first + k) for k in range(3)], dim=1)
            verify(target, given, torch.stack(ahead, dim=1), batch, first)
    with told_once(REPEATS):
        drafter(states(), batch, 4)


def test_rows_with_the_same_noise_are_told_of_once():
    sampler = sampler_of()
    batch = batch_of(seed=5)
    with told_once("^batch: rows 0 and 1 have the same seed and position"):
        sampler(states(), batch, 1)
        sampler(states(), batch, 2)
        batch.permute([2, 0, 1])
        sampler(states(), batch, 3)
    with nothing_told():
        sampler(states(), batch_of(seed=5), torch.tensor([1, 2, 3]))
        sampler(states(), batch_of(seed=5, temperature=0), 1)
        forked = SamplingParams(seed=5).fork(B)
        sampler(states(), SamplingBatch.from_params(forked, vocab_size=V), 1)
        sampler(states(), batch_of(seed=None), 1)


def test_seeds_that_are_written_later_are_told_of_once():
    sampler, batch = sampler_of(), batch_of()
    with nothing_told():
        sampler(states(), batch, 1)
    batch.seed[:] = 7
    with told_once("^batch: rows 0 and 1 have the same seed and position"):
        for position in range(2, 6):
            sampler(states(), batch, position)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_written_temperatures_that_count_as_0_are_told_of_once(value):
    sampler, batch = sampler_of(), batch_of()
    with nothing_told():
        sampler(states(), batch, 1)
        batch.temperature[1] = 0
        sampler(states(), batch, 2)
    batch.temperature[1] = value
    with told_once(r"^batch.temperature: row 1 has (-1|nan), which counts as 0"):
        for position in range(3, 6):
            sampler(states(), batch, position)


def test_filters_of_greedy_requests_are_off_at_a_written_temperature():
    sampler, greedy = sampler_of(), SamplingParams(temperature=0, top_k=1, seed=3)
    batch = SamplingBatch.from_params([greedy] * B, vocab_size=V)
    batch.temperature[1] = 2.0
    with told_once("^batch.temperature: row 1 is random by what was written"):
        for position in range(3):
            sampler(states(), batch, position)
    batch = SamplingBatch.from_params([greedy] * B, vocab_size=V)
    batch.update(1, dataclasses.replace(greedy, temperature=2.0))
    with nothing_told():
        out = sampler(states(), batch, 0)
    assert torch.equal(out.token_ids, (states() @ head(1)[1].T).argmax(dim=1))


def test_rows_that_move_while_others_are_dropped_are_told_of_once():
    batch = SamplingBatch.from_params([SamplingParams(seed=i) for i in range(9)], vocab_size=V)
    with told_once(r"^drop: rows \[2\] leave after row 0 has left.*batch.drop\(\[0, 2\]\)"):
        for row in (0, 2, 4):
            batch.drop(row)
    assert batch.seed.tolist() == [1, 2, 4, 5, 7, 8]
    batch = SamplingBatch.from_params([SamplingParams(seed=i) for i in range(8)], vocab_size=V)
    with nothing_told():
        for row in (7, 5, 3, 3, 0):
            batch.drop(row)
        sampler_of()(states(), batch, 0)
        batch.drop([0, 2])
    assert batch.seed.tolist() == [2]


@pytest.mark.parametrize("positions", [torch.tensor([3, -1, 4]), torch.tensor([-(2**63), 1, 2])])
def test_a_negative_position_is_refused_where_the_row_is_drawn(positions):
    sampler, batch = sampler_of(), batch_of()
    drafts = torch.zeros(B, 0, dtype=torch.int64)
    for call in (
        lambda: sampler(states(), batch, positions),
        lambda: verify(sampler, states().unsqueeze(1), drafts, batch, positions),
        lambda: sample_draft(sampler, torch.zeros(B, V), batch, positions, 0),
    ):
        with pytest.raises(ValueError, match=r"^positions: expected 0 <= position < 2\^63, got -"):
            call()
    padded = batch.select(torch.tensor([0, -1, 1]))
    assert sampler(states(), padded, torch.tensor([3, -1, 4])).token_ids[1] == -1


def test_tokens_that_are_appended_twice_are_told_of_once():
    for twice in (
        lambda batch, out: (batch.append(out), batch.append(out)),
        lambda batch, out: batch.append(out.token_ids.unsqueeze(1).repeat(1, 3)),
    ):
        sampler, batch = sampler_of(), batch_of(frequency_penalty=1.0)
        with told_once("^batch: more tokens were appended since the last step than positions"):
            for position in range(2, 6):
                twice(batch, sampler(states(position), batch, position))


def test_tokens_of_a_selection_that_are_appended_twice_are_told_of_once():
    sampler = sampler_of()
    for fields, told in (({"frequency_penalty": 1.0}, True), ({"top_k": 3}, False)):
        batch = batch_of(**fields)
        rows = batch.select(torch.tensor([2, 0, 1]))
        with nothing_told():
            rows.append(sampler(states(), rows, 2))
            out = sampler(states(1), rows, 3)
            rows.append(out.token_ids.clone())
            rows.append(out)
            out = sampler(states(2), rows, 4, out=out)
            rows.append(out)
        text = "^token_ids: those of the last step were appended before, so penalties"
        with told_once(text) if told else nothing_told():
            rows.append(out)
            rows.append(out)


def test_tokens_that_are_appended_once_in_any_way_are_not_told_of():
    sampler, batch = sampler_of(), batch_of(frequency_penalty=1.0, temperature=0.0)
    with nothing_told():
        at = torch.tensor([2, 2, 2])
        for step in range(3):
            batch.append(sampler(states(step), batch, at))
            at += 1
        drafts = sampler(states(5), batch, at).token_ids.unsqueeze(1)
        hidden_states = torch.stack([states(5), states(6)], dim=1)
        out = verify(sampler, hidden_states, drafts, batch, at)
        assert out.num_accepted.tolist() == [1] * B
        for column in out.token_ids.T:
            batch.append(column)
        at += 2
        out = verify(sampler, hidden_states, drafts, batch, at)
        batch.append(out)
        at += out.num_accepted + 1
        sampler(states(7), batch, at)
        batch.append(torch.tensor([-1, -1, 5]))  # two rows are done, or in their prompt
        sampler(states(8), batch, at + torch.tensor([9, 1, 1]))


@pytest.mark.parametrize("resumed", [False, True])
def test_dropped_tokens_of_chunks_are_not_told_of(resumed):
    """A chunk that does not end the tokens so far draws a token that nobody appends."""
    sampler = sampler_of()
    params = SamplingParams(seed=1, frequency_penalty=1.0)
    so_far = [[3] * 4], [[5] * 6] if resumed else [[]]
    names = ("prompt_token_ids", "output_token_ids")
    tokens: dict[str, Any] = dict(zip(names, so_far, strict=True))
    batch = SamplingBatch.from_params([params], vocab_size=V, **tokens)
    length = 10 if resumed else 4
    with nothing_told():
        for position in (2, 3, length):
            out = sampler(states(position)[:1], batch, position)
        batch.append(out)
        out = sampler(states(0)[:1], batch, length + 1)
    with told_once("^batch: a step at later positions"):
        sampler(states(1)[:1], batch, length + 2)


def test_a_drafter_over_a_copy_sees_its_drafts_and_nothing_is_told():
    target, drafter = sampler_of(), sampler_of()
    params = [SamplingParams(seed=row, repetition_penalty=9.0, temperature=0.3) for row in range(B)]
    batch = SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=[[3, 4]] * B)
    with nothing_told():
        for position in range(2, 14, 4):
            drafting, drafts = copy.copy(batch), []
            for ahead in range(3):
                drafts.append(drafter(states(ahead), drafting, position + ahead).token_ids)
                drafting.append(drafts[-1])
            hidden_states = torch.stack([states(ahead) for ahead in range(4)], dim=1)
            out = verify(target, hidden_states, torch.stack(drafts, dim=1), batch, position)
            assert out.num_accepted.tolist() == [3] * B
            batch.append(out)


def test_alternatives_are_no_text():
    sampler, batch = sampler_of(), batch_of(frequency_penalty=1.0)
    out = sampler(states(), batch, 2, num_samples=4)
    for tokens in (out, out.token_ids, out.token_ids.clone()):
        with pytest.raises(ValueError, match=r"^token_ids: got the 4 samples of each row"):
            batch.append(tokens)
    batch.append(out.token_ids[:, 0])
    with nothing_told():
        one = sampler(states(1), batch, 3, num_samples=1)
        batch.append(one)
        sampler(states(2), batch, 4)


def test_batches_that_are_built_anew_without_their_output_are_told_of():
    params = SamplingParams(seed=3, frequency_penalty=1.0)

    def texts(**named: Callable[[list[int]], Any]) -> None:
        sampler, text = sampler_of(), [3, 4]
        for step in range(6):
            tokens = {name: [make(text)] for name, make in named.items()}
            batch = SamplingBatch.from_params([params], vocab_size=V, **tokens)
            text.append(int(sampler(states(step)[:1], batch, len(text)).token_ids))

    with told_once("^batch: built anew for each step, and without output_token_ids"):
        texts(prompt_token_ids=lambda text: text)
    with nothing_told():
        texts(prompt_token_ids=lambda text: text[:2], output_token_ids=lambda text: text[2:])


def forced(*ids: int) -> torch.Tensor:
    return torch.tensor(ids)


def bits(word: int) -> torch.Tensor:
    return torch.full((B, -(-V // 32)), word, dtype=torch.int32)


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize(
    ("name", "mask", "other"),
    [("forced_token_ids", forced(3, -1, 5), 4), ("grammar_bitmask", bits(0b11110000), 0b111)],
)
def test_a_mask_of_an_earlier_step_is_told_of_once(name, mask, other, by_slot):
    sampler, mask = sampler_of(), mask.clone()

    def steps(before: Callable[[SamplingBatch, int], None], first: bool = True) -> None:
        batch = batch_of()
        if first:
            setattr(batch, name, mask)
        for position in range(5):
            before(batch, position)
            rows = batch.select(torch.arange(B)) if by_slot else batch
            sampler(states(position), rows, position)
            sampler(states(position), rows, position)  # a trial

    with told_once(f"^batch.{name}: what was assigned for an earlier step"):
        steps(lambda batch, position: None)
    with nothing_told():
        steps(lambda batch, position: setattr(batch, name, mask))
        steps(lambda batch, position: setattr(batch, name, None if position else mask))
        steps(lambda batch, position: mask[0].fill_(other + position))
        mask.fill_(-1)
        steps(lambda batch, position: None)


def test_tokens_of_a_step_are_appended_before_other_slots_are_taken():
    sampler, batch = sampler_of(), batch_of(frequency_penalty=1.0)
    rows = batch.select(torch.arange(B))
    tokens = sampler(states(), rows, 2).token_ids
    batch.select(torch.tensor([2, 1, 0]), out=rows)
    with pytest.raises(ValueError, match=r"select\(out=\) took other slots since the step"):
        rows.append(tokens)
    out = sampler(states(), rows, 2)
    rows.append(out)
    rows = batch.select(torch.tensor([2, 1, 0]), out=rows)
    sampler(states(1), rows, 3)
    rows.append(tokens)


@pytest.mark.parametrize("scope", ["all", "output"])
def test_a_penalty_of_a_prompt_that_did_not_come_is_told_of(scope):
    params = SamplingParams(seed=1, repetition_penalty=1.5, repetition_scope=scope)
    batch = SamplingBatch.from_params([], vocab_size=V, max_rows=5)
    calls: list[Callable[..., Any]] = [
        lambda **own: SamplingBatch.from_params([params], vocab_size=V, **own),
        lambda **own: batch.arrange(range(len(batch) + 1), [params], **own),
        lambda **own: batch.put(0, params, **own),
    ]
    for call in (*calls, None):
        with nothing_told() if scope == "output" else told_once("^prompt_token_ids: a repetition"):
            batch.add(params) if call is None else call()
        with nothing_told():
            if call is None:
                batch.add(params, prompt_token_ids=[])
            else:
                call(prompt_token_ids=[[]])


PADDED = [[0, 0, 5, 7], [3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("prompts", "penalty", "told"),
    [
        (PADDED, 1.2, True),
        (PADDED, 1.0, False),
        ([[0, 0, 5], [3, 4]], 1.2, False),
        ([[0, 0, 5], [0, 0, 6]], 1.2, False),
        ([[3, 4, 4], [4, 3, 3]], 1.2, False),
    ],
    ids=["padded", "nobody counts", "other lengths", "all begin so", "inside"],
)
def test_prompts_that_are_padded_are_told_of(prompts, penalty, told):
    params = [SamplingParams(seed=seed, repetition_penalty=penalty) for seed in range(2)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=prompts)
    said = "prompt_token_ids: all have 4 ids, and row 0 begins with several of id 0"
    assert [(str(each.message)[: len(said)], each.filename) for each in found] == [
        (said, __file__)
    ] * told


REORDER: dict[str, Callable[[SamplingBatch], Any]] = {
    "rows swap": lambda batch: batch.permute([1, 0, 2]),
    "one leaves and one joins": lambda batch: batch.arrange([1, 2, 3], [SamplingParams(seed=0)]),
}


@pytest.mark.parametrize("change", REORDER.values(), ids=REORDER)
@pytest.mark.parametrize("verifies", [False, True], ids=["step", "verification"])
def test_tokens_of_rows_that_moved_are_refused(change, verifies):
    sampler, batch, drafts = sampler_of(), batch_of(), torch.tensor([[1]] * B)
    for position in (2, 3):
        if verifies:
            two = torch.stack([states(position)] * 2, dim=1)
            out = verify(sampler, two, drafts, batch, 2 * position)
        else:
            out = sampler(states(position), batch, position)
        if position == 2:
            batch.permute([0, 1, 2])  # nothing moves
            batch.append(out)
    change(batch)
    with pytest.raises(ValueError, match=r"token_ids: expected those of the rows as they are, got"):
        batch.append(out)
    with pytest.raises(ValueError, match="before rows left or moved"):
        batch.append(out.token_ids)
    batch.append(out.token_ids[[1, 0, 2]])
    batch.append(torch.full((B,), -1))


def test_tokens_of_a_selection_are_not_those_of_its_batch():
    sampler, batch = sampler_of(), batch_of()
    out = sampler(states(), batch, 2)
    batch.append(out)
    rows = batch.select(torch.tensor([2, 0, 1]), host=[2, 0, 1])
    again = sampler(states(), rows, 3, out=out)
    with pytest.raises(ValueError, match="token_ids: expected those of a step of the whole batch"):
        batch.append(again)
    rows.append(again)
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        other.append(again)  # who copies a batch answers for what it gets


def test_a_batch_holds_no_tokens_of_its_caller():
    sampler, batch = sampler_of(), batch_of()
    token_ids = weakref.ref(sampler(states(), batch, 2).token_ids)
    del sampler  # which keeps them for `compare`
    gc.collect()
    assert token_ids() is None and batch.rows == B


def test_replays_of_a_captured_step_are_not_followed(monkeypatch):
    sampler, batch = sampler_of(), batch_of()
    out = sampler(states(), batch, 2)
    monkeypatch.setattr(moving_on, "capturing", lambda device: True)
    sampler(states(), batch, 2, out=out)
    monkeypatch.undo()
    batch.permute([1, 0, 2])
    batch.append(out)  # of a replay behind the move, as far as the host knows
