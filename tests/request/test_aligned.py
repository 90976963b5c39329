"""The tensors of a batch that kernels read begin at multiples of 16 bytes, for any rows."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.support.slots import V
from tpsample import SamplingBatch, SamplingParams
from tpsample.request.filters import RowFilters
from tpsample.request.row_filter import BY_FIRST_WORDS, KEEP_TIES, LOWEST

NAMES = (LOWEST, "top_k", "top_p", "min_p", KEEP_TIES, BY_FIRST_WORDS)


def assert_aligned(filters: RowFilters, rows: int) -> None:
    tensors = {name: filters.column(name) for name in NAMES} | {"row_index": filters.row_index}
    for name, tensor in tensors.items():
        assert tensor.shape == (rows,) and tensor.is_contiguous(), name
        assert tensor.data_ptr() % 16 == 0, name


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
def test_columns_begin_at_multiples_of_16_bytes(rows):
    params = [
        SamplingParams(seed=i, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2)
        for i in range(rows)
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    filters = batch.plan.filters
    assert_aligned(filters, rows)
    back = list(range(rows))[::-1]
    assert_aligned(filters.select(back, torch.tensor(back)), rows)
    view = batch.select(torch.arange(rows))._view_of(rows)
    assert_aligned(view.plan.filters, rows)
    tables = view.controls.tables
    for name in ("wants", "min_tokens", "length", "penalties"):
        assert getattr(tables, name).data_ptr() % 16 == 0, name
    its = {"temperature": torch.ones(rows), "seed": torch.arange(rows)}
    its |= {"top_k": torch.full((rows,), 3)}
    with patch("tpsample.core.tensors.READ_ON", ()):
        unknown = SamplingBatch.from_tensors(vocab_size=V, **its)
    assert_aligned(unknown.plan.filters, rows)
