"""Choose the exchange of a sampler, from every rank's report, so that ranks cannot disagree."""

from __future__ import annotations

import logging
import socket
from typing import Any

import torch

from tpsample.core.machine import amd, interpreted
from tpsample.ranks.ranks import Ranks

_LOG = logging.getLogger(__name__)


def reach(backend: str, device: torch.device) -> dict[str, Any]:
    """Return what a rank reports about reaching its peers' memory, as JSON values.

    Returns:
        host; device: type and UUID, which means the same to every process; visible: how many GPUs
        this process sees; linked: devices that NVLink connects with it; obstacle: why its kernels
        could not write to peers, or "".
    """
    obstacle = ""
    if backend != "triton":
        obstacle = (
            f'backend "{backend}" has no kernel that writes to peers; use a GPU, or the '
            "interpreter with TRITON_INTERPRET=1"
        )
    elif device.type == "cuda" and interpreted():
        obstacle = "the interpreter cannot write the memory of a GPU; unset TRITON_INTERPRET"
    elif device.type == "cuda" and amd():
        obstacle = "the kernels write to peers on NVIDIA GPUs alone, and this one is AMD's"
    uuid, linked = _nvlink(device) if device.type == "cuda" else ("", [])
    return {
        "host": socket.gethostname(),
        "device": [device.type, uuid],
        "visible": torch.cuda.device_count() if device.type == "cuda" else 0,
        "linked": linked,
        "obstacle": obstacle,
    }


def choose_exchange(name: str, ranks: Ranks, reports: list[dict[str, Any]]) -> str:
    """Return the exchange for the argument `name`; it is "none" for one rank.

    "auto" is "peer" where the ranks have a GPU each and NVLink connects all pairs, "collective"
    otherwise. "two_level" is "two_level_peer" where `peer` could serve on every host by itself.

    Args:
        reports: what `reach` returned on each rank.

    Raises:
        ValueError: "peer" is impossible here; every rank raises the same.
    """
    if ranks.world_size == 1:
        return "none"
    one_process = ranks.inbox_memory is not None
    obstacles = _obstacles(reports)
    if name == "auto" and not one_process:
        return "collective" if _against_peer(reports) else "peer"
    if one_process and name not in ("auto", "peer"):
        raise ValueError(f'exchange: several ranks in one process have "peer" alone, got "{name}"')
    if name == "two_level" and not obstacles and _all_linked_inside(reports):
        return "two_level_peer"
    if name in ("auto", "peer"):
        if len({report["host"] for report in reports}) > 1 and reports[0]["device"][0] == "cpu":
            obstacles = ["the ranks are CPUs of several hosts"]
        if not one_process and (hidden := _hidden_gpus(reports)):
            obstacles.append(hidden)
        if obstacles:
            raise ValueError(
                f'exchange: "peer" is not possible here: {"; ".join(obstacles)}; '
                'or use exchange="collective"'
            )
        if not one_process and reports[0]["device"][0] == "cuda" and not _all_linked(reports):
            _LOG.warning(
                'exchange: "peer" without NVLink between all pairs of GPUs, or torch cannot tell: '
                'words go over PCIe, which nobody has measured; compare with exchange="collective"'
            )
        return "peer"
    return name


def explain_auto(ranks: Ranks, reports: list[dict[str, Any]]) -> str:
    """Say to people why "auto" is what `choose_exchange` returns."""
    if ranks.world_size == 1:
        return "one rank has nobody to exchange with"
    return _against_peer(reports) or "NVLink connects all pairs of GPUs"


def _obstacles(reports: list[dict[str, Any]]) -> list[str]:
    return [
        f"rank {r}: {report['obstacle']}" for r, report in enumerate(reports) if report["obstacle"]
    ]


def _against_peer(reports: list[dict[str, Any]]) -> str:
    """Say why "auto" is not "peer" among several processes; "" where it is."""
    if reports[0]["device"][0] == "cpu":
        return "the ranks are CPUs"
    if obstacles := _obstacles(reports):
        return obstacles[0]
    if len({report["host"] for report in reports}) > 1:
        return 'the ranks are on several hosts; exchange="two_level" uses the links inside each'
    if hidden := _hidden_gpus(reports):
        return hidden
    if not _all_linked(reports):
        return "NVLink does not connect all pairs of GPUs, or torch cannot tell"
    return ""


def _hidden_gpus(reports: list[dict[str, Any]]) -> str:
    """Say that ranks of one host see no GPU but their own; "" where they do, or have one GPU."""
    for one in reports:
        here = [report["device"][1] for report in reports if report["host"] == one["host"]]
        if one["visible"] == 1 and len(set(here)) > 1:
            return (
                f"a rank on {one['host']} sees one GPU and its peers have others, so torch maps no "
                "memory between them; let every rank see all GPUs of its host "
                "(CUDA_VISIBLE_DEVICES, or the launcher that sets it) and pass its own device"
            )
    return ""


def _all_linked_inside(reports: list[dict[str, Any]]) -> bool:
    """Whether on every host all pairs are linked, or are CPUs, which share memory."""
    if reports[0]["device"][0] == "cpu":
        return True
    hosts = {report["host"] for report in reports}
    return all(_all_linked([r for r in reports if r["host"] == host]) for host in hosts)


def _all_linked(reports: list[dict[str, Any]]) -> bool:
    return all(
        a["host"] == b["host"] and b["device"][1] in a["linked"]
        for rank, a in enumerate(reports)
        for b in reports[:rank] + reports[rank + 1 :]
    )


def _nvlink(device: torch.device) -> tuple[str, list[str]]:
    """Return the UUIDs of a GPU and of the GPUs that NVLink connects with it, none if unknown."""
    own = torch.cuda.current_device() if device.index is None else device.index
    try:
        from torch._C import _distributed_c10d
        from torch._C._autograd import DeviceType

        detect = _distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
        gpus = range(torch.cuda.device_count())
        uuids = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus]
        links = detect(DeviceType.CUDA, "nvlink").matrix[own]
        return uuids[own], [uuid for uuid, count in zip(uuids, links, strict=True) if count]
    except (ImportError, AttributeError, RuntimeError):
        return str(device), []
