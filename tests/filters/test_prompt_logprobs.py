"""Logprobs of a prompt: float64 log-softmax at every position, in chunks, the same on all ranks."""

import math

import pytest
import torch

from tests.support.cases import uneven_shards
from tests.support.filtered import Rows, V, assert_same_logprobs, kinds_of_logits, masked
from tests.support.memory import cost_of
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, Logprobs, SamplingBatch, SamplingParams
from tpsample.request.step import Inputs

KINDS = kinds_of_logits()
TOP = 5


def _prompt(**changes) -> Rows:
    """Nine positions over each of several kinds of logits."""
    kinds = [KINDS[name] for name in ("zipf", "two-valued", "all-equal", "wide", "bf16")]
    return Rows(kinds, [SamplingParams()] * 9, **changes)


def _came(rows: Rows) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(rows.vocab_size, (len(rows.params),), generator=generator)


def _oracle(logits: torch.Tensor, token_ids: torch.Tensor) -> Logprobs:
    """By sorting and float64 log-softmax."""
    listed = logits.argsort(dim=1, descending=True, stable=True)[:, :TOP]
    ids = torch.cat([token_ids.unsqueeze(1), listed], dim=1)
    own = logits.gather(1, ids)
    ranks = (logits.unsqueeze(1) >= own.unsqueeze(2)).sum(dim=2)
    log_softmax = logits.double().log_softmax(dim=1)
    entropies = torch.special.entr(log_softmax.exp()).sum(dim=1)
    return Logprobs(ids, log_softmax.gather(1, ids), ranks, entropies)


def _find(prompts: list[Rows], max_rows: list[int], backend: str) -> list[Logprobs]:
    found = []
    for rows in prompts:
        for room in max_rows:
            sampler = rows.sampler(max_rows=room, backend=backend, chunks=2)
            found.append(sampler.prompt_logprobs(rows.hidden_states, _came(rows), top=TOP))
    return found


@pytest.mark.parametrize(
    ("world_sizes", "backend", "max_rows"),
    [
        ((1, 3), "torch", [7, 64]),
        ((2,), "triton", [16]),
        *long(((1, 2, 4, 8), "torch", [7, 64]), ((1, 3), "triton", [16])),
    ],
    ids=["torch", "triton", "torch at many sizes", "triton at two sizes"],
)
def test_values_ids_and_ranks_are_the_oracles_and_the_same_everywhere(
    world_sizes, backend, max_rows
):
    prompts = [_prompt(), _prompt(bias=masked(30, 1100))]
    expected = [_oracle(rows.logits, _came(rows)) for rows in prompts for _ in max_rows]
    first = None
    for world_size in world_sizes:
        for outputs in run_ranks(world_size, _find, prompts, max_rows, backend):
            first = first or outputs
            for got, oracle, same in zip(outputs, expected, first, strict=True):
                assert_same_logprobs(got, oracle)
                assert_same_logprobs(got, same, tolerance=0)


def test_a_sampled_token_has_the_value_its_step_reported():
    rows = Rows([KINDS["normal"]], [SamplingParams(seed=s, logprobs=TOP) for s in range(20)])
    sampler = rows.sampler()
    out = sampler(rows.hidden_states, rows.batch, rows.positions)
    again = sampler.prompt_logprobs(rows.hidden_states, out.token_ids, top=TOP)
    assert_same_logprobs(again, out.logprobs, tolerance=0)


@pytest.mark.parametrize(
    "column",
    [KINDS["zipf"].where(KINDS["zipf"] < -1, math.nan), torch.full((V,), -math.inf)],
    ids=["nan", "empty"],
)
def test_no_distribution_no_logprobs(column):
    sampler = LMHeadSampler(column.unsqueeze(1), backend="torch")
    got = sampler.prompt_logprobs(torch.ones(3, 1), torch.tensor([5, 77, 6]), top=2)
    assert (got.token_ids == -1).all() and got.values.isnan().all() and (got.ranks == 0).all()
    assert got.entropies.isnan().all()


def test_a_position_with_a_nan_leaves_its_neighbours_alone():
    sampler = LMHeadSampler(KINDS["normal"].unsqueeze(1), backend="torch")
    hidden_states = torch.tensor([[math.nan], [1.0], [math.nan]])
    got = sampler.prompt_logprobs(hidden_states, torch.tensor([5, 5, 5]), top=2)
    alone = sampler.prompt_logprobs(hidden_states[1:2], torch.tensor([5]), top=2)
    assert (got.token_ids[[0, 2]] == -1).all() and got.values[[0, 2]].isnan().all()
    assert torch.equal(got.values[1:2], alone.values) and alone.values.isfinite().all()
    assert torch.equal(got.ranks[1:2], alone.ranks)


def _largest(rows: Rows, max_rows: int) -> int:
    sampler = rows.sampler(max_rows=max_rows)
    ids = _came(rows)
    return cost_of(sampler, lambda: sampler.prompt_logprobs(rows.hidden_states, ids, top=TOP))[1]


def test_memory_is_a_chunk_of_positions_over_a_shard():
    logits = -1.1 * (1 + torch.arange(32768)).double().log().float()
    rows = Rows([logits], [SamplingParams()] * 60)
    own = 16 * max(map(len, uneven_shards(32768, 4)))
    assert own <= max(run_ranks(4, _largest, rows, 16)) <= 1.1 * own


def test_nothing_is_sampled(monkeypatch):
    from tpsample.backends.torch_ import launch as torch_backend
    from tpsample.core import row_noise

    def refuse(*_):
        raise AssertionError("noise")

    monkeypatch.setattr(torch_backend, "score_tile", refuse)
    monkeypatch.setattr(row_noise, "row_stream", refuse)
    rows = _prompt()
    sampler = rows.sampler()
    sampler.prompt_logprobs(rows.hidden_states, _came(rows))


def test_a_step_in_between_is_not_disturbed():
    rows = Rows([KINDS["normal"]], [SamplingParams(seed=s, top_p=0.8) for s in range(6)])
    sampler = rows.sampler()
    started = sampler.pipeline.start(Inputs(rows.hidden_states), rows.batch, rows.positions)
    sampler.prompt_logprobs(-rows.hidden_states, _came(rows))
    assert torch.equal(sampler.pipeline.finish(started).token_ids, rows.oracle().token_ids)


def test_the_rows_of_a_prompt_are_made_once(monkeypatch):
    """In inference mode too, and what was made there serves outside of it."""
    logits = KINDS["normal"][:321]  # no other test has this vocabulary
    rows = Rows([logits], [SamplingParams()] * 5)
    sampler, given = rows.sampler(), (rows.hidden_states, _came(rows))
    with torch.inference_mode():
        first = sampler.prompt_logprobs(*given, top=TOP)
    monkeypatch.setattr(SamplingBatch, "from_params", None)
    for _ in range(2):
        assert torch.equal(sampler.prompt_logprobs(*given, top=TOP).values, first.values)
    with pytest.raises(TypeError):
        sampler.prompt_logprobs(*given, top=TOP + 1)


def test_an_empty_prompt_has_no_entries():
    sampler = LMHeadSampler(torch.zeros(V, 2), backend="torch")
    got = sampler.prompt_logprobs(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), top=3)
    assert got.values.shape == (0, 4)
