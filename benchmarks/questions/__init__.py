"""The questions that `python -m benchmarks.run` answers, each by a table and a plot."""

from benchmarks.lab.harness import Benchmark
from benchmarks.questions import ceilings, exchange, filters, speculative, step

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        ceilings.BENCHMARK,
        *step.BENCHMARKS,
        exchange.BENCHMARK,
        filters.BENCHMARK,
        speculative.BENCHMARK,
    )
}
