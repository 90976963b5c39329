"""Heavy tests begin first, on each of the workers; of combinations the default run has a part."""

from __future__ import annotations

import pytest

from tests.support.tiers import heavy_first, long, thinned


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


def test_a_part_of_all_combinations_has_each_value_and_what_must_stay():
    axes = ["a", "b"], [1, 2, 3], [None, ()]
    cases = thinned(*axes, one_in=2, also=[("b", 1, None)])
    default = [case for case in cases if type(case) is tuple]
    assert default[:3] == [("a", 1, None), ("a", 2, ()), ("a", 3, None)]
    assert default[3:] == [("b", 1, None), ("b", 1, ()), ("b", 2, None), ("b", 3, ())]
    assert len(cases) == 12 and [*long(("a", 1, ()))] == [cases[1]]
