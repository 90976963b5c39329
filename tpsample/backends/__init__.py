"""Hidden states to this rank's best words, and passes over stored logits, by three backends.

The definition is plain PyTorch (`torch_`); Triton (`triton_`) and Numba (`numba_`) return its
words. A room has the same files in each: `launch`, `passes`, `cuts`, `decode`, and what they call.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from tpsample.backends.torch_.cuts import Cuts
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.torch_.room import Room


@cache
def room_of(backend: str) -> Room:
    """Return the room of a backend, which imports what this one needs and no more."""
    room: Room = import_module(f"tpsample.backends.{backend}_.room").ROOM
    return room


def cuts_of(rows: ShardLogits) -> Cuts:
    """Return the search for the cuts of stored rows, by the backend whose passes they have."""
    return room_of(rows.backend).cuts(rows)
