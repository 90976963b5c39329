"""The experiment: gates, then rounds of all candidates in turn, then rows of the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Problem, WrongToken
from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.lab.timing import Timing
from benchmarks.serving.candidates import AllGather, Candidate, TPSample
from benchmarks.serving.loop import Round, serve
from benchmarks.serving.slots import Slots
from benchmarks.serving.trace import Request, requests
from tpsample import SamplingParams
from tpsample.cli.model import Model

AT_ONCE, POISSON = "all at once", "Poisson arrivals"

CHECKED_STEPS = 6
LOAD = 0.7
"""Poisson requests arrive at this part of the rate at which the baseline serves all at once."""


@dataclass
class ServingRun(Run):
    """A run with a model in place of shapes, and numbers of slots as batches.

    Attributes:
        model: on every rank.
        requests: how many are served in a round.
        scale: of the trace's lengths.
    """

    model: Model | None = None
    requests: int = 32
    scale: float = 1.0


def rows(run: Run) -> Iterator[Row]:
    """One row per number of slots, load and candidate."""
    assert isinstance(run, ServingRun) and run.model is not None
    job, model = run.job, run.model
    vocab_size = model.lm_head_weight.shape[0]
    run.note(
        f"{run.requests} requests a round; lengths of the first requests of "
        f"AzureLLMInferenceTrace_conv (2023, CC-BY 4.0) times {run.scale:g}; answers end by their "
        "length, whatever is drawn, so every candidate does the same work.",
        f"Rounds of the candidates in turn, {run.repeats} each. A time per output token is a "
        "request's mean; medians and percentiles are over the requests of all rounds.",
        f"{POISSON}: at {LOAD:.0%} of the rate at which the baseline served all at once.",
        "Every rank runs the whole trunk: only the LM head is sharded.",
    )
    for count in run.batches:
        found = requests(run.requests, run.scale, float("inf"), vocab_size)
        longest = max(len(each.prompt) + each.output_tokens for each in found)
        slots = Slots(model.trunk, count, longest)
        candidates: list[Candidate] = [TPSample(model, job, count), AllGather(model, job)]
        for candidate in candidates:
            _gate(run, slots, found, candidate)
        rounds = _rounds(run, slots, found, candidates)
        yield from _rows(run, count, AT_ONCE, float("inf"), rounds)
        seconds = median(each.seconds for each in rounds[candidates[-1]])
        rate = job.gather(LOAD * run.requests / seconds)[0]
        found = requests(run.requests, run.scale, rate, vocab_size)
        rounds = _rounds(run, slots, found, candidates)
        yield from _rows(run, count, POISSON, rate, rounds)


def _gate(run: ServingRun, slots: Slots, found: list[Request], candidate: Candidate) -> None:
    """Serve once, to warm up, and compare the first steps; all ranks must agree on all tokens."""
    assert run.model is not None
    warm = serve(run.job, slots, found, candidate, CHECKED_STEPS)
    for step in warm.steps:
        params = [SamplingParams(temperature=1.0, seed=seed) for seed in step.seeds]
        problem = Problem(run.model.lm_head_weight, step.hidden_states, params, step.positions)
        candidate.check(problem, step.token_ids)
        run.checked_rows += problem.rows if candidate.kind == "tpsample" else 0
    texts = run.job.gather([each.token_ids for each in warm.served])
    if any(text != texts[0] for text in texts):
        raise WrongToken(f"{candidate.name}: the ranks drew different tokens")
    for each in warm.served:
        if len(each.token_ids) != each.request.output_tokens:
            raise WrongToken(f"{candidate.name}: an answer has not the length that was asked for")


def _rounds(
    run: ServingRun, slots: Slots, found: list[Request], candidates: list[Candidate]
) -> dict[Candidate, list[Round]]:
    rounds: dict[Candidate, list[Round]] = {each: [] for each in candidates}
    for _ in range(run.repeats):
        for candidate in candidates:
            rounds[candidate].append(serve(run.job, slots, found, candidate))
    return rounds


def _rows(
    run: ServingRun,
    count: int,
    load: str,
    rate: float,
    rounds: dict[Candidate, list[Round]],
) -> list[Row]:
    """Rows of one load, with the ratios of their times per output token; by rank 0's clock."""
    assert run.model is not None
    found = []
    for candidate, own in rounds.items():
        served = [each for one in own for each in one.served]
        per_token = [each.per_token_s * 1e6 for each in served]
        first = [each.first_s * 1e6 for each in served]
        point = {"shape": f"{run.model.name}, {load}", "batch": count, "slots": count}
        timing = Timing(tuple(per_token), graph=False)
        each = row(candidate.name, candidate.kind, timing, **point)
        each["tokens_per_s"] = median(one.tokens / one.seconds for one in own)
        each["per_token_p99_us"] = float(np.percentile(per_token, 99))
        each["first_token_us"] = median(first)
        each["first_token_p99_us"] = float(np.percentile(first, 99))
        each["sampling_share"] = median(one.sampling_s / one.seconds for one in own)
        each["requests_per_s"] = None if rate == float("inf") else rate
        found.append(each)
    return with_ratios(found)


def tiny_model(device: torch.device) -> Model:
    """A random Llama that takes milliseconds, for `--tiny`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1003,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    causal_lm = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()
    weight = causal_lm.get_output_embeddings().weight.detach()
    return Model("tiny", causal_lm.base_model, None, weight, None, {}, frozenset())


BENCHMARK = Benchmark(
    "serving",
    "A serving loop with the same requests: tokens per second and time per output token?",
    [
        View("tokens", "Tokens per second", x="slots", y="tokens_per_s"),
        View("per_token", "Time per output token", x="slots"),
        View("per_token_p99", "Time per output token, p99", x="slots", y="per_token_p99_us"),
        View("first_token", "Time to the first token, median", x="slots", y="first_token_us"),
        View("share", "Share of the time in sampling", x="slots", y="sampling_share"),
    ],
    rows,
)
