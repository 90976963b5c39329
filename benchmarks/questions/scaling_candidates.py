"""The candidates of a point of scaling: tpsample, and what an engine does with the same logits.

A candidate belongs to a family, which has one colour in every picture. Before a time counts, the
ids of tpsample are held against the oracle; those of a baseline, which draws noise of its own,
must be tokens that the request allows, of logits that are the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import baselines
from benchmarks.lab.harness import Run
from benchmarks.lab.problem import Candidate, Compared, Problem, WrongToken, make_sampler
from benchmarks.lab.whole_logits import KINDS, WholeLogits
from tpsample import LMHeadSampler, SamplingBatch, VocabShard, reference
from tpsample.ranks.ranks import Ranks

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
}

TPSAMPLE, ONE_RANK, STORED = "tpsample", "one rank", "stored logits"

FAMILIES = {
    TPSAMPLE: "each rank samples its shard of the vocabulary; words travel",
    **{kind.name: kind.who for kind in KINDS},
    STORED: "W = 1: the whole logits are stored and sampled; both baselines start from it",
    ONE_RANK: "tpsample over the whole vocabulary on every rank, as if there were no ranks",
}
"""The families that are compared, and the engine's option that each stands for."""

NO_IDS = torch.empty(0, dtype=torch.int64)
_LOGIT_TOLERANCE = 2.0**-6
"""Two roundings to bf16 of one fp32 number, added up in two orders."""
_MASS_TOLERANCE = 0.005
"""How much more than top_p a baseline may keep, since it adds up the mass in fp32."""


@dataclass(frozen=True, kw_only=True)
class Entry(Candidate):
    """A candidate of a point.

    Attributes:
        family: of `FAMILIES`.
        kind: "tpsample", "baseline" or "one rank".
        bytes_sent: by this rank in a step.
    """

    name: str
    family: str
    kind: str = "baseline"
    bytes_sent: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None


def build(run: Run, plain: Problem, mode: str) -> list[Entry]:
    """Return every candidate of a point. Collective."""
    rank, world_size = run.job.rank, run.job.world_size
    problem = plain.filtered(**MODES[mode]) if MODES[mode] else plain
    # As in benchmarks.questions.filters: a captured graph draws filtered rows in fixed rounds.
    on_gpu = plain.weight.device.type == "cuda"
    ours = replace(problem, fixed_rounds=bool(MODES[mode]) and on_gpu)
    weight, rows = plain.weight, plain.rows
    single = make_sampler(weight, rows, group=Ranks())
    if world_size == 1:
        return [_of_sampler(TPSAMPLE, "tpsample", ours, single), *_stored(problem, mode)]
    shard = VocabShard.even(len(weight), rank, world_size)
    entries = []
    for exchange in run.options["exchanges"]:
        own = weight[shard.start : shard.stop]
        sampler = make_sampler(own, rows, shard=shard, exchange=exchange)
        entry = _of_sampler(TPSAMPLE, "tpsample", ours, sampler)
        entries.append(entry if exchange == "auto" else replace(entry, name=exchange))
    entries.append(_of_sampler(ONE_RANK, "one rank", ours, single))
    for kind in KINDS:
        entries += _of_way(kind(weight, rank, world_size), problem, mode)
    return entries


def _of_sampler(name: str, kind: str, problem: Problem, sampler: LMHeadSampler) -> Entry:
    candidate = problem.sampled_by(sampler)
    sent = partial(_sent_by, sampler, candidate)
    facts: dict[str, Any] = {"name": name, "family": name, "kind": kind, "bytes_sent": sent}
    return Entry(**vars(candidate), **facts, close=sampler.close)


def _sent_by(sampler: LMHeadSampler, candidate: Candidate) -> int:
    """Take a step; return its words and the integers of its filtered rows, in bytes."""
    before = sampler.ranks.bytes_sent
    candidate.step()
    rows, several = candidate.problem.rows, sampler.ranks.world_size > 1
    words = sampler.exchange.bytes_sent(rows) if several else 0
    return words + sampler.ranks.bytes_sent - before


