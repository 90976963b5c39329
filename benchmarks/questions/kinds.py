"""Every kind of call beside the best way to make it from stored logits.

Each kind of call is timed in turn with all of `benchmarks.questions.kinds_baselines` that can make
it, and the fastest of them counts at each point. On several ranks they start from whole logits,
which every rank has after an all-gather. On a GPU a call is timed twice: as the replay of a graph,
whose rows are drawn in fixed rounds, and as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import ranks
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Candidate, Compared, Problem, WrongToken
from benchmarks.lab.requests import PROCESSED, REQUESTS
from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.lab.shapes import Shape
from benchmarks.lab.whole_logits import AllGather
from benchmarks.questions import kinds_baselines
from benchmarks.questions.kinds_baselines import Way
from tpsample import (
    KeptSets,
    LMHeadSampler,
    Logprobs,
    SampleOutput,
    SamplingBatch,
    VerifyOutput,
    VocabShard,
    reference,
    speculative,
    verify,
)

DRAFTS, SAMPLES, KEPT_CAP, TOP = 3, 8, 2048, 5
PROMPT, OUTPUT = 256, 64
"""How many tokens each row has before the step."""


@dataclass(frozen=True)
class Kind:
    """A kind of call.

    Attributes:
        fields: of the requests of all rows.
        how: "step", "prompt", or the method of a verification.
        num_samples: of the step.
        kept_cap: of the batch.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    how: Any = "step"
    num_samples: int | None = None
    kept_cap: int | None = None

    def bare(self) -> Kind | None:
        """Return the step without kept sets and processed logprobs; None if this has neither."""
        kept = {name: its for name, its in self.fields.items() if name not in PROCESSED}
        return Kind(kept) if self.kept_cap or "logprobs_mode" in self.fields else None


KINDS = {
    **{name: Kind(fields) for name, fields in REQUESTS.items()},
    f"{SAMPLES} samples": Kind(num_samples=SAMPLES),
    "kept sets, plain": Kind(kept_cap=KEPT_CAP),
    "kept sets, top_p 0.95": Kind({"top_p": 0.95}, kept_cap=KEPT_CAP),
    "kept sets, top_k 50": Kind({"top_k": 50}, kept_cap=KEPT_CAP),
    "kept sets, top_k 1000, top_p 0.9": Kind({"top_k": 1000, "top_p": 0.9}, kept_cap=KEPT_CAP),
    f"logprobs {TOP} of a prompt": Kind(how="prompt"),
    **{f"{DRAFTS} drafts, {how}": Kind(how=how) for how in ("coupled", "rejection", "block")},
}


EAGER = "tpsample, no graph"
WHOLE = 64.0
"""Standard deviation of whole numbers whose products a GPU sums exactly, in any order."""


def whole_numbers(values: Tensor) -> Tensor:
    """Return values of N(0, 1) as whole numbers that every dtype of weights has."""
    return values.mul(WHOLE).round_().clamp_(-128, 128)


