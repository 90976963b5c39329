"""The steps that run on an emulated GPU, in parts; each part has a process of its own."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.static.aot import GPUS
from tests.compiled.coverage import of_report
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.report import Options, Report
from tests.compiled.steps.counts import STEPS, counted_step
from tests.compiled.steps.plain_steps import Compared, plain_step
from tests.compiled.steps.planted import PLANTS, check_planted
from tests.compiled.steps.pushed_steps import ROWS, lost, pushed, weak_pushes
from tests.compiled.steps.tiny_kernels import check_emulator
from tests.fuzz.heads import EveryRank, ModelHead
from tests.fuzz.judge import Tally
from tests.fuzz.requests import THEMES
from tests.fuzz.story import Story
from tests.support import golden
from tests.support.cases import uneven_shards
from tests.support.golden import EXACT
from tests.support.golden_parts import V
from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
)
from tpsample.backends import cuts_of, room_of
from tpsample.backends.torch_.cuts import LastDigits, OtherEnds
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.triton_.arguments import append_tokens
from tpsample.backends.triton_.largest import largest
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.backends.triton_.slots import read_slots
from tpsample.backends.triton_.tile_table import Gpu, Tile, all_tiles, fitted, storing_tiles
from tpsample.core import word
from tpsample.core.order import DIGIT_BITS, Search
from tpsample.core.row_noise import RowNoise
from tpsample.request.plan import FilteredWords


def goldens(gpu: EmulatedGpu, seeds: int, parts: Sequence[str] = EXACT) -> Compared:
    """The committed tokens, on one rank."""
    make = golden.maker(VocabShard(0, V), backend="triton")
    return _as_committed([golden.record(make, parts)], parts)


def peers(
    gpu: EmulatedGpu,
    seeds: int,
    parts: Sequence[str] = ("heads", "changes", "verified"),
    worlds: Sequence[list[VocabShard]] = (uneven_shards(V, 2), uneven_shards(V, 3)),
) -> Compared:
    """Committed tokens on virtual ranks, whose kernels push words into each other's memory.

    Programs run in a random order, a few at a time, and their stores wait as long as they may.
    """
    outcome = Compared()
    for shards in worlds:
        gpu.options = Options(order=len(shards), programs=3 if len(shards) == 2 else 12, weak=True)
        made = golden.on_virtual_ranks(parts, shards, backend="triton", chunks=2)
        outcome += _as_committed(made, parts)
    if found := weak_pushes(gpu):
        outcome.differ(found)
    return outcome


def _as_committed(found: Sequence[dict[str, Any]], parts: Sequence[str]) -> Compared:
    """Compare what each rank recorded with what is committed."""
    outcome = Compared()
    for of_rank in found:
        differ = golden.differing(of_rank, parts)
        outcome += Tally(len(of_rank), len(differ), notes=differ)
    return outcome


def one_id(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Two virtual ranks, and the second has a single id."""
    return peers(gpu, seeds, ["heads"], [[VocabShard(0, V - 1), VocabShard(V - 1, V)]])


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


