"""Each exchange alone: a step over a vocabulary so small that only the exchange is left.

Its time minus that of the same local step without an exchange is what the exchange adds. Under
torchrun the ranks are processes; in one process they are virtual ranks on one device, whose
kernels run one after another and cross no link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.lab import ranks
from benchmarks.lab.baselines import has_triton
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Candidate, Problem, make_sampler, make_weight
from benchmarks.lab.results import Row, View, row
from benchmarks.lab.timing import Timing, one_line
from benchmarks.lab.virtual_ranks import even_shards
from tpsample import LMHeadSampler, VocabShard
from tpsample.ranks.ranks import Ranks

ROWS_PER_RANK, HIDDEN_SIZE = 256, 64
CHUNKS = (1, 4)
VIRTUAL_WORLD_SIZES = (2, 4, 8)
ALONE = "no exchange"


def rows(run: Run) -> Iterator[list[Row]]:
    """One row per world size, batch, exchange and number of chunks."""
    several = run.job.world_size > 1
    world_sizes: tuple[int, ...] = (run.job.world_size,)
    if not several and not has_triton(run.device):
        run.note(
            "peer is not measured, because its kernels need a GPU, or the interpreter with "
            "TRITON_INTERPRET=1. Start ranks with torchrun to measure collective and p2p."
        )
        return
    if not several:
        world_sizes = VIRTUAL_WORLD_SIZES[: 1 if run.tiny else None]
        run.note(
            "Virtual ranks: the kernels of all ranks run one after another on one device and no "
            "link is crossed. Divide by the number of ranks for the work of one."
        )
    for world_size in world_sizes:
        weight = make_weight(ROWS_PER_RANK * world_size, HIDDEN_SIZE, run.device)
        shape = f"{world_size} {'processes' if several else 'virtual ranks'}"
        for batch in run.batches:
            problem = Problem.make(weight, batch)
            built = _processes(run, problem) if several else _virtual(problem, world_size)
            candidates = {name: candidate for name, (candidate, _) in built.items()}
            times = run.time_checked(candidates, {}, ranks.align(run))
            point = {"shape": shape, "world_size": world_size, "batch": batch}
            yield [_row(name, built[name][1], times, point) for name in times]
            for _, sampler in built.values():
                sampler.close()


Built = dict[str, tuple[Candidate, LMHeadSampler]]
"""Candidates with a sampler of each."""


def _processes(run: Run, problem: Problem) -> Built:
    """Every exchange that can be built, the others noted, and the local step of this rank."""
    shard = VocabShard.even(problem.vocab_size, run.job.rank, run.job.world_size)
    part, batch = problem.weight[shard.start : shard.stop], problem.rows
    asked: dict[str, dict[str, Any]] = {
        _name(exchange, chunks): {"exchange": exchange, "chunks": chunks}
        for exchange in ranks.EXCHANGES
        for chunks in CHUNKS
    }
    built: Built = {}
    for name, options in asked.items():
        sampler, error = None, None
        try:
            sampler = make_sampler(part, batch, shard=shard, **options)
        except Exception as wrong:
            error = one_line(wrong)
        if errors := [each for each in run.job.gather(error) if each is not None]:
            run.note(f"{name}: not measured, {errors[0]}")
        elif sampler is not None:
            built[name] = problem.sampled_by(sampler), sampler
    for chunks in CHUNKS:
        built[_name(ALONE, chunks)] = _locals(problem, [shard], chunks)
    return built


def _virtual(problem: Problem, world_size: int) -> Built:
    built: Built = {}
    shards = even_shards(problem.vocab_size, world_size)
    for chunks in CHUNKS:
        built[_name("peer", chunks)] = ranks.virtual(problem, shards, chunks)
        built[_name(ALONE, chunks)] = _locals(problem, shards, chunks)
    return built


def _locals(
    problem: Problem, shards: list[VocabShard], chunks: int
) -> tuple[Candidate, LMHeadSampler]:
    """The local steps of some ranks, without an exchange; the last one's ids are checked."""
    steps: list[Callable[[], object]] = []
    for shard in shards:
        part = Problem.make(problem.weight[shard.start : shard.stop], problem.rows)
        sampler = make_sampler(part.weight, part.rows, group=Ranks(), chunks=chunks)
        last = part.sampled_by(sampler)
        steps.append(last.step)
    return replace(last, step=lambda: [step() for step in steps]), sampler


def _name(exchange: str, chunks: int) -> str:
    return f"{exchange}, {chunks} chunk{'s' * (chunks > 1)}"


def _row(name: str, sampler: LMHeadSampler, times: dict[str, Timing], point: Row) -> Row:
    if name.startswith(ALONE):
        return row(name, "limit", times[name], **point, words_out=0, bytes_out=0)
    exchange, batch = sampler.exchange, point["batch"]
    counts = {
        "words_out": (point["world_size"] - 1) * batch * exchange.chunks,
        "bytes_out": exchange.bytes_sent(batch),
        "added_us": times[name].median_us - times[_name(ALONE, exchange.chunks)].median_us,
    }
    return row(name, "tpsample", times[name], **point, **counts)


BENCHMARK = Benchmark(
    "exchange",
    "What does each exchange add to a step, and how many words and bytes travel?",
    [
        View("step", "Time of a step with next to no compute", x="batch"),
        View("added", "Time the exchange adds", x="batch", y="added_us"),
    ],
    rows,
)
