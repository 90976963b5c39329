"""Exchanges: how candidate words reach every rank."""

from __future__ import annotations

import logging

from tpsample.errors import RankMismatch
from tpsample.exchange.base import Exchange, Setup
from tpsample.exchange.collective import CollectiveExchange
from tpsample.exchange.p2p import P2PExchange
from tpsample.exchange.swap import SwapExchange
from tpsample.exchange.two_level import TwoLevelExchange

log = logging.getLogger(__name__)

_BY_NAME = {
    exchange.name: exchange
    for exchange in (Exchange, CollectiveExchange, P2PExchange, TwoLevelExchange)
}
SWAPS_ON = ("cpu",)
"""Types of devices whose ranks meet on the host, where one swap is the way of all exchanges."""


def make_exchange(name: str, setup: Setup, *, fall_back: bool = False) -> Exchange:
    """Return the exchange called `name`, as `choose_exchange` returned it. Collective.

    Args:
        fall_back: take "collective", and say so, if the memory of "peer" cannot be set up.

    Raises:
        RankMismatch: the exchange cannot be set up; every rank raises it.
    """
    if name == "two_level_peer":
        from tpsample.exchange.two_level_peer import TwoLevelPeerExchange  # needs Triton

        return TwoLevelPeerExchange(setup)
    if name == "peer":
        from tpsample.exchange.peer import PeerExchange  # needs Triton

        try:
            return PeerExchange(setup)
        except RankMismatch as error:
            if not fall_back:
                raise
            log.warning('exchange: "peer" cannot be set up, using "collective": %s', error)
            name = "collective"
    if name != "none" and setup.device.type in SWAPS_ON:
        return SwapExchange(name, setup)
    return _BY_NAME[name](setup)