def plain(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Random plain steps with real numbers, and every third one screened."""
    outcome = Compared()
    for seed in range(seeds):
        gpu.options = Options(**NOISES[seed % len(NOISES)], **ORDERS[seed % len(ORDERS)])
        outcome += plain_step(seed, screened=seed % 3 == 2)
    return outcome


def tiles(gpu: EmulatedGpu, seeds: int) -> Compared:
    """A plain step with every tile of the table that fits, and with bf16 and fp16."""
    outcome, of = Compared(), Gpu("", gpu.arch, 132, GPUS[gpu.arch].program_bytes)
    for seed, (tile, weights) in enumerate(all_tiles()):
        own: Tile = fitted(tile, of) if weights.tensor_cores else tile
        outcome += plain_step(seed, tile=own, dtype=weights.dtype)
    for tile in storing_tiles(gpu.arch):
        outcome += plain_step(0, tile=fitted(tile, of), dtype=torch.bfloat16, stores=True)
    return outcome


def stories(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Random requests of every kind, on 1 to 3 virtual ranks, in batches that change."""
    outcome = Compared()
    for seed in range(seeds):
        pick = random.Random(seed)
        theme, world_size = THEMES[pick.choice(list(THEMES))], pick.choice([1, 2, 3])
        max_rows = pick.choice([4, 4, 20, 40])
        head = ModelHead.make(pick, world_size, exact=True, most=min(theme.most_ids, 700))
        dtype = pick.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        generator = torch.Generator().manual_seed(seed)
        wide = torch.randn(head.size, pick.choice([40, 136, 256]), generator=generator)
        head = dataclasses.replace(head, weight=(wide * pick.choice([0.5, 1.0])).round().to(dtype))
        gpu.options = Options(**ORDERS[seed % len(ORDERS)])
        ranks = EveryRank(
            head,
            pick,
            from_logits=seed % 5 == 2,
            prepare=lambda sampler: sampler,  # the table's tiles, as on a GPU
            chunks=pick.choice([1, 2]),
            max_rows=4 * max_rows,
            screening=pick.choice([None, "int8"]),
        )
        name = f"seed {seed}, {world_size} ranks, {dtype}"
        story = Story(pick, head, ranks, theme, max_rows=max_rows, name=name)
        outcome += story.run(3)
        ranks.close()
    return outcome


def masks(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Requests whose masks, stop ids, bad words and logits take more than one block of a kernel."""
    generator, v = torch.Generator().manual_seed(1), 2 * 8192 + 40
    weight = torch.randn(v, 16, generator=generator).round().bfloat16()
    ids = list(range(0, 80, 2))
    kinds = (
        {"min_tokens": 5, "stop_token_ids": ids, "top_p": 0.9},
        {"min_tokens": 5, "stop_token_ids": ids, "allowed_token_ids": [*ids[:3], v - 1]},
        {"min_tokens": 5, "stop_token_ids": ids, "allowed_token_ids": ids},
        {"bad_words": [[token] for token in ids], "allowed_token_ids": [*ids, 8191, 8192]},
    )
    outcome = Compared()
    # Without a table of allowed ids, and with it; without a grammar, and with one.
    for chosen, has_grammar in itertools.product((kinds[:1], kinds), (False, True)):
        params = [SamplingParams(seed=row, **kind) for row, kind in enumerate(chosen)]
        batch = SamplingBatch.from_params(params, vocab_size=v)
        if has_grammar:
            bits = torch.full((len(params), -(-v // 32)), -2, dtype=torch.int32)
            batch.grammar_bitmask = bits
        hidden = torch.randn(len(params), 16, generator=generator).round().bfloat16()
        out = LMHeadSampler(weight, backend="triton", max_rows=4)(hidden, batch, 3)
        expected = reference.sample(reference.logits(hidden, weight), batch, 3).token_ids
        wrong = int((out.token_ids != expected).sum())
        outcome += Compared(len(params), wrong, notes=["masks"] * (wrong > 0))
    return outcome


def searches(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Real logits whose kept sets are searched by digits, as while a graph is captured."""
    v = 5000
    logits = torch.randn(2, v, generator=torch.Generator().manual_seed(3))
    sampler = LMHeadSampler(torch.empty(v, 0), backend="triton", max_rows=2)
    outcome = Compared()
    for fields in ({"top_p": 0.001}, {"top_k": 2000, "top_p": 0.5, "ties": "keep"}):
        params = [SamplingParams(seed=row, **fields) for row in range(2)]
        batch = SamplingBatch.from_params(params, vocab_size=v, fixed_rounds=True)
        out = sampler.sample_logits(logits, batch, 3)
        wrong = int((out.token_ids != reference.sample(logits, batch, 3).token_ids).sum())
        outcome += Compared(2, wrong, notes=["searches"] * (wrong > 0))
    outcome += _ends_among_equal_logits()
    outcome += _lists(6 * logits)
    outcome += _more_words_than_find_registers()
    return outcome


def _ends_among_equal_logits() -> Compared:
    """Searches that end before the equal logits of the second of three ranks, in its first block,
    in its last one, or behind them."""
    of_equal, outcome = torch.tensor([0.5, 1.1, 1.9, 2.5]).double(), Compared()
    logits = torch.arange(5000).remainder(3).eq(0).float().repeat(4, 1)
    params = [SamplingParams(top_p=0.5, seed=row) for row in range(4)]
    batch = SamplingBatch.from_params(params, vocab_size=5007)
    noise = RowNoise(batch.temperature, batch.seed, torch.arange(4), 1)
    plain, ours = (
        cuts_of(replace(kind.of(logits, batch, noise, first_id=7), top=logits.amax(dim=1)))
        for kind in (ShardLogits, TritonShardLogits)
    )
    zero, shares = torch.zeros(4, dtype=torch.int64), torch.tensor([0.5, 1.0]).double().repeat(2)
    for mass in (False, True):
        every = plain.rows.held_from(zero)[:, 1 - mass]
        equal = every - plain.rows.held_from(word.pack(torch.full((4,), 0.5), zero))[:, 1 - mass]
        search = Search(zero, zero, every)  # ends at the least logit
        for shift in range(word.EPOCH_SHIFT - DIGIT_BITS, word.TOKEN_BITS - 1, -DIGIT_BITS):
            before, (_, bins) = search, plain.digits(search, None, shift, mass=mass)
            search = plain.next_digit(search, bins)
        limit = every - equal + (of_equal * equal).long()
        last = LastDigits(bins.expand(3, -1, -1), 1, mass)
        for ends in (None, *(OtherEnds(zero, share, None) for share in (None, shares))):
            its = before._replace(limit=limit), last, zero
            found = [[each.last_digit(*its, ends)] for each in (plain, ours)]
            if ends is not None:
                for each, cuts in zip((plain, ours), found, strict=True):
                    cuts.append(each.best_of_last_digit(*its, ends, weighs=False))
            pairs = zip(*found, strict=True)
            wrong = sum(int((one != other).any()) for one, other in pairs)
            outcome += Compared(4, wrong, notes=["ends among equal logits"] * (wrong > 0))
    return outcome


def _more_words_than_find_registers() -> Compared:
    """The largest words of rows, as 8 ranks gather them for a large top_k."""
    generator, outcome = torch.Generator().manual_seed(5), Compared()
    words = torch.randperm(2**20, generator=generator)[: 2 * 4500].view(2, 4500)
    for count, ordered in ((20, False), (20, True)):
        found = largest(words, count, ordered=ordered).sort(dim=1, descending=True).values
        wrong = int((found != words.topk(count, dim=1).values).any(dim=1).sum())
        outcome += Compared(2, wrong, notes=["largest"] * (wrong > 0))
    return outcome


def slots(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Rows that name slots, in several blocks of a kernel, and rows that are not drawn."""
    generator, outcome = torch.Generator().manual_seed(7), Compared()
    batch = SamplingBatch.of_slots(90, vocab_size=V)
    batch.put(range(0, 90, 2), [SamplingParams(seed=slot) for slot in range(45)])
    for rows in (3, 200):
        named = torch.randint(-2, 95, (rows,), generator=generator)
        plain, found = batch.select(named), batch.select(named)
        plain._read_slots()
        found._read_slots(read_slots)
        words = torch.randint(0, 2**50, (2, 3 * rows), generator=generator)
        place = torch.randint(-1, rows + 3, (rows,), generator=generator, dtype=torch.int32)
        filtered = FilteredWords(words[1].view(rows, 3).clone(), place) if rows > 3 else None
        words[:, 1::7] = word.LOST
        made = [SampleOutput.empty(plain.seed, 3) for _ in range(2)]
        for backend, out in zip(("torch", "triton"), made, strict=True):
            room = room_of(backend)
            given = words.clone(), plain.seed, out, plain._undrawn_rows, filtered
            room.decoder()(*given)
        numbers = [
            [its.slots, *its.undrawn, its.temperature, its.seed, out.token_ids, out.status]
            for its, out in zip((plain._slot_rows, found._slot_rows), made, strict=True)
        ]
        wrong = sum(not one.equal(other) for one, other in zip(*numbers, strict=True))
        outcome += Compared(rows, wrong, notes=[f"{rows} rows by slot"] * (wrong > 0))
    return outcome


def appends(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Tokens that are counted in tables and in two shards, several of a row."""
    gpu.options = Options(weak=True, order=2)
    generator, outcome = torch.Generator().manual_seed(8), Compared()
    kinds: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.2, "bad_words": [[1, 2, 3, 4]]},
        {"frequency_penalty": 1.0},
        {"min_tokens": 3, "stop_token_ids": [1]},
    )
    for chosen in (kinds, kinds[1:2], kinds[2:]):
        batch = SamplingBatch.of_slots(4, vocab_size=V)
        tokens = {"prompt_token_ids": [[1]] * len(chosen), "output_token_ids": [[2]] * len(chosen)}
        batch.put(range(len(chosen)), [SamplingParams(seed=0, **its) for its in chosen], **tokens)
        for shard in uneven_shards(V, 2):
            batch.prepare(shard)
        found = []
        token_ids = torch.randint(-2, V + 20, (4, 5), generator=generator)
        for how in (None, append_tokens):
            own = copy.deepcopy(batch)
            tables = own._table.controls
            assert tables is not None
            tables.keeps_digests, tables.append_by = False, how
            own.select(torch.tensor([2, 0, -1, 1])).append(token_ids)
            state = (part for its in tables.states.values() for part in (its.history, its.touched))
            found.append([part[:-1] for part in (tables.length, tables.recent, *state)])
        wrong = sum(not one.equal(other) for one, other in zip(*found, strict=True))
        outcome += Compared(4, wrong, notes=["appends"] * (wrong > 0))
    return outcome


def scores(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Products and sums of a trainer, beside the plain backend's."""
    generator, outcome = torch.Generator().manual_seed(11), Compared()
    for dtype, size in ((torch.bfloat16, 300), (torch.float32, 264), (torch.float16, 7)):
        left, right = (torch.randn(n, size, generator=generator).to(dtype) for n in (5, 9))
        rows, columns = (torch.randint(n, (21,), generator=generator) for n in (5, 9))
        ends, factors = torch.tensor([0, 0, 1, 12, 21]), torch.randn(21, generator=generator)
        found = []
        for room in map(room_of, ("triton", "torch")):
            sums = torch.ones(4, size, dtype=torch.float64)
            room.add_weighted_rows(sums, ends, factors.double(), right, columns)
            found.append([room.pair_products(left, rows, right, columns).double(), sums])
        wrong = sum(not one.allclose(of, 1e-13, 1e-13) for one, of in zip(*found, strict=True))
        outcome += Compared(2, wrong, notes=["scores"] * (wrong > 0))
    return outcome


def _lists(logits: torch.Tensor) -> Compared:
    """Kept sets and logprobs over them, from lists of few tokens, and more logprobs than one
    launch finds, beside the plain backend's."""
    outcome = Compared()
    of_sets = {"top_p": 0.9, "logprobs": 3, "logprobs_mode": "processed_logprobs"}
    for fields, kept_cap in ((of_sets, 2000), ({"logprobs": 40}, None)):
        params, told = [SamplingParams(seed=row, **fields) for row in range(2)], []
        for backend in ("triton", "torch"):
            sampler = LMHeadSampler(torch.empty(logits.shape[1], 0), backend=backend, max_rows=2)
            batch = SamplingBatch.from_params(params, vocab_size=logits.shape[1], kept_cap=kept_cap)
            out = sampler.sample_logits(logits, batch, 3)
            its = [dataclasses.astuple(of) for of in (out.logprobs, out.kept) if of is not None]
            parts = (part for of in its for part in of if isinstance(part, torch.Tensor))
            told.append([out.token_ids, *parts])
        wrong = sum(not one.equal(other) for one, other in zip(*told, strict=True))
        outcome += Compared(2, wrong, notes=["lists"] * (wrong > 0))
    return outcome


def emulator(gpu: EmulatedGpu, seeds: int) -> Compared:
    """The emulator beside PyTorch, on tiny kernels; and a plain and a screened step."""
    check_emulator(gpu)
    outcome = Compared()
    gpu.options = Options(noise=7, sign=-1)
    outcome += plain_step(2)
    outcome += plain_step(3, screened=True)
    return outcome


def few_goldens(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Golden tokens of heads and of given logits, with every kind of request."""
    return goldens(gpu, seeds, ["heads", "logits"])


def one_push(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Two ranks that push and lose each other, with stores that wait as long as they may."""
    gpu.options = Options(weak=True, order=2)
    outcome = Compared(rows=12 * ROWS)
    for found in filter(None, (pushed(gpu), lost(gpu))):
        outcome.differ(found)
    return outcome


def counts(gpu: EmulatedGpu, seeds: int) -> Compared:
    """Steps whose accesses are counted."""
    notes = [note for name in STEPS for note in counted_step(gpu, name)]
    return Compared(sum(rows for rows, *_ in STEPS.values()), len(notes), notes=notes)


def planted(gpu: EmulatedGpu, seeds: int, every: int = 1) -> Compared:
    """Planted defects, and whether each is noticed as it should be."""
    plants = [plant for plant in PLANTS if plant.fits(gpu)][::every]
    wrong = check_planted(gpu, plants)
    gpu.report = Report()  # without the doubts that were planted
    notes = [f"{name}: {told[:300]}" for name, told in wrong]
    return Compared(len(plants), len(wrong), notes=notes)


def few_planted(gpu: EmulatedGpu, seeds: int) -> Compared:
    return planted(gpu, seeds, every=4)


_PARTS = (
    *(emulator, few_goldens, one_push, goldens, peers, plain, tiles, stories, masks),
    *(searches, slots, appends, scores, counts, planted, few_planted, one_id),
)
PARTS: dict[str, Callable[[EmulatedGpu, int], Compared]] = {of.__name__: of for of in _PARTS}


def run_part(work: tuple[int, str, int]) -> dict[str, Any]:
    """Run a part; what ends it is told, not raised."""
    arch, name, seeds = work
    torch.set_num_threads(1)
    gpu = EmulatedGpu.install(arch)
    try:
        found = dataclasses.asdict(PARTS[name](gpu, seeds))
    except Exception:
        found = {"fault": traceback.format_exc()}
    return {
        "arch": arch,
        "part": name,
        **found,
        "doubts": dict(gpu.report.doubts),
        "launches": dict(gpu.report.launches),
        "instructions": gpu.report.instructions,
        "coverage": of_report(gpu),
        "processor_s": time.process_time(),
    }
