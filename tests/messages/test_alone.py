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
from tpsample import RankMismatch, SamplingParams, reference

ALONE = BATCHES | SAMPLERS
ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, UserWarning)


@pytest.mark.parametrize("name", ALONE)
def test_a_process_alone_is_told(name: str) -> None:
    call, message = ALONE[name]
    with warnings.catch_warnings(), pytest.raises(ERRORS) as raised:
        warnings.simplefilter("error", UserWarning)
        call()
    text = str(raised.value)
    assert (text[: len(message)] if message.endswith("(") else text) == message
    assert not isinstance(raised.value, RankMismatch)  # one rank disagrees with nobody


def test_min_tokens_without_the_ids_it_holds_back_is_a_warning_at_the_call() -> None:
    with pytest.warns(UserWarning, match="min_tokens=2 has no effect without the ids") as warned:
        SamplingParams(min_tokens=2)
    assert [Path(each.filename) for each in warned] == [Path(__file__)]


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
