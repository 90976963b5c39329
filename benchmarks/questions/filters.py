"""The cost of filters: the same step filtered and plain, beside samplers of stored logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.lab import baselines
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Problem, make_sampler
from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.lab.shapes import Shape

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


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield the times of every shape, batch size and setting."""
    run.note(
        *baselines.notes(run.device, run.dtype),
        "sort, topk and mask are samplers in plain PyTorch; benchmarks/lab/baselines.py says "
        "who samples so.",
        "Random weights and hidden states make logits about N(0, 2²), which are flatter than a "
        "model's, so filters keep more tokens.",
    )
    for shape in run.shapes:
        weight = run.weight(shape)
        for batch in run.batches:
            problem = Problem.make(weight, batch)
            hidden_states = 2 * problem.hidden_states
            yield from _times(run, shape, replace(problem, hidden_states=hidden_states))


def _times(run: Run, shape: Shape, plain: Problem) -> Iterator[list[Row]]:
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
            yield [row(each, "plain", times[each], **point) for each in beside.values()]
        kinds = {**dict.fromkeys(beside, "tpsample"), **dict.fromkeys(others, "baseline")}
        measured = [row(n, kinds[n], times[n], **point) for n in kinds if n in times]
        for each in measured:
            if each["kind"] == "tpsample":
                plain_us = times[beside[each["candidate"]]].median_us
                each["over_plain"] = each["median_us"] / plain_us
        yield with_ratios(measured)


BENCHMARK = Benchmark(
    "filters",
    "What do filters cost beside a plain step?",
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
    ],
    rows,
)
