"""The messages that users read when they do something wrong: the argument, what was expected, what
came, and the way out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.mistakes import HIDDEN, WEIGHT, batch_of, sampler_over
from tests.support.wrong_batches import BATCHES
from tests.support.wrong_samplers import SAMPLERS
from tpsample import LMHeadSampler, RankMismatch, SamplingParams, reference
from tpsample.agreement import construction
from tpsample.core.machine import numba_missing

HAS_NUMBA = numba_missing() is None
ALONE = BATCHES | SAMPLERS
ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, UserWarning)


@pytest.mark.parametrize("name", ALONE)
def test_a_process_alone_is_told(name: str) -> None:
    call, message = ALONE[name]
    with warnings.catch_warnings(), pytest.raises(ERRORS) as raised:
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message='backend: "auto"')
        call()
    text = str(raised.value)
    assert (text[: len(message)] if message.endswith("(") else text) == message
    assert not isinstance(raised.value, RankMismatch)  # one rank disagrees with nobody


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
