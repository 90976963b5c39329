"""The exchange that "auto" chooses, and the reason it gives."""

import pytest
import torch

from tpsample.exchange import choice
from tpsample.exchange.choice import choose_exchange, explain_auto
from tpsample.ranks.ranks import Ranks

NAMES = ("auto", "collective", "p2p", "two_level")


def _report(
    gpu: int, linked: list[int], host: str = "a", obstacle: str = "", visible: int = 8
) -> dict:
    others = [f"gpu {other}" for other in linked]
    found = {"host": host, "device": ["cuda", f"gpu {gpu}"], "visible": visible}
    return {**found, "linked": others, "obstacle": obstacle}


@pytest.mark.parametrize(
    ("reports", "exchange", "reason"),
    [
        ([_report(0, [])], "none", "one rank"),
        ([_report(0, [1]), _report(1, [0])], "peer", "NVLink connects all"),
        ([_report(0, [1]), _report(1, [])], "collective", "does not connect all"),
        ([_report(0, [1, 2]), _report(1, [0, 2]), _report(2, [0, 1])], "peer", "NVLink connects"),
        ([_report(0, [1]), _report(1, [0, 2]), _report(2, [1])], "collective", "not connect all"),
        ([_report(0, [1]), _report(1, [0], host="b")], "collective", "several hosts"),
        ([_report(0, [1]), _report(1, [0], obstacle="no")], "collective", "rank 1: no"),
        ([_report(0, [1]), _report(0, [1])], "collective", "does not connect all"),
        ([_report(0, [], visible=1), _report(1, [], visible=1)], "collective", "CUDA_VISIBLE"),
        ([_report(0, [], visible=1)] * 2, "collective", "does not connect all"),
    ],
    ids=["one", "pair", "one way", "three", "line", "two hosts", "obstacle", "one gpu", "hidden",
         "one gpu of all"],
)  # fmt: skip
def test_auto_takes_peer_where_all_pairs_are_linked_and_says_why(reports, exchange, reason):
    ranks = Ranks()
    ranks.world_size = len(reports)
    assert choose_exchange("auto", ranks, reports) == exchange
    assert reason in explain_auto(ranks, reports)


def _two_ranks() -> Ranks:
    ranks = Ranks()
    ranks.world_size = 2
    return ranks


def test_peer_names_the_variable_that_hides_the_gpus_of_its_peers():
    """Else torch says that devices overlap, since each rank calls its own GPU number 0."""
    reports = [_report(0, [], visible=1), _report(1, [], visible=1)]
    with pytest.raises(ValueError, match=r"sees one GPU.*CUDA_VISIBLE_DEVICES.*collective"):
        choose_exchange("peer", _two_ranks(), reports)
    # Ranks that share the only GPU of a machine, as `gpu_check` has them, hide nothing.
    assert choose_exchange("peer", _two_ranks(), [_report(0, [], visible=1)] * 2) == "peer"


def test_peer_without_links_is_warned_of(caplog):
    assert choose_exchange("peer", _two_ranks(), [_report(0, [1]), _report(1, [0])]) == "peer"
    assert not caplog.records
    assert choose_exchange("peer", _two_ranks(), [_report(0, []), _report(1, [])]) == "peer"
    assert "without NVLink" in caplog.text and "collective" in caplog.text


def test_kernels_write_to_no_peer_of_amd(monkeypatch):
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(choice, "_nvlink", lambda device: (str(device), ["cuda:0", "cuda:1"]))
    devices = [torch.device("cuda", rank) for rank in (0, 1)]
    assert not any(choice.reach("triton", device)["obstacle"] for device in devices)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    reports = [choice.reach("triton", device) for device in devices]
    with pytest.raises(ValueError, match=r'"peer" is not possible.*NVIDIA.*exchange="collective"'):
        choose_exchange("peer", _two_ranks(), reports)
    of_names = {name: choose_exchange(name, _two_ranks(), reports) for name in NAMES}
    assert of_names == {name: name for name in NAMES} | {"auto": "collective"}
    assert "AMD" in explain_auto(_two_ranks(), reports)