def _stored(problem: Problem, mode: str) -> list[Entry]:
    """Return the baselines on one rank."""

    def entry(name: str, step: Callable[[], Tensor]) -> Entry:
        def judge() -> Compared:
            _require_allowed(problem, problem.hidden_states @ problem.weight.T, step())
            return Compared()

        title = name if name == baselines.FLASHSAMPLING else f"{STORED} + {name}"
        return Entry(problem, step, NO_IDS, name=title, family=STORED, judge=judge)

    steps = baselines.single_rank(problem, **MODES[mode])
    return [entry(name, steps[name]) for name in _chosen(steps, problem)]


def _of_way(way: WholeLogits, problem: Problem, mode: str) -> list[Entry]:
    """Return a way to whole logits, with every sampler."""
    # A rank without rows samples nothing, but makes a sampler as the others do.
    own = problem.take(way.own_rows(problem.rows) or range(1))

    def entry(name: str, sample: baselines.Sampler) -> Entry:
        def judge() -> Compared:
            seen: list[Tensor] = []

            def noted(logits: Tensor) -> Tensor:
                seen.extend((logits.clone(), sample(logits)))
                return seen[1]

            way.tokens(problem.hidden_states, noted)
            if seen:
                _require_product(own, seen[0])
                _require_allowed(own, seen[0], seen[1])
            return Compared()

        step = partial(way.tokens, problem.hidden_states, sample)
        sent = partial(way.bytes_sent, problem.rows)
        facts: dict[str, Any] = {"family": way.name, "bytes_sent": sent, "judge": judge}
        return Entry(problem, step, NO_IDS, name=f"{way.name} + {name}", **facts)

    found = baselines.samplers(own, **MODES[mode])
    return [entry(name, found[name]) for name in _chosen(found, problem)]


def _chosen(names: Iterable[str], problem: Problem) -> list[str]:
    """Return the baselines that somebody would run, among those at hand."""
    dropped = set()
    if not baselines.has_triton(problem.weight.device):
        dropped.add(baselines.GUMBEL)  # there it is the oracle
    if baselines.TOPK in names:
        dropped.add(baselines.SORT)  # it does the same and more
    return [name for name in names if name not in dropped]


def _require_product(problem: Problem, logits: Tensor) -> None:
    """See that whole logits have every column in its place.

    Raises:
        WrongToken: they differ from the product with the whole weight.
    """
    exact = problem.hidden_states @ problem.weight.T
    if logits.shape != exact.shape or not torch.allclose(
        logits.float(), exact.float(), rtol=_LOGIT_TOLERANCE, atol=_LOGIT_TOLERANCE
    ):
        raise WrongToken("the whole logits are not the product with the whole weight")


def _require_allowed(problem: Problem, logits: Tensor, ids: Tensor) -> None:
    """See that ids are tokens that the requests allow.

    A token passes if its logit is no less than the smallest one that the filters keep, where top_p
    is a little wider: logits in bf16 tie, and the baselines add up masses in fp32.

    Raises:
        WrongToken: one is not.
    """
    ids = ids.long()
    if ids.shape != (problem.rows,) or not bool(((ids >= 0) & (ids < problem.vocab_size)).all()):
        raise WrongToken(f"expected {problem.rows} ids below {problem.vocab_size}")
    wider = [replace(p, top_p=min(1.0, p.top_p + _MASS_TOLERANCE)) for p in problem.params]
    batch = SamplingBatch.from_params(
        wider, vocab_size=problem.vocab_size, device=problem.weight.device
    )
    if batch.plan.filters is None:
        return
    kept = reference.kept_mask(logits.float(), batch)
    least = logits.float().masked_fill(~kept, torch.inf).amin(dim=1)
    drawn = logits.float().gather(1, ids[:, None]).squeeze(1)
    if bool((drawn < least).any()):
        row = int((drawn < least).nonzero()[0])
        raise WrongToken(f"row {row}: token {int(ids[row])} is not one that the filters keep")
