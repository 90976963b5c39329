"""The questions that `python -m benchmarks.run` answers, each by tables and plots."""

from benchmarks.lab.harness import Benchmark
from benchmarks.questions import (
    ceilings,
    exchange,
    filters,
    kinds,
    replay,
    screen_candidates,
    step,
    training,
    tune,
    wire,
)

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        ceilings.BENCHMARK,
        *step.BENCHMARKS,
        exchange.BENCHMARK,
        filters.BENCHMARK,
        kinds.BENCHMARK,
        replay.BENCHMARK,
        screen_candidates.BENCHMARK,
        training.BENCHMARK,
        tune.BENCHMARK,
        wire.BENCHMARK,
    )
}
