"""Which exchange "auto" chooses, and the reason it gives."""

import pytest

from tpsample.exchange.choice import choose_exchange, explain_auto
from tpsample.ranks.ranks import Ranks


def _report(gpu: int, linked: list[int], host: str = "a", obstacle: str = "") -> dict:
    others = [f"gpu {other}" for other in linked]
    return {"host": host, "device": ["cuda", f"gpu {gpu}"], "linked": others, "obstacle": obstacle}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([_report(0, [])], "none"),
        ([_report(0, [1]), _report(1, [0])], "peer"),
        ([_report(0, [1]), _report(1, [])], "collective"),
        ([_report(0, [1, 2]), _report(1, [0, 2]), _report(2, [0, 1])], "peer"),
        ([_report(0, [1]), _report(1, [0, 2]), _report(2, [1])], "collective"),
        ([_report(0, [1]), _report(1, [0], host="b")], "collective"),
        ([_report(0, [1]), _report(1, [0], obstacle="interpreted")], "collective"),
        ([_report(0, [1]), _report(0, [1])], "collective"),
    ],
    ids=["one", "pair", "one way", "three", "line", "two hosts", "obstacle", "one gpu"],
)
def test_auto_takes_peer_where_all_pairs_are_linked(reports, expected):
    ranks = Ranks()
    ranks.world_size = len(reports)
    assert choose_exchange("auto", ranks, reports) == expected


@pytest.mark.parametrize(
    ("reports", "exchange", "reason"),
    [
        ([_report(0, [])], "none", "one rank"),
        ([_report(0, [1]), _report(1, [0])], "peer", "NVLink connects all"),
        ([_report(0, [1]), _report(1, [])], "collective", "does not connect all"),
        ([_report(0, [1]), _report(1, [0], host="b")], "collective", "several hosts"),
        ([_report(0, [1]), _report(1, [0], obstacle="no")], "collective", "rank 1: no"),
    ],
)
def test_the_reason_fits_the_choice(reports, exchange, reason):
    ranks = Ranks()
    ranks.world_size = len(reports)
    assert choose_exchange("auto", ranks, reports) == exchange
    assert reason in explain_auto(ranks, reports)
