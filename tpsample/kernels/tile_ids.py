"""The token ids that are the rows of a tile: neighbours, or groups of neighbours from a list."""

from typing import NamedTuple

import triton
import triton.language as tl

GROUP = tl.constexpr(16)
"""Ids of a group: whole quads, whose noise is drawn together, and few enough to waste little."""


class TileIds(NamedTuple):
    """The ids of a tile; they begin at a multiple of four, and so does every group.

    Without a list, `first` is the tile's first id. With one, it is the tile's first place, where a
    group has 16 places and the list holds every group's first id.
    """

    first: tl.tensor
    listed_ptr: tl.tensor | None  # int32
    num_listed: tl.tensor | None


@triton.jit
def token_ids(ids, stop, COUNT: tl.constexpr):
    """Return the ids of the tile's first COUNT rows, int32; behind the list they are `stop`."""
    if ids.listed_ptr is None:
        return ids.first + tl.arange(0, COUNT)
    else:
        place = ids.first + tl.arange(0, COUNT)
        in_list = place // GROUP < ids.num_listed
        first = tl.load(ids.listed_ptr + place // GROUP, mask=in_list, other=0)
        return tl.where(in_list, first + place % GROUP, stop)


@triton.jit
def quads(ids, stop, COUNT: tl.constexpr):
    """Return the quads, id // 4, of the tile's first 4 · COUNT rows, int32."""
    if ids.listed_ptr is None:
        return ids.first // 4 + tl.arange(0, COUNT)
    else:
        place = ids.first + 4 * tl.arange(0, COUNT)
        in_list = place // GROUP < ids.num_listed
        first = tl.load(ids.listed_ptr + place // GROUP, mask=in_list, other=0)
        return tl.where(in_list, first + place % GROUP, stop) // 4
