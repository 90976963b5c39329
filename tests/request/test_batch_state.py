"""A batch between steps: masks that come and go, rows that move, tokens so far, the caller's modes.

A row is given all that its next token follows from, and nothing else.
"""

import contextlib
import functools
import gc
import itertools
import multiprocessing
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.controls import bitmask_of
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference, verify
from tpsample.ranks.virtual import VirtualWorld
from tpsample.request.seeds import SeedSource

V, D = 29, 4
BACKENDS = ("torch", "triton")


def _head(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(V, D, generator=generator).round()
    return torch.randn(rows, D, generator=generator).round(), weight


def _plain(rows: int, **params) -> list[SamplingParams]:
    return [SamplingParams(seed=row, **params) for row in range(rows)]


# --- masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["grammar_bitmask", "forced_token_ids"])
def test_a_mask_that_is_taken_away_binds_no_later_verification(name, backend):
    hidden_states, weight = _head(6)
    sampler = LMHeadSampler(weight, max_rows=6, backend=backend)
    batch = SamplingBatch.from_params(_plain(2), vocab_size=V)
    drafts = torch.full((2, 2), 7)

    def sampled() -> list[list[int]]:
        return verify(sampler, hidden_states.view(2, 3, D), drafts, batch, 3).token_ids.tolist()

    free = sampled()
    mask = bitmask_of([{7}] * 6, V) if name == "grammar_bitmask" else torch.full((6,), 7)
    setattr(batch, name, mask)
    assert sampled() == [[7, 7, 7]] * 2 != free
    setattr(batch, name, None)
    assert sampled() == free


@pytest.mark.parametrize("name", ["grammar_bitmask", "forced_token_ids"])
@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.drop(0),
        lambda batch: batch.drop(2),
        lambda batch: batch.permute([2, 0, 1]),
        lambda batch: batch.add(SamplingParams(seed=9)),
        lambda batch: batch.update(1, SamplingParams(seed=9)),
    ],
    ids=["drop first", "drop last", "permute", "add", "update"],
)
def test_masks_of_rows_that_changed_are_refused_until_they_are_assigned_anew(name, change):
    hidden_states, weight = _head(4)
    sampler = LMHeadSampler(weight, backend="torch")
    batch = SamplingBatch.from_params(_plain(3), vocab_size=V, max_rows=4)
    masks = {
        "grammar_bitmask": lambda ids: bitmask_of([{i} for i in ids], V),
        "forced_token_ids": torch.tensor,
    }
    setattr(batch, name, masks[name]([3, 9, 4]))
    assert sampler(hidden_states[:3], batch, 0).token_ids.tolist() == [3, 9, 4]
    change(batch)
    rows = batch.rows
    with pytest.raises(ValueError, match=f"batch.{name}: .*assign"):
        sampler(hidden_states[:rows], batch, 0)
    setattr(batch, name, masks[name]([5, 6, 7, 8][:rows]))
    assert sampler(hidden_states[:rows], batch, 0).token_ids.tolist() == [5, 6, 7, 8][:rows]


def test_a_mask_is_read_when_a_step_is_made_and_has_a_row_for_each_of_the_steps():
    hidden_states, weight = _head(2)
    sampler, batch = LMHeadSampler(weight), SamplingBatch.from_params(_plain(2), vocab_size=V)
    forced = torch.tensor([1, 2])
    batch.forced_token_ids = forced
    assert sampler(hidden_states, batch, 0).token_ids.tolist() == [1, 2]
    forced[1] = 5
    assert sampler(hidden_states, batch, 0).token_ids.tolist() == [1, 5]
    batch.forced_token_ids = torch.tensor([1, 2, 3, 4])  # of a verification
    with pytest.raises(ValueError, match="a row for each of the 2 rows of the step, got 4"):
        sampler(hidden_states, batch, 0)


# --- min_tokens, prompt ids, appended ids


