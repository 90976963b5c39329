"""Hidden states to this rank's best words, and passes over stored logits, by three backends.

The definition is plain PyTorch (`torch_`); Triton (`triton_`) and Numba (`numba_`) return its
words. A room has the same files in each: `launch`, `passes`, `cuts`, `decode`, and what they call.
"""

from __future__ import annotations

from tpsample.backends.torch_.cuts import Cuts
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.torch_.room import Room


def room_of(backend: str) -> Room:
    """Return the room of a backend, which imports what this one needs and no more."""
    if backend == "torch":
        from tpsample.backends.torch_.room import ROOM as torch_

        return torch_
    if backend == "numba":
        from tpsample.backends.numba_.room import ROOM as numba_

        return numba_
    from tpsample.backends.triton_.room import ROOM as triton_

    return triton_


def cuts_of(rows: ShardLogits) -> Cuts:
    """Return the search for the cuts of stored rows, by the backend whose passes they have."""
    return room_of(rows.backend).cuts(rows)
