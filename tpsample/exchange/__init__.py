"""Exchanges: how candidate words reach every rank."""

from __future__ import annotations

import logging

from tpsample.errors import RankMismatch
from tpsample.exchange.base import Exchange
from tpsample.exchange.collective import CollectiveExchange, P2PExchange, TwoLevelExchange
from tpsample.exchange.swap import SwapExchange
from tpsample.settings import Settings

log = logging.getLogger(__name__)

_BY_NAME = {
    exchange.name: exchange
    for exchange in (Exchange, CollectiveExchange, P2PExchange, TwoLevelExchange)
}
SWAPS_ON = ("cpu",)
"""Types of devices whose ranks meet on the host, where one swap is the way of all exchanges."""


def make_exchange(settings: Settings) -> Exchange:
    """Return the exchange of a sampler, as `choose_exchange` named it. Collective.

    Raises:
        RankMismatch: the exchange cannot be set up; every rank raises it.
    """
    name = settings.exchange
    if name == "two_level_peer":
        from tpsample.exchange.peer import TwoLevelPeerExchange  # needs Triton

        return TwoLevelPeerExchange(settings)
    if name == "peer":
        from tpsample.exchange.peer import PeerExchange  # needs Triton

        try:
            return PeerExchange(settings)
        except RankMismatch as error:
            if not settings.may_fall_back:
                raise
            log.warning('exchange: "peer" cannot be set up, using "collective": %s', error)
            name = "collective"
    if name != "none" and settings.device.type in SWAPS_ON:
        return SwapExchange(name, settings)
    return _BY_NAME[name](settings)