@pytest.mark.parametrize(("backend", "shards"), [("torch", 1), ("triton", 1), ("triton", 3)])
def test_min_tokens_empties_no_row(backend, shards):
    """Where the grammar and the allowed ids leave stop ids alone, those may be drawn."""
    stop = {"min_tokens": 5, "stop_token_ids": [28, 2, 2]}
    params = [
        SamplingParams(seed=0, **stop),
        SamplingParams(seed=1, **stop, allowed_token_ids=[2, 28]),
        SamplingParams(seed=2, **stop, allowed_token_ids=[2, 3]),
        SamplingParams(seed=3, **stop, allowed_token_ids=[2, 3]),
        SamplingParams(seed=4, **stop),
        SamplingParams(seed=5, **stop),
    ]
    grammar = [None, None, None, {1, 2}, {28}, {28, 30}]  # 30 is behind the vocabulary
    allowed = [set(range(V)) - {2, 28}, {2, 28}, {3}, {2}, {28}, {28}]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    batch.grammar_bitmask = bitmask_of(grammar, 32)
    logits = torch.zeros(6, V)
    processed = reference.processed_logits(logits, batch)
    assert [set((row == 0).nonzero().flatten().tolist()) for row in processed] == allowed
    hidden_states, weight = _head(6)
    tokens = reference.sample(reference.logits(hidden_states, weight), batch, 1).token_ids
    world = VirtualWorld([VocabShard.even(V, rank, shards) for rank in range(shards)])
    samplers = [
        LMHeadSampler(weight[s.start : s.stop], group=ranks, backend=backend)
        for s, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    for out in world.step(samplers, hidden_states, batch, 1):
        assert torch.equal(out.token_ids, tokens)
    for _ in range(5):
        batch.append(torch.zeros(6, dtype=torch.int64))
    batch.grammar_bitmask = None
    assert (reference.processed_logits(logits, batch)[0] == 0).all()


def test_min_tokens_over_the_whole_vocabulary_hold_back_nothing():
    params = SamplingParams(seed=1, min_tokens=3, stop_token_ids=list(range(V)))
    batch = SamplingBatch.from_params([params], vocab_size=V)
    assert (reference.processed_logits(torch.zeros(1, V), batch) == 0).all()


def test_prompt_ids_outside_the_vocabulary_are_left_out_and_output_ids_refused():
    params = [SamplingParams(temperature=0, repetition_penalty=2.0)]

    def processed(prompt: list[int]) -> torch.Tensor:
        batch = SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=[prompt])
        return reference.processed_logits(torch.ones(1, V), batch)

    assert torch.equal(processed([-1, 5, V, 2**40, 6]), processed([5, 6]))
    with pytest.raises(ValueError, match=r"output_token_ids\[0\]: expected ids in"):
        SamplingBatch.from_params(params, vocab_size=V, output_token_ids=[[V]])
    with pytest.raises(TypeError, match=r"prompt_token_ids\[0\]: expected token ids, got 1.5"):
        SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=[[1.5]])


@pytest.mark.parametrize("outside", [-1, -(2**40), V, 2**32 + 5, 2**63 - 1])
def test_an_appended_id_outside_the_vocabulary_is_none(outside):
    """2^32 + 5 is 5 in 32 bits, with which the bad word begins."""
    params = SamplingParams(bad_words=[[5, 6]], min_tokens=1, stop_token_ids=[2])
    batch = SamplingBatch.from_params([params], vocab_size=V)
    before = reference.processed_logits(torch.zeros(1, V), batch)
    batch.append(torch.tensor([outside]))
    assert torch.equal(reference.processed_logits(torch.zeros(1, V), batch), before)
    batch.append(torch.tensor([5]))
    assert reference.processed_logits(torch.zeros(1, V), batch)[0, [2, 6]].tolist() == [
        0.0,
        -torch.inf,
    ]


