"""Memory that steps write anew: it grows, and what a captured graph may still write stays."""

from __future__ import annotations

import torch

from tpsample.core.tensors import Scratch


def test_a_smaller_step_uses_the_same_memory_again():
    scratch = Scratch(torch.device("cpu"))
    first = scratch.take("logits", torch.float32, 4, 10)
    assert first.shape == (4, 10) and first.dtype == torch.float32
    assert scratch.take("logits", torch.float32, 2, 10).data_ptr() == first.data_ptr()
    assert scratch._memory["logits"].nbytes == 4 * 10 * 4


def test_what_is_outgrown_stays_and_is_no_more_than_what_is_used():
    scratch = Scratch(torch.device("cpu"))
    places = {scratch.take("x", torch.int32, rows, 3).data_ptr(): None for rows in range(1, 200)}
    used, outgrown = scratch._memory["x"], scratch._outgrown
    assert {tensor.data_ptr() for tensor in [*outgrown, used]} - {0} == set(places)
    assert len(places) == 9  # 1, 2, 4 … 256 rows
    assert sum(tensor.nbytes for tensor in outgrown) < used.nbytes
