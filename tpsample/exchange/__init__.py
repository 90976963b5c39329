"""Exchanges: how candidate words reach every rank."""

from __future__ import annotations

import logging
from dataclasses import replace

from tpsample.errors import RankMismatch
from tpsample.exchange.base import Exchange
from tpsample.exchange.collective import CollectiveExchange, P2PExchange
from tpsample.exchange.swap import SwapExchange
from tpsample.settings import Settings

log = logging.getLogger(__name__)

SWAPS_ON = ("cpu",)
"""Types of devices whose ranks meet on the host, where one swap is the way of all exchanges."""


def make_exchange(settings: Settings) -> Exchange:
    """Return the exchange of a sampler, as `choose_exchange` named it. Collective.

    Raises:
        RankMismatch: the exchange cannot be set up; every rank raises it.
    """
    if settings.exchange in ("peer", "two_level_peer"):
        from tpsample.exchange import peer  # needs Triton

        try:
            return peer.PeerExchange(settings)
        except RankMismatch as error:
            if not settings.may_fall_back:
                raise
            log.warning('exchange: "peer" cannot be set up, using "collective": %s', error)
            settings = replace(settings, exchange="collective")
    if settings.exchange == "none":
        return Exchange(settings)
    if settings.device.type in SWAPS_ON:
        return SwapExchange(settings)
    return (P2PExchange if settings.exchange == "p2p" else CollectiveExchange)(settings)