def test_the_callers_lists_are_taken_at_once():
    told, allowed = [3, 3], [3, 4]
    params = SamplingParams(temperature=0, frequency_penalty=1.0, allowed_token_ids=allowed)
    batch = SamplingBatch.from_params([params], vocab_size=V, output_token_ids=[told])
    told.append(3)
    allowed.append(5)
    processed = reference.processed_logits(torch.zeros(1, V), batch)
    assert processed[0, 3:6].tolist() == [-2.0, 0.0, -torch.inf]


def test_appends_of_no_rows_and_of_strided_tokens_count():
    batch = SamplingBatch.from_params(
        [SamplingParams(temperature=0, frequency_penalty=1.0)] * 2, vocab_size=V
    )
    batch.prepare(VocabShard(0, V))
    batch.append(torch.tensor([[1, 9], [2, 9], [1, 9]]).T[:, :3][[0, 0]])
    assert reference.processed_logits(torch.zeros(2, V), batch)[0, [1, 2]].tolist() == [-2, -1]
    batch.append(torch.arange(8).view(4, 2)[::2, 0])
    batch.drop([0, 1])
    batch.append(torch.zeros(0, dtype=torch.int64))
    batch.append(torch.zeros(0, 3, dtype=torch.int64))
    batch.add(SamplingParams(temperature=0, frequency_penalty=1.0))
    assert (reference.processed_logits(torch.zeros(1, V), batch) == 0).all()


def test_a_verification_without_drafts_is_a_step_for_every_control():
    hidden_states, weight = _head(3)
    params = [
        SamplingParams(seed=1, bad_words=[[5, 6], [7]]),
        SamplingParams(seed=2, min_tokens=3, stop_token_ids=[4]),
        SamplingParams(seed=3, allowed_token_ids=[8, 9, 10], top_k=2),
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V, output_token_ids=[[5]] * 3)
    none = torch.zeros(3, 0, dtype=torch.int64)
    for backend in BACKENDS:
        sampler = LMHeadSampler(weight, backend=backend)
        expected = sampler(hidden_states, batch, 4).token_ids
        out = verify(sampler, hidden_states.unsqueeze(1), none, batch, 4)
        assert torch.equal(out.token_ids.squeeze(1), expected)


# --- rows that move


def test_rows_updated_between_verifications_of_one_width_are_what_is_verified():
    hidden_states, weight = _head(6)
    sampler = LMHeadSampler(weight, max_rows=6, backend="torch")
    batch = SamplingBatch.from_params(_plain(2), vocab_size=V)
    drafts, states = torch.full((2, 2), 7), hidden_states.view(2, 3, D)
    verify(sampler, states, drafts, batch, 3)
    changed = [
        SamplingParams(seed=9, temperature=9.0, top_k=2),
        SamplingParams(seed=8, allowed_token_ids=[11]),
    ]
    for row, params in enumerate(changed):
        batch.update(row, params)
    fresh = SamplingBatch.from_params(changed, vocab_size=V)
    expected = verify(sampler, states, drafts, fresh, 3)
    assert torch.equal(verify(sampler, states, drafts, batch, 3).token_ids, expected.token_ids)


def test_outputs_do_not_change_when_the_batch_does():
    hidden_states, weight = _head(3)
    for backend in BACKENDS:
        sampler = LMHeadSampler(weight, backend=backend)
        batch = SamplingBatch.from_params(_plain(3), vocab_size=V, max_rows=4)
        out = sampler(hidden_states, batch, 0)
        oracle = reference.sample(reference.logits(hidden_states, weight), batch, 0)
        drafts = torch.zeros(3, 0, dtype=torch.int64)
        verified = verify(sampler, hidden_states.unsqueeze(1), drafts, batch, 0)
        batch.permute([2, 0, 1])
        batch.drop(0)
        batch.update(0, SamplingParams(seed=77))
        batch.seed.fill_(5)
        for seeds in (out.seeds, oracle.seeds, verified.seeds):
            assert seeds.tolist() == [0, 1, 2]


