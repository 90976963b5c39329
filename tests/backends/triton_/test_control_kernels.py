"""The kernel of masks against its PyTorch twin; the tokens of controls are in `tests.sampler`."""

import random
from dataclasses import replace

import pytest
import torch

from tests.fuzz.requests import THEMES, random_row
from tests.support.cases import Case
from tests.support.rows import Row, batch_of, bitmask_of
from tests.support.tiers import long
from tests.support.virtual import assert_all_equal, small_tiles
from tpsample import LMHeadSampler, SamplingBatch, VocabShard, reference
from tpsample.backends.triton_.arguments import make_mask
from tpsample.core.row_noise import SeedSource
from tpsample.request.controls.apply import ControlRows, build_mask

V, ROWS = 331, 24
SHARDS = [VocabShard(0, V), VocabShard(0, 90), VocabShard(91, 200), VocabShard(33, 34),
          VocabShard(318, V)]  # fmt: skip


def _batch() -> SamplingBatch:
    """Rows of all controls, and one whose drafts end its min_tokens."""
    pick = random.Random(0)
    rows = [random_row(pick, V, THEMES["controls"]) for _ in range(ROWS - 1)]
    ending = {"seed": 1, "min_tokens": 7, "stop_token_ids": [3, 100]}
    return batch_of([*rows, Row.of(ending, prompt=[], output=[5] * 5)], V)


def _grammar(rows: int) -> torch.Tensor:
    rng = random.Random(5)
    return bitmask_of(
        [None if row % 3 == 0 else set(rng.sample(range(V), 150)) for row in range(rows)], V
    )


def _same_bits(batch: SamplingBatch, shard: VocabShard) -> None:
    assert isinstance(batch._view_of(batch.rows).controls, ControlRows)
    state = batch._view_of(batch.rows).controls.tables.state(shard)
    expected = build_mask(batch._view_of(batch.rows).controls, state).clone()
    state.mask_buffer(batch.rows).fill_(0x5A5A5A5A)
    assert torch.equal(make_mask(batch._view_of(batch.rows).controls, state), expected)


@pytest.mark.parametrize("shard", [*SHARDS[1:3], *long(SHARDS[0], *SHARDS[3:])], ids=str)
def test_the_mask_kernel_is_its_twin(shard):
    batch = _batch()
    _same_bits(batch, shard)
    batch.grammar_bitmask = _grammar(ROWS)
    _same_bits(batch, shard)
    forced = torch.full((ROWS,), -1)
    forced[::4] = torch.arange(0, V, 17)[: len(forced[::4])]
    batch.forced_token_ids = forced
    _same_bits(batch, shard)

    drafts = torch.randint(4, (ROWS, 3), generator=torch.Generator().manual_seed(3))
    undrafted = _batch()
    undrafted._draw_seeds(SeedSource(1))
    _same_bits(undrafted._with_drafts(drafts), shard)


def test_the_state_of_every_id_is_reached():
    """The likeliest ids of a row are penalised, or another one is given a bias."""
    case = Case.make(V, ROWS, dtype=torch.float32)
    params = [replace(each, presence_penalty=2) for each in case.params]
    for row in range(1, ROWS, 2):
        params[row] = replace(case.params[row], logit_bias={29 * row % V: 9.0})
    likely = reference.logits(case.hidden_states, case.weight).topk(3).indices
    case = replace(case, params=params, tokens=likely.tolist())
    sampler = small_tiles(LMHeadSampler(case.weight, backend="triton"))
    out = sampler(case.hidden_states, case.batch, case.positions)
    assert_all_equal([out], case.oracle())
