"""Kernels, operators and exchanges of a verification on a GPU's plan, counted without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.lab.calls import counted
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, sample_draft, verify
from tpsample.speculative import drawn_drafts

V, D, ROWS, K = 1030, 8, 3, 2
BY_RATIO = ["law_tops", "law_rows", "law_sums", "accept", "residual", "emit"]
COLUMN = 8 * ROWS
"""Bytes of one integer per row."""


@pytest.fixture
def no_looks(monkeypatch) -> None:
    """Only a host that can read the laws looks whether drafts are draws of them."""
    monkeypatch.setattr(drawn_drafts, "LOOKS", 0)


@pytest.mark.parametrize("law", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_verification_by_ratio_is_few_launches_and_three_exchanges(no_looks, method, ragged, law):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator)
    hidden_states = torch.randn(ROWS, K + 1, D, generator=generator)
    drafts = torch.randint(0, V, (ROWS, K), generator=generator)
    batch = SamplingBatch.from_params([SamplingParams(seed=i) for i in range(ROWS)], vocab_size=V)
    how: dict[str, Any] = {"method": method}
    if law is not None:
        how["draft_logits"] = torch.randn(ROWS, K, V, generator=generator).to(law)
    if ragged:
        how["lengths"] = torch.arange(ROWS)
    sampler, at = LMHeadSampler(weight, backend="triton"), torch.arange(ROWS)
    verify(sampler, hidden_states, drafts, batch, at, **how)  # the host reads more of a first call
    found = counted(lambda: verify(sampler, hidden_states, drafts, batch, at, **how))

    assert found.kernels == ["drafted_rows", "lm_head", "decode", *BY_RATIO]
    assert len(found.operators) <= 10 + 4 * ragged, found.operators
    positions, places = K + 1, K + 1 if method == "block" else 1
    tops = positions if law is None else positions + K
    assert found.exchanges == [
        ("gather", COLUMN * tops),
        ("sum", COLUMN * positions * (2 if law is None else 4)),
        ("gather", COLUMN * places * (2 if method == "block" else 1)),
    ]


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_a_draft_is_one_launch_and_its_decoding(method):
    batch = SamplingBatch.from_params([SamplingParams(seed=i) for i in range(ROWS)], vocab_size=V)
    sampler, at = LMHeadSampler(torch.zeros(V, D), backend="triton"), torch.arange(ROWS)
    given = torch.randn(ROWS, V).bfloat16(), batch, at
    found = counted(lambda: sample_draft(sampler, *given, 1, method=method))
    assert found.kernels == ["draft", "decode"]
    assert len(found.operators) <= 12, found.operators
    assert found.exchanges == [("gather", COLUMN)]