def test_moving_many_rows_takes_one_pass():
    """The time of a quadratic pass over 4096 rows would be minutes."""
    rows = 4096
    batch = SamplingBatch.from_params(_plain(rows), vocab_size=V)
    batch.permute(range(rows - 1, -1, -1))
    batch.drop(range(0, rows, 2))
    assert batch.seed.tolist() == list(range(rows - 2, -1, -2))


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.add(SamplingParams(), prompt_token_ids=["x"]),
        lambda batch: batch.add(SamplingParams(), output_token_ids=[V]),
        lambda batch: batch.add(SamplingParams(logprob_token_ids=[V])),
        lambda batch: batch.add({"temperature": 1.0}),
        lambda batch: batch.update(0, SamplingParams(stop_token_ids=[V])),
        lambda batch: batch.update(0, SamplingParams(), output_token_ids=[1.0]),
        lambda batch: batch.drop([0, 2]),
        lambda batch: batch.drop("0"),
        lambda batch: batch.permute([0, 0]),
        lambda batch: batch.permute([0, True]),
        lambda batch: batch.append(torch.zeros(1, dtype=torch.int64)),
        lambda batch: batch.prepare(VocabShard(0, V + 1)),
        lambda batch: batch.prepare((0, V)),
    ],
)
def test_a_change_that_is_refused_changes_nothing(change):
    hidden_states, weight = _head(2)
    sampler = LMHeadSampler(weight)
    params = [SamplingParams(presence_penalty=1.0, seed=1), SamplingParams(seed=2, top_k=4)]
    batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=3)
    before = sampler(hidden_states, batch, 0).token_ids
    with pytest.raises((TypeError, ValueError)):
        change(batch)
    assert batch.rows == 2
    assert torch.equal(sampler(hidden_states, batch, 0).token_ids, before)


# --- one request for all rows


def test_one_request_for_all_rows_carries_all_it_was_given():
    request = SamplingParams(temperature=1.0, repetition_penalty=1e4, frequency_penalty=2.0, seed=4)
    hidden_states, weight = _head(3)
    sampler = LMHeadSampler(weight, backend="torch")
    given = {"prompt_token_ids": [[3, 4]], "output_token_ids": [[5, 5, 6]]}

    def of(params, **changes) -> SamplingBatch:
        return SamplingBatch.from_params(params, vocab_size=V, **changes)

    three = {name: ids * 3 for name, ids in given.items()}
    logits = torch.ones(3, V)
    assert torch.equal(
        reference.processed_logits(logits, of(request, **given)),
        reference.processed_logits(logits, of([request] * 3, **three)),
    )

    single, rows = of(SamplingParams(seed=4)), of([SamplingParams(seed=4)] * 3)
    cold = sampler(hidden_states, single, 0).token_ids
    for batch in (single, rows):
        batch.temperature.fill_(50.0)
    warm = sampler(hidden_states, single, 0).token_ids
    assert torch.equal(warm, sampler(hidden_states, rows, 0).token_ids)
    assert not torch.equal(warm, cold)
    single.seed.fill_(17)
    assert sampler(hidden_states, single, 0).seeds.tolist() == [17] * 3
    single.forced_token_ids = torch.tensor([13])
    assert sampler(hidden_states, single, 0).token_ids.tolist() == [13] * 3
    single.forced_token_ids = torch.tensor([1, 2, 3])
    assert sampler(hidden_states, single, 0).token_ids.tolist() == [1, 2, 3]
    single.forced_token_ids = None
    single.grammar_bitmask = bitmask_of([{8}], V)
    assert sampler(hidden_states, single, 0).token_ids.tolist() == [8] * 3
    single.grammar_bitmask = None
    drafts = torch.zeros(3, 0, dtype=torch.int64)
    assert verify(sampler, hidden_states.unsqueeze(1), drafts, single, 0).seeds.tolist() == [17] * 3


