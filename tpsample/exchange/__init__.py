"""Exchanges: how candidate words reach every rank."""

from __future__ import annotations

import torch

from tpsample.exchange.base import Exchange
from tpsample.exchange.collective import CollectiveExchange
from tpsample.exchange.p2p import P2PExchange
from tpsample.exchange.ranks import Ranks

_BY_NAME = {exchange.name: exchange for exchange in (CollectiveExchange, P2PExchange)}


def make_exchange(
    name: str, ranks: Ranks, max_rows: int, chunks: int, device: torch.device
) -> Exchange:
    """The exchange called `name`; one rank needs none, whatever the name."""
    if ranks.world_size == 1:
        return Exchange(ranks, max_rows, chunks, device)
    return _BY_NAME[name](ranks, max_rows, chunks, device)
