"""Heavy tests begin first, on as many workers as there are."""

from __future__ import annotations

import types

import pytest
from xdist.scheduler import WorkStealingScheduling

from tests.support.tiers import heavy_first


class Worker:
    """Notes the tests that the scheduler of pytest-xdist sends."""

    shutting_down, gateway = False, types.SimpleNamespace(id="worker")

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def send_steal(self, indices: list[int]) -> None:
        """Nobody has finished a test yet."""

    def shutdown(self) -> None:
        """A worker with one test runs it at once."""


@pytest.mark.parametrize("heavy", [[], [9], [1, 5, 9], [1, 4, 5, 6, 7, 9]])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_each_worker_begins_with_its_part_of_the_heavy_tests(heavy, workers):
    items = heavy_first(range(23), heavy, workers)
    assert sorted(items) == list(range(23))
    assert [each for each in items if each not in heavy] == sorted({*items} - {*heavy})
    config = types.SimpleNamespace(getvalue=lambda _: ["popen"] * workers)
    schedule = WorkStealingScheduling(config, types.SimpleNamespace(workstealsched=print))
    nodes = [Worker() for _ in range(workers)]
    for node in nodes:
        schedule.add_node(node)
        schedule.add_node_collection(node, [*map(str, items)])
    schedule.schedule()
    for number, node in enumerate(nodes):
        own = heavy[number::workers]
        assert [items[index] for index in node.sent][: len(own)] == own


def test_fewer_tests_than_workers_are_all_there():
    assert heavy_first("ab", "b", 4) == ["b", "a"]
