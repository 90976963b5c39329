"""Verification against the steps it stands for: K drafts in one step, or K + 1 plain steps.

Drafts are the oracle's tokens, so coupled verification accepts all of them; the ratio rules see
certain drafts, and drafts with logits of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import reads
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Candidate, Problem, make_sampler
from benchmarks.lab.results import Row, View, row
from tpsample import reference, verify
from tpsample.speculative import reference as definition
from tpsample.speculative.checks import Method

NUM_DRAFTS = 4


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, batch size and candidate."""
    run.note(
        f"K = {NUM_DRAFTS} drafts per row. Plain steps sample B rows each; the model's own forward "
        "pass, which verification saves K times, is not in these times.",
        "The ratio rules compute both laws in plain PyTorch from the stored logits.",
    )
    for shape in run.shapes:
        weight = run.weight(shape)
        for batch in run.batches:
            problem = Problem.make(weight, batch * (NUM_DRAFTS + 1))
            candidates = _candidates(problem, batch)
            times = run.time_checked(candidates, reads.weight_reads(weight))
            plain_us = times["plain step"].median_us
            for name in candidates:
                point = {"shape": shape.name, "batch": batch}
                each = row(name, "tpsample", times[name], **point)
                each["over_plain"] = each["median_us"] / plain_us
                yield each


def _candidates(problem: Problem, batch: int) -> dict[str, Candidate]:
    """Row r · (K + 1) + i of `problem` is position i of row r, with the seed of row r."""
    width = NUM_DRAFTS + 1
    params = [problem.params[r // width] for r in range(problem.rows)]
    positions = torch.arange(problem.rows, device=problem.weight.device) % width
    problem = replace(problem, params=params, positions=positions)
    firsts = problem.take(range(0, problem.rows, width))
    sampler = make_sampler(problem.weight, problem.rows)
    steps = [problem.take(range(i, problem.rows, width)) for i in range(width)]
    plain = [step.sampled_by(sampler) for step in steps]
    logits = reference.logits(problem.hidden_states, problem.weight)
    drafts = reference.sample(logits, problem.batch, positions).token_ids.view(batch, width)
    logits = logits.view(batch, width, -1)
    own = logits[:, :-1] + 0.5 * logits[:, :-1].roll(1, dims=2)

    hidden_states = problem.hidden_states.view(batch, width, -1)

    def verified(method: Method, draft: Tensor | None) -> Candidate:
        """Return a verification; the gate is `tpsample.speculative.reference`."""
        given, token_ids = drafts[:, :-1], torch.empty_like(drafts)
        options: dict[str, Any] = {"method": method, "draft": draft}
        expected = definition.verify(logits, given, firsts.batch, 0, **options).token_ids

        def step() -> None:
            out = verify(sampler, hidden_states, given, firsts.batch, 0, **options)
            token_ids.copy_(out.token_ids)

        return Candidate(problem, step, token_ids, expected=expected)

    return {
        "plain step": plain[0],
        f"{width} plain steps": Candidate(
            plain[-1].problem, lambda: [each.step() for each in plain], plain[-1].token_ids
        ),
        "coupled": verified("coupled", None),
        "rejection, certain drafts": verified("rejection", None),
        "rejection, drafts with logits": verified("rejection", own),
        "block, drafts with logits": verified("block", own),
    }


BENCHMARK = Benchmark(
    "speculative",
    "What does verifying K drafts cost beside one plain step, and beside K + 1 of them?",
    [
        View("latency", "Time", x="batch"),
        View("over_plain", "Time ÷ one plain step", x="batch", y="over_plain", reference=1),
    ],
    rows,
)
