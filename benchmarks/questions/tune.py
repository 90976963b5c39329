"""Finds the fastest tile for each shape on this GPU, and fills the table that the sampler reads.

    python -m benchmarks.run tune                      measures; also a section of `make gpu`
    python -m benchmarks.run tune --shapes 151936x4096 --batches 64
    python -m benchmarks.questions.tune RESULT.json    puts what is faster into the table

Every tile's tokens are compared with the oracle before it is timed, among the others and in the
same run; a wrong one is left out and named, and the rule's own stops the run. A tile enters the
table if it beats the rule's by more than 2 %, which is about the spread of a GPU's clock. Entries
of other GPUs and shapes stay as they are. Nothing is tuned while serving; ranks whose tables differ
refuse to be built.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Problem, WrongToken, make_sampler, override_tile, tile_text
from benchmarks.lab.results import Result, Row, View, row, with_ratios
from tpsample import VocabShard
from tpsample.backends.triton_ import tile_table
from tpsample.backends.triton_.tile_table import Gpu, MeasuredTile, Tile
from tpsample.core.weight_format import FORMATS

WORLD_SIZES = (8, 1)
MIN_GAIN = 1.02

# The rule of each batch tile is timed against these: (block_v, block_d, num_warps, num_stages). The
# fastest ones of an H100 are among them. The others keep more bytes under way, which a faster
# memory asks for: more stages, or twice the depth at half the stages.
CANDIDATES = {
    16: ((64, 64, 4, 5), (64, 64, 4, 8), (128, 64, 4, 5), (128, 64, 4, 8), (64, 128, 4, 5)),
    32: ((64, 64, 4, 4), (64, 64, 4, 7), (128, 64, 4, 5), (64, 128, 4, 4), (128, 128, 4, 3)),
    64: ((64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5), (128, 64, 4, 4), (64, 128, 4, 3)),
    128: ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (256, 64, 8, 4)),
    256: ((128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 8, 4)),
}


def candidates(rule: Tile, gpu: Gpu) -> list[Tile]:
    """Return tiles worth timing, the rule's first, with as many stages as fit.

    Bits of a logit do not depend on any of this, as long as the matrix instruction is the same:
    block_v >= 64, 4 or 8 warps.
    """
    if not gpu.arch:  # the interpreter
        return [rule, dataclasses.replace(rule, block_v=rule.block_v // 2)]
    tried = (
        Tile(v, rule.block_b, d, num_warps, num_stages)
        for v, d, num_warps, num_stages in CANDIDATES[rule.block_b]
    )
    return list(dict.fromkeys([rule, *(tile_table.fitted(tile, gpu) for tile in tried)]))


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield a row per tile of each shard, shape and batch; the rule's is the baseline."""
    gpu = Gpu.of(run.device)
    # One batch of every batch tile: the largest.
    batches = {tile_table.batch_tile(batch): batch for batch in sorted(run.batches)}
    for world_size in WORLD_SIZES[: 1 if run.tiny else None]:
        for shape in run.shapes:
            weight = run.weight(shape)
            shard = weight[: len(VocabShard.even(shape.vocab_size, 0, world_size))]
            for batch in batches.values():
                yield _of_point(run, Problem.make(shard, batch), gpu)


def _of_point(run: Run, problem: Problem, gpu: Gpu) -> list[Row]:
    (vocab_rows, hidden_size), weights = problem.weight.shape, FORMATS[problem.weight.dtype]
    rule = tile_table.rule(problem.rows, vocab_rows, weights, gpu)
    if not gpu.arch:
        rule = tile_table.interpreter_tile(problem.rows, hidden_size)
    point: Row = {"shape": f"{vocab_rows}x{hidden_size}", "batch": problem.rows}
    tiles = {tile_text(tile): tile for tile in candidates(rule, gpu)}
    of_rule, tried = tile_text(rule), {}
    for name, tile in tiles.items():
        sampler = make_sampler(problem.weight, problem.rows)
        override_tile(sampler, tile)
        tried[name] = problem.sampled_by(sampler)
    # Wrong, too much shared memory, or a compiler that gives up.
    wrong: dict[str, str] = {}
    times = run.time_checked(tried, {}, left_out=wrong)
    if why := wrong.get(of_rule):
        raise WrongToken(f"the rule's tile {of_rule}: {why}")
    found = []
    for name, timing in times.items():
        if run.device.type == "cuda" and not timing.graph:
            run.uncaptured[name] = "see the notes"
        kind = "baseline" if name == of_rule else "tpsample"
        entry = MeasuredTile(
            *(gpu, vocab_rows, hidden_size, weights.name),
            *(tile_table.batch_tile(problem.rows), tiles[name]),
            us=timing.median_us,
            rule_us=times[of_rule].median_us,
        )
        found.append({**row(name, kind, timing, **point), "entry": dataclasses.asdict(entry)})
    left_out: list[Row] = [{**point, "candidate": name, "why": why} for name, why in wrong.items()]
    return with_ratios(found) + left_out


def merged(old: Sequence[MeasuredTile], measured: Sequence[MeasuredTile]) -> list[MeasuredTile]:
    """Return the old entries; a shape just measured has its fastest gain instead, if any."""
    shapes = {entry.shape for entry in measured}
    table = {entry.shape: entry for entry in old if entry.shape not in shapes}
    for entry in sorted(measured, key=lambda entry: -entry.us):
        if entry.rule_us > MIN_GAIN * entry.us:
            table[entry.shape] = entry
    return list(table.values())


def main(result: str) -> None:
    """Put the gains of a result into the table of this checkout."""
    found = Result.load(Path(result))
    if found.settings["tiny"]:
        raise SystemExit("tune: a tiny run measures nothing worth keeping")
    measured = [MeasuredTile.of(each["entry"]) for each in found.rows]
    old = tile_table.load(tile_table.FILE)
    tile_table.save(tile_table.FILE, merged(old, measured))


BENCHMARK = Benchmark(
    "tune",
    "Which tile is the fastest on this GPU?",
    [View("", "Time of a step, by tile (V×B×D, warps, stages)", x="batch")],
    rows,
    by_default=False,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