# --- the caller's modes


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, torch.float16])
def test_the_default_dtype_enters_no_token(default):
    params = [
        SamplingParams(seed=1, repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.1),
        SamplingParams(seed=2, logit_bias={3: 0.1, 4: -77.7}, top_p=0.7, logprobs=2),
        SamplingParams(seed=3, min_p=0.013, top_k=7, temperature=0.7),
    ]
    hidden_states, weight = _head(3)

    def run() -> list[torch.Tensor]:
        batch = SamplingBatch.from_params(params, vocab_size=V, output_token_ids=[[3, 3, 4]] * 3)
        logits = reference.logits(hidden_states, weight, logit_softcap=7.1, logit_scale=0.3)
        oracle = reference.sample(logits, batch, 5)
        found = [reference.processed_logits(logits, batch), oracle.token_ids]
        for backend in BACKENDS:
            sampler = LMHeadSampler(weight, backend=backend, logit_softcap=7.1, logit_scale=0.3)
            out = sampler(hidden_states, batch, 5)
            assert out.logprobs is not None
            found += [out.token_ids, out.logprobs.values]
        return found

    expected = run()
    torch.set_default_dtype(default)
    try:
        got = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, wanted in zip(got, expected, strict=True):
        assert ours.dtype == wanted.dtype
        assert torch.allclose(ours, wanted, rtol=0, atol=0, equal_nan=True)


MODES: dict[str, Any] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def _story(backend: str, inside: str, outside: str) -> list[list[int]]:
    """Tokens of a batch that is built, stepped and changed under two modes in turn."""
    first, second = MODES[inside], MODES[outside]
    params = [
        SamplingParams(seed=1, repetition_penalty=1.3, logprobs=1),
        SamplingParams(seed=2, top_p=0.8),
        SamplingParams(seed=3, bad_words=[[5, 6]], min_tokens=2, stop_token_ids=[3]),
        SamplingParams(allowed_token_ids=[1, 2], seed=5),
    ]
    hidden_states, weight = _head(8)
    weight.requires_grad_(True)
    with first():
        sampler = LMHeadSampler(weight, backend=backend, max_rows=16, desync_every=2)
        batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=5)
    tokens = []
    for number, mode in enumerate((second, first, second, first)):
        with mode():
            out = sampler(hidden_states[:4] * 1.0, batch, number)
            tokens.append(out.token_ids.tolist())
        with (first if number % 2 else second)():
            batch.append(out.token_ids)
    with second():
        batch.add(SamplingParams(presence_penalty=1.0, seed=6))
    with first():
        drafts = torch.zeros(5, 1, dtype=torch.int64)
        states = hidden_states[[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]].view(5, 2, D)
        tokens += verify(sampler, states, drafts, batch, 9).token_ids.tolist()
        batch.permute([4, 3, 2, 1, 0])
    with second():
        batch.drop([0, 1])
        tokens.append(sampler(hidden_states[:3], batch, 10).token_ids.tolist())
    return tokens


@functools.cache
def _story_with_gradients() -> list[list[int]]:
    return _story("torch", "grad", "grad")


@pytest.mark.parametrize(
    ("backend", "inside", "outside"),
    [("torch", *pair) for pair in itertools.permutations(MODES, 2)]
    + [("triton", "inference", "grad"), ("triton", "grad", "inference")],
)
def test_sampler_batch_and_steps_may_each_be_under_another_mode(backend, inside, outside):
    assert _story(backend, inside, outside) == _story_with_gradients()


def test_a_mask_may_be_assigned_under_inference_mode():
    hidden_states, weight = _head(3)
    sampler = LMHeadSampler(weight, backend="torch")
    batch = SamplingBatch.from_params(_plain(2), vocab_size=V, max_rows=3)
    with torch.inference_mode():
        batch.forced_token_ids = torch.tensor([3, 4])
    batch.append(sampler(hidden_states[:2], batch, 0).token_ids)
    batch.add(SamplingParams(seed=2, presence_penalty=1.0))
    batch.forced_token_ids = None
    fresh = SamplingBatch.from_params(
        [*_plain(2), SamplingParams(seed=2, presence_penalty=1.0)], vocab_size=V
    )
    tokens = [sampler(hidden_states, each, 1).token_ids for each in (batch, fresh)]
    assert torch.equal(*tokens)


