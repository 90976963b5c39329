"""How long a grid of programs takes on a GPU that is absent: bytes, waves and instructions.

A program (one tile) is in three phases, one after the other:

    prologue   2 µs, spread over ±25 %: three dependent cold loads, Philox, the first stages; after
               0.5 µs of it the program asks for the weights of its first stages (`PREFETCH`)
    loads      at the least of: its share of the memory's bandwidth, of L2's and of its SM's link,
               the bytes it has in flight ÷ latency, its share of the SM's matrix units
    epilogue   instructions per logit ÷ the rate at which the SM issues them

An SM runs as many programs as its registers and shared memory hold; the next tile starts when one
ends. Every constant below is an assumption with its source.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tpsample.local.tiles import Tile

LATENCY_US = 0.82
"""Of a load from memory under load; published microbenchmarks of Hopper say 0.80 to 0.85."""
PROLOGUE_US, SPREAD = 2.0, 0.25
PREFETCH_US = 0.5
"""From a program's start to its prefetch: arithmetic of addresses, and no load before it."""
GRAPH_US, SECOND_KERNEL_US = 1.5, 1.5
ROW_PIECES = 0.97
"""Share of the bandwidth that reads of 128-byte pieces of rows reach."""
MATRIX_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Chip:
    """A GPU as the model knows it.

    Attributes:
        sms: streaming multiprocessors.
        memory: bytes per µs that a stream read reaches.
        l2: bytes per µs from L2 to the SMs; the plots of FlashSampling sit on 6.5 to 8.2 million.
        clock: cycles per µs.
        link: bytes per cycle from L2 to one SM.
        flops: dense bf16 operations per cycle of one SM.
        row_pieces: share of `memory` that reads of 128-byte pieces of rows reach.
        graph_us, second_kernel_us: to start a graph, and another kernel in it.
    """

    name: str
    sms: int
    memory: float
    l2: float = 7.5e6
    clock: float = 1750.0
    link: float = 64.0
    flops: float = 4096.0
    row_pieces: float = ROW_PIECES
    graph_us: float = GRAPH_US
    second_kernel_us: float = SECOND_KERNEL_US


@dataclass(frozen=True)
class Grid:
    """A launch, as the model knows it.

    Attributes:
        tiles: programs.
        resident: of them on an SM at once.
        weight_bytes: that one program reads.
        prefetched: of these, what it asks for first.
        readers: programs that read the same weights; the first brings them into L2.
        through_l2: bytes through L2 per byte of weights.
        in_flight: bytes of weights that one program has under way.
        operations: matrix operations per byte of weights, counted as those in bf16.
        epilogue_us: of one program.
    """

    tiles: int
    resident: int
    weight_bytes: float
    prefetched: float
    readers: int
    through_l2: float
    in_flight: float
    operations: float
    epilogue_us: float

    def load_rate(self, chip: Chip, loading: int, beside: int) -> float:
        """Bytes of weights per µs of one program, beside others on the GPU and on its SM."""
        return min(
            chip.memory * chip.row_pieces * self.readers / loading,
            chip.l2 / (loading * self.through_l2),
            chip.link * chip.clock / (beside * self.through_l2),
            self.in_flight / LATENCY_US,
            MATRIX_EFFICIENCY * chip.flops * chip.clock / (beside * self.operations),
        )


def epilogue_us(chip: Chip, instructions: float, num_warps: int) -> float:
    """Return how long a program issues its instructions, given per warp of 32 threads."""
    # One warp per scheduler hides less latency than two.
    return instructions / 32 / (4 * (0.55 if num_warps <= 4 else 0.75) * chip.clock)


def grid_of(
    chip: Chip,
    tile: Tile,
    tiles: int,
    resident: int,
    hidden_size: int,
    per_logit: float,
    *,
    itemsize: int = 2,
    limbs: int = 1,
    readers: int = 1,
) -> Grid:
    """Return the launch of a product with a tile.

    Args:
        tiles, resident, readers: as in `Grid`.
        per_logit: instructions of the epilogue.
        itemsize: bytes of a weight.
        limbs: columns that stand for a row of hidden states, of `itemsize` bytes each. A matrix
            unit does twice as many operations on 8 bits, as there are twice as many per byte.
    """
    columns = limbs * tile.block_b
    weight_bytes = float(tile.block_v * hidden_size * itemsize)
    return Grid(
        tiles=tiles,
        resident=resident,
        weight_bytes=weight_bytes,
        prefetched=min(1.0, tile.num_stages * tile.block_d / hidden_size) * weight_bytes,
        readers=readers,
        through_l2=1 + columns / tile.block_v,
        # At the wait one stage is in use and one may be unfinished.
        in_flight=(tile.num_stages - 1.5) * tile.block_v * tile.block_d * itemsize,
        operations=columns,
        epilogue_us=epilogue_us(chip, tile.block_v * tile.block_b * per_logit, tile.num_warps),
    )


def duration_us(chip: Chip, grid: Grid) -> float:
    """Return when the last program ends."""
    # Events in order of time: a program prefetches, goes on to load the rest when that and its
    # prologue are over, and ends. Loads share bandwidth, so what is left of them is counted at the
    # rate that all have in common.
    slots = range(min(grid.tiles, chip.sms * grid.resident))
    waiting = grid.tiles - len(slots)
    events: list[tuple[float, int, str]] = []  # (time, slot, "prefetch", "load" or "end")
    loading: dict[int, float] = {}  # slot: bytes left
    prologue_ends: dict[int, float] = {}  # slot: time, of programs that have yet to load the rest
    on_sm = [0] * chip.sms

    def start(number: int, slot: int) -> None:
        spread = 1 + SPREAD * ((number * 0.618) % 1 * 2 - 1)
        prologue_ends[slot] = now + PROLOGUE_US * spread
        heapq.heappush(events, (now + PREFETCH_US * spread, slot, "prefetch"))

    now, started = 0.0, len(slots)
    for slot in slots:
        start(slot, slot)
    while events or loading:
        beside = {slot: on_sm[slot % chip.sms] for slot in loading}
        rate_of = {each: grid.load_rate(chip, len(loading), each) for each in {*beside.values()}}
        rates = {slot: rate_of[each] for slot, each in beside.items()}
        first_done = min(
            ((left / rates[slot], slot) for slot, left in loading.items()), default=(1e30, -1)
        )
        until = events[0][0] - now if events else 1e30
        step = min(first_done[0], until)
        for slot in loading:
            loading[slot] -= rates[slot] * step
        now += step
        if first_done[0] <= until:
            slot = first_done[1]
            del loading[slot]
            on_sm[slot % chip.sms] -= 1
            if slot in prologue_ends:
                heapq.heappush(events, (max(now, prologue_ends.pop(slot)), slot, "load"))
            else:
                heapq.heappush(events, (now + grid.epilogue_us, slot, "end"))
        else:
            _, slot, what = heapq.heappop(events)
            if what == "end":
                if waiting:
                    waiting -= 1
                    start(started, slot)
                    started += 1
            else:
                loading[slot] = (
                    grid.prefetched if what == "prefetch" else grid.weight_bytes - grid.prefetched
                )
                on_sm[slot % chip.sms] += 1
    return now
