"""The candidates of a point: tpsample, and what an engine would do with the same logits.

A candidate belongs to a family, which has one colour in every picture. Before a time counts, the
ids of tpsample are held against the oracle; those of a baseline, which draws noise of its own,
must be tokens that the request allows, of logits that are the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import baselines, filter_baselines, third_party
from benchmarks.problem import Candidate, NearTies, Problem, WrongToken, make_sampler
from benchmarks.whole_logits import KINDS, WholeLogits
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
    **{kind.name: f"{kind.what}; {kind.engines}" for kind in KINDS},
    STORED: "W = 1: the whole logits are stored and sampled; both baselines start from it",
    ONE_RANK: "tpsample over the whole vocabulary on every rank alone, as if there were no ranks",
}
"""What is compared, and which engine's option it stands for."""

SAMPLERS = {
    baselines.RACE: "PyTorch: vLLM with VLLM_USE_FLASHINFER_SAMPLER=0, gpt-fast",
    baselines.GUMBEL: "one kernel of noise and argmax: the sampler kernel of vLLM's V2 runner",
    third_party.FLASHINFER: "vLLM with VLLM_USE_FLASHINFER_SAMPLER=1, SGLang "
    "--sampling-backend flashinfer",
    third_party.FLASHSAMPLING: "fused_mm_sample_triton of its repository, one rank",
    filter_baselines.SORT: "filters by sorting the vocabulary: SGLang --sampling-backend pytorch, "
    "vLLM without FlashInfer",
    filter_baselines.TOPK: "torch.topk and a draw of those k: no slower than vLLM's and gpt-fast's "
    "top_k in PyTorch, which mask the logits below the k-th",
}
"""What samples the logits of a baseline, and whose it is."""

_LOGIT_TOLERANCE = 2.0**-6
"""Two roundings to bf16 of one fp32 number, added up in two orders."""
_MASS_TOLERANCE = 0.005
"""How much more than top_p a baseline may keep, since it adds up the mass in fp32."""


@dataclass
class Entry:
    """A candidate of a point.

    Attributes:
        kind: "tpsample", "baseline" or "one rank".
        check: takes the step; raises `WrongToken` for an id that may not come out. Collective.
        bytes_sent: by this rank in a step.
        ids: where a step of tpsample leaves its ids, which are looked at again after the timing.
    """

    name: str
    family: str
    kind: str
    step: Callable[[], object]
    check: Callable[[], NearTies]
    bytes_sent: Callable[[], int]
    ids: Tensor | None = None
    close: Callable[[], None] = lambda: None


def build(plain: Problem, mode: str, rank: int, world_size: int) -> list[Entry]:
    """Return every candidate of a point. Collective."""
    problem = plain.filtered(**MODES[mode]) if MODES[mode] else plain
    # As in benchmarks.filters: in a captured graph filtered rows are drawn in fixed rounds.
    ours = replace(problem, fixed_rounds=bool(MODES[mode]) and _on_gpu(problem))
    weight, rows = plain.weight, plain.rows
    alone = make_sampler(weight, rows, group=Ranks())
    if world_size == 1:
        entries = [_of_sampler(TPSAMPLE, "tpsample", ours, alone)]
        return entries + _stored(problem, mode)
    shard = VocabShard.even(len(weight), rank, world_size)
    sampler = make_sampler(weight[shard.start : shard.stop], rows, shard=shard)
    entries = [
        _of_sampler(TPSAMPLE, "tpsample", ours, sampler),
        _of_sampler(ONE_RANK, "one rank", ours, alone),
    ]
    for kind in KINDS:
        entries += _of_way(kind(problem, rank, world_size), mode)
    return entries


def _of_sampler(name: str, kind: str, problem: Problem, sampler: LMHeadSampler) -> Entry:
    candidate = problem.sampled_by(sampler)
    return Entry(
        name,
        name,
        kind,
        candidate.step,
        candidate.check,
        partial(_sent_by, sampler, candidate),
        candidate.token_ids,
        sampler.close,
    )


def _sent_by(sampler: LMHeadSampler, candidate: Candidate) -> int:
    """Take a step; return its words and the integers of its filtered rows, in bytes."""
    before = sampler.ranks.bytes_sent
    candidate.step()
    words = (
        sampler.exchange.bytes_sent(candidate.problem.rows) if sampler.ranks.world_size > 1 else 0
    )
    return words + sampler.ranks.bytes_sent - before


def _stored(problem: Problem, mode: str) -> list[Entry]:
    """Baselines on one rank."""
    hidden, weight = problem.hidden_states, problem.weight

    def entry(name: str, step: Callable[[], Tensor]) -> Entry:
        def check() -> NearTies:
            _require_allowed(problem, hidden @ weight.T, step())
            return NearTies()

        return Entry(name, STORED, "baseline", step, check, lambda: 0)

    steps: dict[str, Callable[[], Tensor]] = {
        f"{STORED} + {name}": partial(_multiply_then, sample, hidden, weight)
        for name, sample in _samplers(problem, mode).items()
    }
    if mode == "plain":
        fused = baselines.single_rank(problem)
        steps |= {name: fused[name] for name in (third_party.FLASHSAMPLING,) if name in fused}
    return [entry(name, step) for name, step in steps.items()]


def _multiply_then(sample: Callable[[Tensor], Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
    return sample(hidden @ weight.T)


def _of_way(way: WholeLogits, mode: str) -> list[Entry]:
    """A way to whole logits, with every sampler."""
    own = way.problem.take(way.own_rows or range(1))

    def entry(name: str, sample: Callable[[Tensor], Tensor]) -> Entry:
        step = partial(way.step, sample)

        def check() -> NearTies:
            seen: list[Tensor] = []

            def noted(logits: Tensor) -> Tensor:
                seen.extend((logits.clone(), sample(logits)))
                return seen[1]

            way.step(noted)
            if seen:
                _require_product(own, seen[0])
                _require_allowed(own, seen[0], seen[1])
            return NearTies()

        title = f"{way.name} + {name}"
        return Entry(title, way.name, "baseline", step, check, lambda: way.bytes_sent)

    return [entry(*each) for each in _samplers(own, mode).items()]


def _samplers(problem: Problem, mode: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Samplers of logits [B, V] for a mode; those that are at hand."""
    device, filters = problem.weight.device, MODES[mode]
    if not filters:
        found = baselines.logits_samplers(problem)
        found[baselines.RACE] = baselines.compiled(found[baselines.RACE], device)
        if not baselines.has_triton(device):
            del found[baselines.GUMBEL]  # there it is the oracle, which nobody would run
        return found
    samplers = filter_baselines.samplers(device, **filters)
    if filter_baselines.TOPK in samplers:
        samplers.pop(filter_baselines.SORT, None)  # it does the same and more
    return samplers


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


def _on_gpu(problem: Problem) -> bool:
    return problem.weight.device.type == "cuda"