def test_steps_with_gradients_leave_nothing_behind():
    """A model's own weight requires a gradient; the graph of a step must not outlive it."""
    hidden_states, weight = _head(4)
    weight.requires_grad_(True)
    hidden_states.requires_grad_(True)
    bias = torch.zeros(V, requires_grad=True)
    sampler = LMHeadSampler(weight, bias=bias, backend="torch")
    params = [
        SamplingParams(seed=1, top_p=0.8),
        SamplingParams(seed=2, logprobs=2, presence_penalty=1.0),
        SamplingParams(seed=3, top_k=300, top_p=0.9),
        SamplingParams(seed=4),
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V)

    def graph_nodes() -> int:
        with warnings.catch_warnings():  # some objects warn when they are looked at
            warnings.simplefilter("ignore")
            return sum("Backward" in type(x).__name__ for x in gc.get_objects())

    before = graph_nodes()
    drafts = torch.zeros(4, 1, dtype=torch.int64)
    states = hidden_states.unsqueeze(1).expand(4, 2, D)
    for step in range(3):
        out = sampler(hidden_states, batch, step)
        assert not any(
            tensor.requires_grad
            for tensor in (*vars(sampler.local._logits).values(), out.logprobs.values)
            if isinstance(tensor, torch.Tensor)
        )
        for method in ("coupled", "rejection", "block"):
            verify(sampler, states, drafts, batch, step, method=method)
        assert not sampler.prompt_logprobs(hidden_states, torch.arange(4)).values.requires_grad
    assert graph_nodes() == before


def _first_seed(source: SeedSource, queue) -> None:
    queue.put(source.draw(1).tolist())


def test_a_forked_child_draws_other_seeds_than_its_parent():
    source = SeedSource()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=_first_seed, args=(source, queue)) for _ in range(2)]
    for child in children:
        child.start()
    drawn = [*queue.get(), *queue.get(), *source.draw(1).tolist()]
    for child in children:
        child.join()
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fixed_rounds", [False, True])
def test_a_row_made_greedy_by_its_temperature_has_no_filters(backend, fixed_rounds):
    asked = {"logprobs": 3, "logprobs_mode": "processed_logprobs"}
    params = [
        SamplingParams(seed=1, top_k=2, **asked),
        SamplingParams(seed=2, top_p=0.5, allowed_token_ids=list(range(4, 20)), **asked),
        SamplingParams(seed=3, min_p=0.9, **asked),
        SamplingParams(seed=4, top_k=20, top_p=0.3, **asked),
    ]
    greedy = [replace(p, temperature=0.0) for p in params]
    hidden_states, weight = _head(4)
    weight = weight + torch.randn(V, D, generator=torch.Generator().manual_seed(1)) / 8
    sampler = LMHeadSampler(weight, backend=backend)
    kept = {} if fixed_rounds else {"kept_cap": V}
    written = SamplingBatch.from_params(params, vocab_size=V, fixed_rounds=fixed_rounds, **kept)
    written.temperature[:3] = 0.0
    out = sampler(hidden_states, written, 0)
    built = SamplingBatch.from_params([*greedy[:3], params[3]], vocab_size=V)
    expected = sampler(hidden_states, built, 0)
    assert torch.equal(out.token_ids, expected.token_ids)
    for name in ("token_ids", "values", "ranks", "entropies"):
        assert torch.equal(getattr(out.logprobs, name), getattr(expected.logprobs, name)), name
    if not fixed_rounds:
        assert out.kept.sizes.tolist()[:3] == [V, 16, V]
        mask = reference.kept_mask(reference.logits(hidden_states, weight), written)
        assert out.kept.sizes.tolist() == mask.sum(dim=1).tolist()


# --- numbers