class Calls:
    """The calls and their baselines at a shape and a batch size.

    On a GPU weights and hidden states are whole numbers, so that no row is a near tie.
    `logit_scale` makes logits of N(0, 1) of their products.
    """

    def __init__(self, run: Run, weight: Tensor, rows: int) -> None:
        rank, world_size, device = run.job.rank, run.job.world_size, run.device
        states = Problem.make(weight, (DRAFTS + 1) * rows).hidden_states
        self.on_gpu, self.logit_scale = device.type == "cuda", 1.0
        if self.on_gpu:
            root = weight.shape[1] ** 0.5
            self.logit_scale = 1.0 / (WHOLE * WHOLE * root)
            weight, states = whole_numbers(weight * root), whole_numbers(states)
        self.plain = replace(Problem.make(weight, rows), hidden_states=states[:rows])
        self.drafted = states.view(rows, DRAFTS + 1, -1)
        shard = VocabShard.even(len(weight), rank, world_size)
        self.sampler = LMHeadSampler(
            weight[shard.start : shard.stop],
            shard=shard,
            max_rows=max(256, SAMPLES * rows),
            logit_scale=self.logit_scale,
        )
        drawn = partial(torch.randint, len(weight), generator=torch.Generator().manual_seed(3))
        self.before = tuple(drawn((rows, count)).to(device) for count in (PROMPT, OUTPUT))
        self.drafts = drawn((rows, DRAFTS)).to(device)
        gathered = AllGather(weight, rank, world_size).logits if world_size > 1 else None
        self._whole = gathered or (lambda hidden_states: hidden_states @ weight.T)

    @cached_property
    def logits(self) -> Tensor:
        """Return the exact logits [B, V]."""
        return self._exact(self.plain.hidden_states)

    def _exact(self, hidden_states: Tensor) -> Tensor:
        return reference.logits(hidden_states, self.plain.weight, logit_scale=self.logit_scale)

    def baselines(self, kind: Kind) -> dict[str, Callable[[], object]]:
        """Return the baselines of a kind, from hidden states on, by name. Collective."""
        hidden_states = self.plain.hidden_states
        if kind.how == "step":
            counts = kind.num_samples or 1, kind.kept_cap or 0
            ways = kinds_baselines.of_step(kind.fields, *counts, *self.before)
        elif kind.how == "prompt":
            ways = kinds_baselines.of_prompt(self.drafts[:, :1], TOP)
        else:
            hidden_states = self.drafted.flatten(0, 1)
            ways = kinds_baselines.of_verification(self.drafts, kind.how)

        hidden_states = hidden_states * self.logit_scale

        def step(way: Way) -> object:
            return way(self._whole(hidden_states))

        return {name: partial(step, way) for name, way in ways.items()}

    def ours(self, kind: Kind, graph: bool = True) -> Candidate:
        """Return a kind of call. All that it returns is compared with the reference.

        Args:
            graph: whether it is replayed from a graph, where there is a GPU.
        """
        problem = self.plain.filtered(**kind.fields)
        prompt, output = (its.tolist() for its in self.before)
        its: dict[str, Any] = {"vocab_size": problem.vocab_size, "kept_cap": kind.kept_cap}
        its |= {"prompt_token_ids": prompt, "output_token_ids": output}
        its |= {"device": problem.weight.device, "fixed_rounds": graph and self.on_gpu}
        batch = SamplingBatch.from_params(problem.params, **its)
        given, states = (batch, problem.positions), problem.hidden_states
        make: Callable[[], Any]
        right: Callable[[], Any]
        shape: tuple[int, ...]
        if kind.how == "step":
            its = {"num_samples": kind.num_samples}
            out = SampleOutput.empty(batch.seed, kind.num_samples)
            make = partial(self.sampler, states, *given, **its, out=out)
            right = partial(reference.sample, self.logits, *given, **its)
            shape = out.token_ids.shape
        elif kind.how == "prompt":
            came, asking = self.drafts[:, 0].contiguous(), problem.filtered(logprobs=TOP).batch
            make = partial(self.sampler.prompt_logprobs, states, came, top=TOP)
            right = partial(reference.logprobs, self.logits, asking, came)
            shape = (problem.rows, 1 + TOP)
        else:
            its = {"method": kind.how}
            make = partial(verify, self.sampler, self.drafted, self.drafts, *given, **its)
            right = partial(self._verified, *given, **its)
            shape = (problem.rows, DRAFTS + 1)
        found, token_ids = list[Any](), batch.seed.new_empty(shape)

        def step() -> None:
            found[:] = [make()]
            token_ids.copy_(found[0].token_ids)

        def judge() -> Compared:
            step()
            compare(found[0], right())
            if kind.kept_cap:
                compare_kept(found[0].kept, reference.kept_mask(self.logits, batch))
            return Compared(problem.rows)

        return Candidate(problem, step, token_ids, graph, judge)

    def _verified(self, *given: Any, method: Any) -> VerifyOutput:
        logits = self._exact(self.drafted.flatten(0, 1))
        whole = logits.view(*self.drafted.shape[:2], -1)
        return speculative.reference.verify(whole, self.drafts, *given, method=method)


def compare(found: Any, right: Any) -> None:
    """Compare outputs or logprobs with those of the reference.

    Raises:
        WrongToken: they differ.
    """
    if not found.token_ids.equal(right.token_ids):
        row = int((found.token_ids != right.token_ids).nonzero()[0, 0])
        tokens = found.token_ids[row].tolist(), right.token_ids[row].tolist()
        raise WrongToken(f"row {row}: got {tokens[0]}, the oracle says {tokens[1]}")
    if isinstance(right, Logprobs):
        close = torch.allclose(found.values, right.values, atol=1e-5, equal_nan=True)
        if not close or not found.ranks.equal(right.ranks):
            raise WrongToken("logprobs or ranks are not those of the oracle")
    elif right.logprobs is not None:
        compare(found.logprobs, right.logprobs)


