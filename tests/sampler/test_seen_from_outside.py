"""Numbers that an engine exports of a sampler, and ranges that a profile shows of a step."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler

from tests.support.commands import ROOT
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, verify
from tpsample.core.ranges import RANGES

V, D, B, K = 50, 8, 3, 2


def _steps(**options: object) -> tuple[LMHeadSampler, SamplingBatch]:
    """Take three steps, two of them of two samples per row, and a verification."""
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    if dist.is_initialized():
        shard = VocabShard.even(V, dist.get_rank(), dist.get_world_size())
        weight = weight[shard.start : shard.stop]
    sampler = LMHeadSampler(weight, vocab_size=V, max_rows=B * (K + 1), **options)
    params = [SamplingParams(top_p=0.9, seed=seed) for seed in range(B)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    hidden_states = torch.ones(B, D)
    for position, num_samples in ((1, None), (2, 2), (3, 2)):
        sampler(hidden_states, batch, position, num_samples=num_samples)
    drafts = torch.zeros(B, K, dtype=torch.int64)
    verify(sampler, hidden_states[:, None].expand(B, K + 1, D).contiguous(), drafts, batch, 4)
    sampler.refresh()
    return sampler, batch


def _counters() -> tuple[dict[str, object], int]:
    """Return what a rank counts, and the bytes of integers beside words among it."""
    sampler = _steps()[0]
    return sampler.counters(), sampler.ranks.bytes_sent


COUNTED = {"steps": 4, "rows": 4 * B, "tokens": B + 2 * 2 * B + B * (K + 1), "refreshes": 1}
NONE = {"failed_rows": 0, "lost_ranks": []}


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_rank_alone_counts_what_it_does(backend: str) -> None:
    found = _steps(backend=backend)[0].counters()
    rounds = found.pop("second_rounds")
    assert found == {**COUNTED, **NONE, "bytes_sent": 0, "waited_s": 0.0} and rounds >= 0


def test_ranks_count_bytes_and_how_long_they_waited() -> None:
    for found, beside in run_ranks(2, _counters):
        assert found | COUNTED | NONE == json.loads(json.dumps(found))
        assert found["bytes_sent"] == 8 * COUNTED["tokens"] + beside and 0 < found["waited_s"] < 60


def test_the_page_and_the_docstring_name_each_counter() -> None:
    names = set(_steps(backend="torch")[0].counters())
    page = (ROOT / "tpsample" / "README.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []
    assert [
        name
        for name in names
        if f"{name}: " not in (LMHeadSampler.counters.__doc__ or "") and name != "rows"
    ] == []


def test_a_profile_shows_the_parts_of_a_step() -> None:
    with torch.profiler.profile() as recorded:
        _steps(backend="torch")
    shown = {each.key: each.count for each in recorded.key_averages()}
    assert {name: shown.get(f"tpsample: {name}") for name in RANGES} == {
        "head": 4,
        "exchange": 4,
        "filters": 4,
        "verification": 1,
    }


def test_no_range_is_made_while_nobody_records() -> None:
    with mock.patch.object(profiler, "record_function", side_effect=AssertionError):
        _steps(backend="torch")
