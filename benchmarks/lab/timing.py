"""Time several candidates in one process, in turn: A B C A B C …, since a GPU drifts.

On a GPU each candidate is captured in a CUDA graph after a warm-up and its replay is timed with
events, with a cold L2; one that cannot be captured is timed as it is. On a CPU the wall clock is
read around the call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch

WARM_UP_CALLS = 3
FLUSH_BYTES = 512 * 2**20
"""Read between replays: several times the L2 of any GPU, and long enough (about 120 µs at 4 TB/s)
for the host to enqueue the next replay meanwhile."""


@dataclass(frozen=True)
class Timing:
    """The times of one candidate.

    Attributes:
        times_us: one per repeat, in order.
        graph: whether they are CUDA graph replays.
    """

    times_us: tuple[float, ...]
    graph: bool

    @property
    def median_us(self) -> float:
        return self._quartiles[1]

    @property
    def _quartiles(self) -> list[float]:
        if len(self.times_us) == 1:
            return [self.times_us[0]] * 3
        return quantiles(self.times_us, n=4, method="inclusive")

    def fields(self) -> dict[str, Any]:
        """The columns of a result row."""
        q1, median, q3 = self._quartiles
        return {
            "median_us": median,
            "q1_us": q1,
            "q3_us": q3,
            "repeats": len(self.times_us),
            "graph": self.graph,
        }

    @staticmethod
    def slowest(ranks: list[Timing]) -> Timing:
        """The slowest rank of every repeat."""
        times = zip(*(timing.times_us for timing in ranks), strict=True)
        return Timing(tuple(max(each) for each in times), all(rank.graph for rank in ranks))


@dataclass(frozen=True)
class Prepared:
    """A step after its warm-up.

    Attributes:
        step: the replay of its CUDA graph, or the step itself; None if it raises.
        graph: whether it is a replay.
        why: what kept it from being captured or taken.
    """

    step: Callable[[], object] | None
    graph: bool = False
    why: str | None = None


def measure(
    candidates: Mapping[str, Prepared],
    device: torch.device,
    *,
    repeats: int,
    align: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time every candidate `repeats` times, interleaved.

    Args:
        candidates: steps that can be taken, which wait for nothing.
        align: called before each step; with several ranks, something all of them take part in.
    """
    once = _once_on_gpu(device, align) if device.type == "cuda" else _once_on_cpu(align)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            assert candidate.step is not None
            times[name].append(once(candidate.step))
    return {name: Timing(tuple(times[name]), each.graph) for name, each in candidates.items()}


@contextlib.contextmanager
def waits_raise() -> Iterator[None]:
    """An operator of torch that waits for the device raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A call that replays `step` from a CUDA graph, captured after a warm-up; on a CPU the step.

    A step that waits for the device is not captured at all: a capture that fails leaves torch's
    generator as if it still went on.

    Raises:
        Exception: it cannot be taken, compiled or captured; the current stream is the caller's.
    """
    if device.type != "cuda":
        step()
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            step()
        with waits_raise():
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream()
    try:
        # thread_local: the watchdog thread of NCCL queries events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    finally:
        torch.cuda.set_stream(here)  # a capture that fails can leave its own
        torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def prepare(step: Callable[[], object], device: torch.device, graph: bool = True) -> Prepared:
    """Warm `step` up and capture it if it is to be a `graph`, or else take it once as it is.

    Whatever goes wrong is in `why`: a compiler that gives up or a broken package of one candidate
    says nothing about the others.
    """
    why = None
    if graph:
        try:
            return Prepared(captured(step, device), device.type == "cuda")
        except Exception as error:
            why = one_line(error)
    try:
        step()
        torch.cuda.synchronize() if device.type == "cuda" else None
    except Exception as error:
        return Prepared(None, why=one_line(error))
    return Prepared(step, why=why)


def one_line(error: Exception) -> str:
    """The error for a note or a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _once_on_gpu(
    device: torch.device, align: Callable[[], object]
) -> Callable[[Callable[[], object]], float]:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.zeros(max(FLUSH_BYTES, 4 * l2_bytes) // 4, device=device)
    flushed = torch.zeros((), device=device)

    def once(step: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Reading leaves clean lines; dirty ones would be written back during the timed replay.
        torch.sum(flush, dim=0, out=flushed)
        align()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    return once


def _once_on_cpu(align: Callable[[], object]) -> Callable[[Callable[[], object]], float]:
    def once(step: Callable[[], object]) -> float:
        align()
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6

    return once