def test_requests_that_mean_the_same_are_equal():
    import numpy

    one = SamplingParams(
        temperature=1,
        seed=7,
        top_k=3,
        logit_bias={5: 1, 2: 2.0},
        bad_words=[[1, 2]],
        allowed_token_ids=[1],
    )
    other = SamplingParams(
        temperature=numpy.float32(1.0),
        seed=numpy.int64(7),
        top_k=numpy.int32(3),
        logit_bias={2: 2, numpy.int64(5): 1.0},
        bad_words=((1, 2),),
        allowed_token_ids=(numpy.int64(1),),
    )
    assert one == other and one.text == other.text
    assert one.text != SamplingParams(temperature=1, seed=7, top_k=4).text


@pytest.mark.parametrize(
    "arguments",
    [
        {"vocab_size": -5},
        {"vocab_size": "x"},
        {"vocab_size": 2**20 + 1},
        {"vocab_size": 5.0},
        {"max_rows": 2**31},
        {"max_rows": -1},
        {"max_rows": 1},
        {"fixed_rounds": 1},
        {"prompt_token_ids": "ab"},
        {"output_token_ids": 5},
    ],
)
def test_a_batch_is_refused_by_the_name_of_its_argument(arguments):
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=name):
        SamplingBatch.from_params(
            [SamplingParams()] * 2, **{"vocab_size": V, "max_rows": 2, **arguments}
        )
    with pytest.raises(TypeError, match="params"):
        SamplingBatch.from_params(3, vocab_size=V)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_fp32_are_infinite(backend):
    """Below they count as masked, above as forced, whatever stands beside them."""
    weight = torch.tensor([[1e38], [2e38], [3e38], [-3e38]])
    for factor, temperature, token, status in (
        (1.0, 1e-5, 0, 0),  # three that are forced: the lowest id
        (-1.0, 1.0, 3, 0),  # only the last is not masked
    ):
        batch = SamplingBatch.from_params(
            [SamplingParams(temperature=temperature, seed=1)], vocab_size=4
        )
        hidden_states = torch.tensor([[factor]])
        sampler = LMHeadSampler(weight, backend=backend)
        oracle = reference.sample(reference.logits(hidden_states, weight), batch, 0)
        for out in (sampler(hidden_states, batch, 0), oracle):
            assert (out.token_ids.tolist(), out.status.tolist()) == ([token], [status])
    masked = SamplingBatch.from_params([SamplingParams(seed=1)], vocab_size=4)
    out = LMHeadSampler(-weight.abs() - 2e38, backend=backend)(torch.ones(1, 1), masked, 0)
    assert out.token_ids.tolist() == [-1]


def test_a_step_that_cannot_see_the_last_token_is_warned_of_once():
    sampler, hidden_states = LMHeadSampler(torch.ones(V, 4), backend="torch"), torch.ones(2, 4)

    def batch_of(**fields: Any) -> SamplingBatch:
        params = [SamplingParams(seed=1), SamplingParams(seed=2, **fields)]
        return SamplingBatch.from_params(params, vocab_size=V)

    for fields in (
        {"repetition_penalty": 2.0}, {"bad_words": [[1, 2]]},
        {"min_tokens": 2, "stop_token_ids": [1]},
    ):  # fmt: skip
        batch = batch_of(**fields)
        sampler(hidden_states, batch, 0)
        with pytest.warns(UserWarning, match=r"call batch.append\(out.token_ids\)") as warned:
            sampler(hidden_states, batch, 1)
            sampler(hidden_states, batch, 2)
        assert [Path(each.filename) for each in warned] == [Path(__file__)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fields in ({}, {"bad_words": [[1]]}, {"logit_bias": {1: 1.0}}):
            batch = batch_of(**fields)
            for position in range(3):
                sampler(hidden_states, batch, position)
        batch = batch_of(repetition_penalty=2.0)
        for position in (0, 0, torch.tensor([0, 1])):  # trials, and a row that waits
            out = sampler(hidden_states, batch, position)
        for position in range(1, 4):
            batch.append(out.token_ids)
            out = sampler(hidden_states, batch, position)
        batch.update(1, SamplingParams(repetition_penalty=2.0), output_token_ids=[5])
        sampler(hidden_states, batch, 9)