def compare_kept(kept: KeptSets, mask: Tensor) -> None:
    """Compare kept sets with the mask [B, V] of the reference.

    Raises:
        WrongToken: they differ.
    """
    listed = mask & ~(kept.whole | kept.overflow).unsqueeze(1)
    ids = [each.sort().values for each in kept.token_ids.tensor_split(kept.offsets[1:-1].cpu())]
    same = all(map(torch.equal, ids, (each.nonzero().view(-1) for each in listed)))
    if not same or not kept.sizes.equal(mask.sum(dim=1)):
        raise WrongToken("kept sets are not those of the oracle")


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield the times of every shape, batch size and kind that is not done yet. Collective."""
    many, threads = run.job.world_size > 1, torch.get_num_threads()
    run.note(
        "Baselines are plain PyTorch and draw noise of their own, once by exponential clocks "
        "(race) and once by a uniform number in the sums of probabilities (inverse CDF). They "
        "multiply in the dtype of the weights; tpsample makes exact products.",
        "On several ranks a baseline gathers the logits of all shards over gloo, and every rank "
        "samples all rows.",
        "Random weights and hidden states make logits about N(0, 1), which are flatter than a "
        f"model's. A row has {PROMPT + OUTPUT} tokens before the step. Drafts are random, so "
        "nearly all are rejected. A prompt has as many tokens as the batch has rows.",
    )
    if run.device.type == "cpu":
        each = f"of {run.job.world_size} ranks" if many else "rank alone"
        run.note(f"Threads of each {each}: {threads}.")
    else:
        run.note(
            "Weights and hidden states are whole numbers and logits scaled products of them, so "
            "that tokens are those of the reference to the last. A call is captured in a graph "
            f"and draws in fixed rounds, but kept sets, which a graph cannot have; {EAGER} is the "
            "same call as engines make it, launches by the host included."
        )
    for shape in run.shapes:
        weight = run.weight(shape)
        for batch in run.batches:
            calls = Calls(run, weight, batch)
            for name, kind in KINDS.items():
                point = {"shape": _panel(run, shape), "mode": name, "batch": batch}
                if (point["shape"], name, None, batch) not in run.done:
                    yield _of_kind(run, calls, kind, point)
            calls.sampler.close()


def _panel(run: Run, shape: Shape) -> str:
    count = run.job.world_size
    return f"{shape.name} in {run.dtype}, {count} rank{'s' * (count > 1)}"


def _of_kind(run: Run, calls: Calls, kind: Kind, point: Row) -> list[Row]:
    """Return the times of one kind of call and its baselines, timed in turn."""
    graph = not kind.kept_cap and kind.how != "prompt"  # which reads the ids
    candidates, others = {"tpsample": calls.ours(kind, graph)}, calls.baselines(kind)
    if (bare := kind.bare()) is not None:
        candidates["without"] = calls.ours(bare, graph)
    if calls.on_gpu and graph:
        candidates[EAGER] = calls.ours(kind, graph=False)
    times = run.time_checked(candidates, others, ranks.align(run))
    names = [name for name in candidates if name != "without"]
    mine = [row(name, "tpsample", times[name], **point) for name in names]
    ours = mine[0]
    if bare is not None:
        ours["over_without"] = ours["median_us"] / times["without"].median_us
    found = with_ratios(
        [*mine, *(row(n, "baseline", times[n], **point) for n in others if n in times)]
    )
    for each in found:
        each["fastest"] = each["candidate"] in ("tpsample", ours["best_baseline"])
    return found


def _view(title: str, y: str = "median_us", kind: str = "tpsample") -> View:
    where = {"kind": kind, "fastest": True}
    return View("", title, x="mode", series="batch", y=y, where=where)


BENCHMARK = Benchmark(
    "kinds",
    "How long does each kind of call take, beside the best way with stored logits?",
    [
        _view("tpsample ÷ best baseline (below 1 is faster)", "over_best_baseline"),
        _view("Time of tpsample"),
        View(
            "",
            "Time of tpsample without a graph",
            x="mode",
            series="batch",
            where={"candidate": EAGER},
        ),
        _view("Time of the best baseline", kind="baseline"),
        _view("With logprobs or kept sets ÷ the same step without them", "over_without"),
    ],
    rows,
    by_default=False,
)
