"""The error that says which ranks are lost, and what is known of the reason."""

from __future__ import annotations

from collections.abc import Sequence

from tpsample.errors import PeerLost

EXCHANGE = "exchange"
"""The call of samplers in which ranks are lost, as messages name it."""
RESET = "call reset() on each"
NEW_GROUP = "take a new process group"
"""The advice to ranks that all live: to those of a sampler, and to those that are building one."""


def peer_lost(
    missing: Sequence[int],
    late: Sequence[int],
    step: int | None,
    said: dict[int, str],
    *,
    since: str = "",
    alone: bool = False,
    way_out: str = RESET,
    call: str = EXCHANGE,
) -> PeerLost:
    """Return the error that names the ranks that did not answer, or those that were too late.

    Args:
        since: from when on steps are counted, in words; nothing for the start.
        alone: several ranks are missing, and nobody else answered.
        way_out: what helps if all ranks live.
        call: in which they were lost.
    """
    when = "" if step is None else f" in step {step}{since}"
    which = "that step" if since else f"step {step}"
    after = "" if step is None else f"; tokens from {which} on are not on every rank"
    if missing:
        who = f"{names(missing)} did not answer{when}"
        if alone:
            who += ", and no other rank did, so the network or the store may be at fault"
    else:
        who = f"{names(late) if late else 'some rank'} gave up or was too late{when}, but answers"
    reasons = "".join(f"; rank {rank}: {text}" for rank, text in said.items())
    silent = [rank for rank in missing if rank not in said]
    first = f"look for an error on {names(silent)}, then " if silent and not alone else ""
    return PeerLost(
        f"{call}: {who}{reasons}{after}. If all ranks live, {first}{way_out}; else restart the "
        "job without the lost ones",
        missing or late,
        step,
    )


def names(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
