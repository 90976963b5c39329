"""Exchanges: how candidate words reach every rank."""

from __future__ import annotations

import torch

from tpsample.exchange.base import Exchange
from tpsample.exchange.collective import CollectiveExchange
from tpsample.exchange.p2p import P2PExchange
from tpsample.exchange.ranks import Ranks

_BY_NAME = {exchange.name: exchange for exchange in (Exchange, CollectiveExchange, P2PExchange)}


def make_exchange(
    name: str, ranks: Ranks, max_rows: int, chunks: int, device: torch.device
) -> Exchange:
    """The exchange called `name`, a name that `choose_exchange` returned. Collective."""
    if name == "peer":
        from tpsample.exchange.peer import PeerExchange  # needs Triton

        return PeerExchange(ranks, max_rows, chunks, device)
    return _BY_NAME[name](ranks, max_rows, chunks, device)
