"""The steps that run on an emulated GPU, in parts; each part has a process of its own."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.static.aot import GPUS
from tests.compiled.counts import ROWS, counted_step
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.report import Options, Report
from tests.compiled.plain_steps import Compared, plain_step
from tests.compiled.planted import PLANTS, check_planted
from tests.compiled.pushed_steps import lost, pushed, weak_pushes
from tests.compiled.tiny_kernels import check_emulator
from tests.support import golden, random_heads
from tests.support.cases import uneven_shards
from tests.support.golden_parts import PARTS as GOLDEN_PARTS
from tests.support.golden_parts import Make, V
from tests.support.mixtures import Story
from tests.support.random_heads import ModelHead
from tests.support.random_requests import THEMES
from tests.support.virtual import in_turn
from tpsample import VocabShard
from tpsample.local.tile_table import Gpu, Tile, all_tiles, fitted
from tpsample.ranks.virtual import VirtualRanks, VirtualWorld

EXACT = [part for part in GOLDEN_PARTS if part != "cancelling"]
"""Without the part whose products a GPU sums in fp32, in another order."""


@dataclass
class Outcome:
    """The rows that a part compared, and those that were wrong.

    Attributes:
        rows: steps' rows, or recorded values, that were compared.
        wrong: how many differ from the definition.
        notes: about each that is wrong.
        tables: counts, for the page.
        error, of_bound: the largest error of a score, and that in parts of `near_tie`.
    """

    rows: int = 0
    wrong: int = 0
    near_ties: int = 0
    notes: list[str] = field(default_factory=list)
    error: float = 0.0
    of_bound: float = 0.0
    tables: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, found: Compared) -> None:
        self.rows, self.near_ties = self.rows + found.rows, self.near_ties + found.near_ties
        self.error, self.of_bound = max(self.error, found.error), max(self.of_bound, found.of_bound)
        if found.wrong:
            self.wrong += found.wrong
            self.notes.append(f"{name}: {found}")


def _compare_golden(outcome: Outcome, found: dict[str, Any], parts: Sequence[str]) -> None:
    expected = json.loads(golden.FILE.read_text())
    names = [name for name in expected if name.split(",")[0] in parts]
    outcome.rows += len(names)
    wrong = [name for name in names if found.get(name) != expected[name]]
    wrong += [name for name in found if name not in names]
    outcome.wrong, outcome.notes = outcome.wrong + len(wrong), outcome.notes + wrong


def goldens(gpu: EmulatedGpu, seconds: float, parts: Sequence[str] = EXACT) -> Outcome:
    """The committed tokens, on one rank."""
    outcome = Outcome()
    make = golden.maker(VocabShard(0, V), backend="triton")
    _compare_golden(outcome, golden.record(make, parts), parts)
    return outcome


def peers(
    gpu: EmulatedGpu,
    seconds: float,
    parts: Sequence[str] = ("heads", "changes", "verified"),
    worlds: Sequence[int] = (2, 3),
) -> Outcome:
    """Committed tokens on virtual ranks, whose kernels push words into each other's memory.

    Programs run three at a time in a random order, and their stores wait as long as they may.
    """
    outcome = Outcome()
    for world_size in worlds:
        gpu.options = Options(order=world_size, programs=3, weak=True)
        world = VirtualWorld(uneven_shards(V, world_size))
        options = {"exchange": "peer", "backend": "triton", "chunks": 2}
        makers = [
            _meeting(golden.maker(shard, group=ranks, **options), ranks)
            for shard, ranks in zip(world.shards, world.ranks, strict=True)
        ]
        for found in world.run([partial(golden.record, make, parts) for make in makers]):
            _compare_golden(outcome, found, parts)
    if found := weak_pushes(gpu):
        outcome.wrong, outcome.notes = outcome.wrong + 1, [*outcome.notes, found]
    return outcome


def _meeting(make: Make, ranks: VirtualRanks) -> Make:
    return lambda *arguments, **options: in_turn(make(*arguments, **options), ranks)


NOISES: tuple[dict[str, Any], ...] = (
    {},
    {"noise": 7},
    {"noise": 8, "sign": 1},
    {"noise": 9, "sign": -1},
    {"truncate": True},
)
"""Errors of approximate instructions, anywhere within their bounds, or all of one sign."""
ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"order": 1, "programs": 3},
    {"order": 2, "late": False},
    {"weak": True, "order": 3},
)


def plain(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """Random plain steps with real numbers, and every third one screened."""
    outcome = Outcome()
    for seed in _seeds(seconds):
        gpu.options = Options(**NOISES[seed % len(NOISES)], **ORDERS[seed % len(ORDERS)])
        outcome.add(f"seed {seed}", plain_step(seed, screened=seed % 3 == 2))
    return outcome


def tiles(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """A plain step with every tile of the table that fits, and with bf16 and fp16."""
    outcome, of = Outcome(), Gpu("", gpu.arch, 132, GPUS[gpu.arch].program_bytes)
    for seed, (tile, dtype) in enumerate(all_tiles()):
        own: Tile = tile if dtype == torch.float32 else fitted(tile, of)
        outcome.add(f"{own}, {dtype}", plain_step(seed, tile=own, dtype=dtype))
    return outcome


def stories(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """Random requests of every kind, on 1 to 3 virtual ranks, in batches that change."""
    outcome = Outcome()
    random_heads.small_tiles = lambda sampler: sampler  # the table's tiles, as on a GPU
    for seed in _seeds(seconds):
        pick = random.Random(seed)
        theme, world_size = THEMES[pick.choice(list(THEMES))], pick.choice([1, 2, 3])
        max_rows = pick.choice([4, 4, 20, 40])
        head = ModelHead.make(pick, world_size, exact=True, most=min(theme.most_ids, 700))
        dtype = pick.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        generator = torch.Generator().manual_seed(seed)
        wide = torch.randn(head.size, pick.choice([40, 136, 256]), generator=generator)
        head = dataclasses.replace(head, weight=(wide * pick.choice([0.5, 1.0])).round().to(dtype))
        gpu.options = Options(**ORDERS[seed % len(ORDERS)])
        ranks = random_heads.VirtualRanks(
            head,
            pick,
            from_logits=seed % 5 == 2,
            chunks=pick.choice([1, 2]),
            max_rows=4 * max_rows,
            screening=pick.choice([None, "int8"]),
        )
        name = f"seed {seed}, {world_size} ranks, {dtype}"
        story = Story(pick, head, ranks, theme, max_rows=max_rows, name=name)
        tally = story.run(3)
        ranks.close()
        outcome.rows, outcome.near_ties = (
            outcome.rows + tally.rows,
            outcome.near_ties + tally.near_ties,
        )
        outcome.wrong, outcome.notes = outcome.wrong + tally.wrong, outcome.notes + tally.notes[:3]
    return outcome


def _seeds(seconds: float) -> Iterator[int]:
    """Yield 0, 1, … while processor time is left, three at least."""
    seed, began = 0, time.process_time()
    while seed < 3 or time.process_time() - began < seconds:
        yield seed
        seed += 1


def emulator(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """The emulator beside PyTorch, on tiny kernels; and a plain and a screened step."""
    check_emulator(gpu)
    outcome = Outcome()
    gpu.options = Options(noise=7, sign=-1)
    outcome.add("plain", plain_step(2))
    outcome.add("screened", plain_step(3, screened=True))
    return outcome


def few_goldens(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """Golden tokens of heads and of given logits, with every kind of request."""
    return goldens(gpu, seconds, ["heads", "logits"])


def one_push(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """Two ranks that push and lose each other, with stores that wait as long as they may."""
    gpu.options = Options(weak=True, order=2)
    notes = [found for found in (pushed(gpu), lost(gpu)) if found]
    return Outcome(rows=88, wrong=len(notes), notes=notes)


def counts(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """Plain steps whose instructions and accesses are counted."""
    return Outcome(rows=sum(ROWS), tables=[counted_step(gpu, rows) for rows in ROWS])


def planted(gpu: EmulatedGpu, seconds: float) -> Outcome:
    """Planted defects, and whether each is noticed as it should be."""
    wrong = check_planted(gpu)
    count = sum(plant.arch in (0, gpu.arch) for plant in PLANTS)
    gpu.earlier.clear()  # whose doubts are those that were planted
    gpu.report = Report()
    return Outcome(rows=count, wrong=len(wrong), notes=[f"{name}: {told}" for name, told in wrong])


PARTS: dict[str, Callable[[EmulatedGpu, float], Outcome]] = {
    each.__name__: each
    for each in (
        emulator,
        few_goldens,
        one_push,
        goldens,
        peers,
        plain,
        tiles,
        stories,
        counts,
        planted,
    )
}
