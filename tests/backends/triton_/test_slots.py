"""The kernels that read slots, and their twins in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.support.slots import GPU, V, sampler_of
from tpsample import SamplingBatch, SamplingParams
from tpsample.backends.triton_ import slots as launches


@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_rows_find_the_slots_that_they_name(rows):
    """Slots that are taken, empty or not there, padding, and numbers that come twice, also in
    another block of rows."""
    generator = torch.Generator().manual_seed(rows)
    batch = SamplingBatch.of_slots(150, vocab_size=V)
    taken = torch.randperm(150, generator=generator)[:120].tolist()
    batch.put(taken, [SamplingParams(seed=slot, temperature=slot / 9) for slot in taken])
    named = torch.randint(-3, 160, (rows,), generator=generator)
    named[1::9], named[rows // 2], named[rows // 3] = -1, -(2**63), 2**63 - 1
    plain, found = batch.select(named), batch.select(named.clone())
    named.zero_()  # they mean what they held when they were made
    found._read_slots(launches.read_slots)
    plain._read_slots()
    (one, skipped, *numbers), (other, kernels, *its) = plain._slot_rows, found._slot_rows
    assert one.equal(other)
    assert all(map(torch.equal, (*skipped, *numbers), (*kernels, *its)))
    assert rows < 64 or 0 < int(skipped.bad.sum()) < int(skipped.rows.sum()) < rows


def test_a_step_reads_what_was_written_to_the_batch_after_the_selection():
    batch = SamplingBatch.of_slots(3, vocab_size=V)
    batch.put([0, 1, 2], [SamplingParams(seed=slot) for slot in range(3)])
    sampler, hidden_states = sampler_of("triton"), torch.randn(2, 8)
    with GPU:
        rows = batch.select(torch.tensor([2, 0]))
        batch.seed[2] = 77
        out = sampler(hidden_states, rows, 5)
        assert out.seeds.tolist() == [77, 0]
        batch.seed[2] = 78  # and a selection that steps again reads anew
        assert sampler(hidden_states, rows, 6).seeds.tolist() == [78, 0]
        batch.seed[2] = 79
        assert rows._view_of(2).seed.tolist() == [79, 0]
        rows.seed[0] = 1
        with pytest.raises(ValueError, match=r"^selection.seed: is a copy"):
            sampler(hidden_states, rows, 7)
