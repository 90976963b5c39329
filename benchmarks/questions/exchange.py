"""Each exchange alone: a step over a vocabulary so small that only the exchange is left.

Its time minus that of the same local step without an exchange is what the exchange adds. Under
torchrun the ranks are processes; in one process they are virtual ranks on one device, whose
kernels run one after another and cross no link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.lab import ranks
from benchmarks.lab.baselines import has_triton
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Candidate, Problem, make_sampler, make_weight
from benchmarks.lab.results import Row, View, row
from benchmarks.lab.timing import Timing
from tpsample import LMHeadSampler, VocabShard
from tpsample.ranks.ranks import Ranks

ROWS_PER_RANK, HIDDEN_SIZE = 256, 64
CHUNKS = (1, 4)
COMPARED = "collective, desync_every=1"
"""Each step also compares what the ranks sampled, and the hidden states they were given."""
VIRTUAL_WORLD_SIZES = (2, 4, 8)


def rows(run: Run) -> Iterator[list[Row]]:
    """One row per world size, batch, exchange and number of chunks."""
    if run.job.world_size > 1:
        yield from _processes(run)
        return
    if not has_triton(run.device):
        run.note(
            "peer is not measured, because its kernels need a GPU, or the interpreter with "
            "TRITON_INTERPRET=1. Start ranks with torchrun to measure collective and p2p."
        )
        return
    run.note(
        "Virtual ranks: the kernels of all ranks run one after another on one device and no link "
        "is crossed. Divide by the number of ranks for the work of one."
    )
    for world_size in VIRTUAL_WORLD_SIZES[: 1 if run.tiny else None]:
        yield from _virtual(run, world_size)


def _processes(run: Run) -> Iterator[list[Row]]:
    world_size = run.job.world_size
    weight = make_weight(ROWS_PER_RANK * world_size, HIDDEN_SIZE, run.device)
    shard = VocabShard.even(len(weight), run.job.rank, world_size)
    part = weight[shard.start : shard.stop]
    for batch in run.batches:
        problem, alone = Problem.make(weight, batch), Problem.make(part, batch)
        built = ranks.samplers(run, weight, shard, batch, CHUNKS)
        options = {"shard": shard, "exchange": "collective", "desync_every": 1}
        built[COMPARED] = make_sampler(part, batch, **options)
        candidates = {name: problem.sampled_by(sampler) for name, sampler in built.items()}
        for chunks in CHUNKS:
            sampler = make_sampler(part, batch, group=Ranks(), chunks=chunks)
            candidates[_local(chunks)] = alone.sampled_by(sampler)
        times = run.time_checked(candidates, {}, ranks.align(run))
        yield list(_rows(times, built, batch, world_size, "processes"))
        for sampler in built.values():
            sampler.close()


def _virtual(run: Run, world_size: int) -> Iterator[list[Row]]:
    weight = make_weight(ROWS_PER_RANK * world_size, HIDDEN_SIZE, run.device)
    for batch in run.batches:
        problem = Problem.make(weight, batch)
        candidates, built = {}, {}
        for chunks in CHUNKS:
            name = f"peer, {chunks} chunk{'s' * (chunks > 1)}"
            candidates[name], built[name] = ranks.virtual(problem, world_size, chunks=chunks)
            candidates[_local(chunks)] = _locals(problem, world_size, chunks)
        times = run.time_checked(candidates, {})
        yield list(_rows(times, built, batch, world_size, "virtual ranks"))


def _locals(problem: Problem, world_size: int, chunks: int) -> Candidate:
    """The local steps of all virtual ranks, without an exchange; the last one's ids are checked."""
    steps: list[Callable[[], object]] = []
    for rank in range(world_size):
        shard = VocabShard.even(problem.vocab_size, rank, world_size)
        part = Problem.make(problem.weight[shard.start : shard.stop], problem.rows)
        sampler = make_sampler(part.weight, part.rows, group=Ranks(), chunks=chunks)
        last = part.sampled_by(sampler)
        steps.append(last.step)
    return Candidate(last.problem, lambda: [step() for step in steps], last.token_ids)


def _local(chunks: int) -> str:
    return f"no exchange, {chunks} chunk{'s' * (chunks > 1)}"


def _rows(
    times: dict[str, Timing],
    built: dict[str, LMHeadSampler],
    batch: int,
    world_size: int,
    kind: str,
) -> Iterator[Row]:
    for name, timing in times.items():
        point = {"shape": f"{world_size} {kind}", "world_size": world_size, "batch": batch}
        if name not in built:
            yield row(name, "limit", timing, **point, words_out=0, bytes_out=0)
            continue
        exchange = built[name].exchange
        point["words_out"] = (world_size - 1) * batch * exchange.chunks
        point["bytes_out"] = exchange.bytes_sent(batch)
        point["added_us"] = timing.median_us - times[_local(exchange.chunks)].median_us
        yield row(name, "tpsample", timing, **point)


BENCHMARK = Benchmark(
    "exchange",
    "What does each exchange add to a step, and how many words and bytes travel?",
    [
        View("step", "Time of a step with next to no compute", x="batch"),
        View("added", "Time the exchange adds", x="batch", y="added_us"),
    ],
    rows,
)
