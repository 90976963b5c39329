"""A rank's tensors have its own columns of the logits and no more, and it sends few bytes."""

import pytest
import torch

from tests.support.cases import own_sampler
from tests.support.memory import cost_of
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams, verify

K = 3


def _of_verification(vocab_size: int, rows: int, request: dict) -> list[tuple[int, int]]:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))
    sampler = own_sampler(logits.unsqueeze(1), max_rows=64)
    params = SamplingParams(seed=1, **request).fork(rows)
    batch = SamplingBatch.from_params(params, vocab_size=vocab_size)
    drafts = torch.arange(rows * K).view(rows, K)
    draft = logits[sampler.shard.start : sampler.shard.stop].expand(rows, K, -1)
    given = torch.ones(rows, K + 1, 1), drafts, batch, 3
    return [
        cost_of(sampler, lambda m=method: verify(sampler, *given, method=m, draft_logits=draft))
        for method in ("rejection", "block")
    ]


@pytest.mark.parametrize(
    "request_", [{"top_k": 40, "top_p": 0.9}, *long({})], ids=["filtered", "plain"]
)
def test_a_verification_holds_no_more_than_its_own_columns(request_):
    """The largest tensor has B · (K + 1) · V_local elements; the bytes do not depend on V."""
    rows, vocab_size, world_size = 4, 65536, 4
    own = rows * (K + 1) * vocab_size // world_size
    for found in run_ranks(world_size, _of_verification, vocab_size, rows, request_):
        for num_bytes, elements in found:
            assert own <= elements <= 1.1 * own
            assert 0 < num_bytes < rows * (K + 1) * (50_000 if request_ else 200)


def _of_controls(vocab_size: int, rows: int) -> int:
    """Elements of the largest tensor of building a batch, two steps and an append."""
    sampler = own_sampler(torch.zeros(vocab_size, 2))
    asked = {"frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "bad_words": [[2, 1]]}
    params = [SamplingParams(seed=row, allowed_token_ids=[1, 2], **asked) for row in range(rows)]
    tokens = {"prompt_token_ids": [[3, 5]] * rows, "output_token_ids": [[2]] * rows}

    def steps() -> None:
        batch = SamplingBatch.from_params(params, vocab_size=vocab_size, **tokens)
        for _ in range(2):
            batch.append(sampler(torch.zeros(rows, 2), batch, 0).token_ids)
        tables = batch._view_of(rows).controls.tables
        assert tables.has_penalties and tables.has_bias

    return cost_of(sampler, steps)[1]


def test_controls_have_no_tensor_over_the_vocabulary():
    """[rows, V / 4] at most on 4 ranks, and on one rank [rows, V]: the count sees it."""
    vocab_size, rows = 8192, 48
    for elements in run_ranks(4, _of_controls, vocab_size, rows):
        assert elements <= 1.1 * rows * vocab_size / 4
    (alone,) = run_ranks(1, _of_controls, vocab_size, rows)
    assert alone >= rows * vocab_size
