"""Warnings and refusals of a process alone that take more than a call, and what it may do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.mistakes import HIDDEN, WEIGHT, D, V, batch_of, sampler_over
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference, sample
from tpsample.agreement import construction
from tpsample.core.checks import check_current
from tpsample.core.machine import numba_missing

HAS_NUMBA = numba_missing() is None


def test_min_tokens_without_the_ids_it_holds_back_is_a_warning_at_the_call() -> None:
    with pytest.warns(UserWarning, match="min_tokens=2 has no effect without the ids") as warned:
        SamplingParams(min_tokens=2)
    assert [Path(each.filename) for each in warned] == [Path(__file__)]


@pytest.mark.parametrize("interpreter", [True, False])
def test_a_slow_backend_that_nobody_chose_is_told_of(
    interpreter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(construction, "interpreted", lambda: interpreter)
    monkeypatch.setattr(construction, "numba_missing", lambda: "Numba is not there; pip install x")
    chosen, way_out = ("triton", "unset TRITON_INTERPRET") if interpreter else ("torch", "Numba is")
    text = f'^backend: "auto" takes "{chosen}" on this CPU, .*: {way_out}'
    with pytest.warns(UserWarning, match=text) as warned:
        LMHeadSampler(WEIGHT)
    assert [Path(each.filename) for each in warned] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LMHeadSampler(WEIGHT, backend=chosen)
        monkeypatch.setattr(construction, "interpreted", lambda: False)
        monkeypatch.setattr(construction, "numba_missing", lambda: None)
        LMHeadSampler(WEIGHT, backend="numba" if HAS_NUMBA else "torch")


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_numbers_of_numpy_are_numbers(value: Any) -> None:
    params = SamplingParams(temperature=value, top_p=value, seed=np.int64(3))
    assert params == SamplingParams(temperature=0.5, top_p=0.5, seed=3)
    sampler = sampler_over(logit_scale=value, logit_softcap=value * 60)
    logits = reference.logits(HIDDEN, WEIGHT, logit_scale=0.5, logit_softcap=30.0)
    expected = reference.sample(logits, batch_of(), 3).token_ids
    assert torch.equal(sampler(HIDDEN, batch_of(), 3).token_ids, expected)
    with pytest.raises(ValueError, match=r"^logit_scale: expected a finite"):
        sampler_over(logit_scale=10**400)


def test_a_process_that_has_peers_does_not_sample_by_itself(monkeypatch):
    weight = torch.randn(V, D)
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "2")
        for build in (LMHeadSampler, lambda w: sample(w[:1], w, [SamplingParams()], positions=0)):
            with pytest.raises(ValueError, match=rf"^group: {name}=2 says .*init_process_group"):
                build(weight)
        said = rf'^group: "alone" takes the {V} rows .* and {name}=2 says that it has peers'
        with pytest.warns(UserWarning, match=said) as warned:
            LMHeadSampler(weight, group="alone", backend="torch")
        assert warned[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LMHeadSampler(weight, vocab_size=V, group="alone", backend="torch")
        monkeypatch.setenv(name, "1")
        LMHeadSampler(weight)


def test_a_lone_weight_that_ends_in_zeros_is_warned_of():
    weight = torch.cat([torch.randn(V, D), torch.zeros(1, D)])
    with pytest.warns(UserWarning, match="ends in a row of zeros") as warned:
        LMHeadSampler(weight, backend="torch")
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LMHeadSampler(weight, vocab_size=V, backend="torch")
        LMHeadSampler(weight, vocab_size=V + 1, backend="torch")
        LMHeadSampler(weight, shard=VocabShard(0, V + 1), backend="torch")
        LMHeadSampler(torch.zeros(V, D), backend="torch")


def test_no_rows_is_an_empty_output():
    sampler = LMHeadSampler(torch.zeros(V, D), backend="torch")
    batch = SamplingBatch.from_params([], vocab_size=V)
    out = sampler(torch.zeros(0, D), batch, 0, num_samples=2)
    assert out.token_ids.shape == (0, 2) and out.status.shape == (0,)


def test_a_step_needs_its_device_to_be_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current("lm_head_weight", torch.device("cuda:0"))
    with pytest.raises(ValueError, match=r"is on cuda:1, but the current device .* is cuda:0"):
        check_current("lm_head_weight", torch.device("cuda:1"))
