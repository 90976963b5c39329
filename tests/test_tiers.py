"""Heavy tests begin first, on as many workers as there are."""

from __future__ import annotations

import pytest

from tests.support.tiers import heavy_first


@pytest.mark.parametrize("heavy", [[], [9], [1, 5, 9], [1, 4, 5, 6, 7, 9]])
@pytest.mark.parametrize("workers", [1, 2, 4, 30])
def test_each_worker_begins_with_its_part_of_the_heavy_tests(heavy, workers):
    items, begin = heavy_first(range(23), heavy, workers), 0
    assert [each for each in items if each not in heavy] == sorted({*range(23)} - {*heavy})
    assert len(items) == 23
    for worker in range(workers):
        own = heavy[worker::workers]
        assert items[begin : begin + len(own)] == own
        begin += max(len(own), (23 - begin) // (workers - worker))
