"""A filter that makes errors of warnings, on one rank or on all, leaves no call half done."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.calls import SHARD, B, D, V, batch_of, outcome, params_of, sampler_of, step
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler

ONES = torch.ones(B, D)
TOLD = [
    "batch: built anew for each step",
    "status: row 0 has no token but -1, status NAN",
    "batch: rows 0 and 1 have the same seed and position",
    "batch.temperature: row 0 has -1",
    "lm_head_weight: nothing but this sampler has the Parameter",
]
"""How the warnings of `_mistakes` begin."""


def _sampler_over(weight: torch.Tensor) -> LMHeadSampler:
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return LMHeadSampler(weight, backend="torch", vocab_size=SHARD if alone else V)


def _mistakes() -> list[tuple[LMHeadSampler, Callable[[], Any]]]:
    """Return calls that warn, each with its sampler."""
    owner = nn.Linear(D, SHARD, bias=False)
    sampler, of_orphan = _sampler_over(torch.randn(SHARD, D)), _sampler_over(owner.weight)
    owner.weight = nn.Parameter(torch.zeros(SHARD, D))
    rows = [batch_of(sampler.vocab_size, rows) for rows in (None, params_of(seed=1), None, None)]
    rows[2].temperature[0] = -1.0

    def rebuilt(at: int) -> None:
        sampler(ONES, batch_of(sampler.vocab_size, params_of(frequency_penalty=1.0)), at)

    rebuilt(0)
    rebuilt(1)
    return [
        (sampler, lambda: rebuilt(2)),
        (sampler, lambda: sampler(ONES * torch.nan, rows[0], 1)),
        (sampler, lambda: sampler(ONES, rows[1], 2)),
        (sampler, lambda: sampler(ONES, rows[2], 3)),
        (of_orphan, lambda: of_orphan(ONES, rows[3], 4)),
    ]


def _filtered(strict: tuple[int, ...]) -> list[tuple[str, str]]:
    """Make the mistakes, each with a step after it; `strict` ranks have a filter of "error"."""
    found, rank = [], dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    for sampler, mistake in _mistakes():
        with warnings.catch_warnings():
            warnings.simplefilter("error" if rank in strict else "ignore")
            found.append(outcome(mistake))
        tokens = step(sampler, batch_of(sampler.vocab_size))
        assert step(sampler, batch_of(sampler.vocab_size)) == tokens
    return found


def _told(found: list[tuple[str, str]]) -> None:
    for (kind, text), told in zip(found, TOLD, strict=True):
        assert kind == "UserWarning" and text.startswith(told)


@pytest.mark.parametrize("strict", [(1,), (0, 1)], ids=["one_rank", "all_ranks"])
def test_a_warning_that_a_filter_raises_comes_after_a_whole_call(strict):
    found = run_ranks(2, _filtered, strict, group_timeout_s=10)
    for rank, of_rank in enumerate(found):
        if rank in strict:
            _told(of_rank)
        else:
            assert of_rank == [("nothing raised", "")] * len(TOLD)


def test_a_lone_sampler_steps_on_after_a_warning_that_a_filter_raises():
    _told(_filtered((0,)))


def test_a_warning_after_a_call_names_the_line_of_the_call():
    sampler = _sampler_over(torch.randn(SHARD, D))
    with pytest.warns(UserWarning, match="status: row 0 has no token") as warned:
        sampler(ONES * torch.nan, batch_of(SHARD), 1)
    assert [one.filename for one in warned] == [__file__]


def test_the_error_of_a_call_comes_before_that_of_a_filter(monkeypatch):
    sampler = _sampler_over(torch.randn(SHARD, D))
    batch = batch_of(SHARD, params_of(seed=1))
    monkeypatch.setattr(sampler.pipeline, "finish", lambda _: torch.zeros(2)[3])
    warnings.simplefilter("error")
    with pytest.raises(IndexError):
        sampler(ONES, batch, 1)
    monkeypatch.undo()
    assert len(step(sampler, batch_of(SHARD))) == B


def test_a_failed_row_is_counted_whatever_a_filter_makes_of_its_warning():
    sampler = _sampler_over(torch.randn(SHARD, D))
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="status: row 0"):
        sampler.count_failed(torch.ones(B, dtype=torch.int32))
    assert sampler.counters()["failed_rows"] == B
    sampler.count_failed(torch.ones(B, dtype=torch.int32))


def _builds() -> tuple[str, str]:
    """Build a sampler with a warning, which rank 1 makes an error, and then another one."""
    weight = torch.full((SHARD, D), float(dist.get_rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("error" if dist.get_rank() else "ignore")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tpsample.agreement.construction.default_backend", lambda _: "torch")
            found = outcome(lambda: LMHeadSampler(weight, vocab_size=V))
    step(sampler_of())
    return found


def test_a_warning_that_a_filter_raises_while_ranks_build_a_sampler_is_told_to_all():
    (kind, text), *others = run_ranks(2, _builds, group_timeout_s=10)
    assert kind == "RankMismatch" and text.startswith('rank 1: backend: "auto" takes "torch"')
    assert others == [(kind, text)]
