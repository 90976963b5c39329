"""Section `features` of the GPU check: each feature that the other sections leave out, once.

The features are shards that start at odd ids, a step with every request control, and the error of a
product that a screen assumes. Steps over slots and `torch.compile` follow. A plain step must
neither wait for the device nor allocate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.slots import SLOT_KINDS, steps_over_slots
from benchmarks.lab import ranks
from benchmarks.lab.allocations import noise_on_cpu, noise_on_gpu
from benchmarks.lab.launches import listed
from benchmarks.lab.problem import DTYPES, Candidate, Problem, gate, make_sampler, make_weight
from benchmarks.lab.timing import one_line
from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
)
from tpsample.backends.triton_.screen_launches import accumulation_error
from tpsample.core.rules import ENDING, MIN_P
from tpsample.core.weight_format import FORMATS
from tpsample.request.kinds import KINDS, Kind, batches_of

ODD_BOUNDS = (33331, 64000)
"""Where the second and the third shard start: the first of them at no multiple of 4."""
_DRY_ODD_BOUNDS = (333, 500)
_LOGPROB_ERROR = 1e-3


def features(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Try each, the goals first, and raise once for all that is wrong."""
    vocab_size, hidden_size, rows = (600, 32, 4) if dry_run else (128256, 2048, 16)
    weight = make_weight(vocab_size, hidden_size, device)
    plain = Problem.make(weight, rows, (0.0, 0.5, 1.0, 2.0))
    bounds = (0, *(_DRY_ODD_BOUNDS if dry_run else ODD_BOUNDS), vocab_size)
    shards = [VocabShard(*pair) for pair in itertools.pairwise(bounds)]
    single = cache(lambda: plain.sampled_by(make_sampler(weight, rows)))
    several = cache(lambda: ranks.virtual(plain, shards)[0])
    tried: dict[str, Callable[[], Any]] = {
        "launches": lambda: _launches(several(), len(shards)),
        "allocations and waits": lambda: _quiet(single(), several()),
        "odd shards": lambda: _odd_shards(single(), several(), shards),
    }
    for name, dtype in DTYPES.items():
        tried[f"every control, {name}"] = partial(_every_control, plain, dtype)
        tried[f"products, {name}"] = partial(product_error, plain, dtype)
    for kind in SLOT_KINDS:
        tried[f"slots, {kind}"] = partial(steps_over_slots, plain, kind, dry_run)
    # Of all kinds a warm-up takes most of a dry run.
    warmed = (plain.take(range(2)), ("plain", "top_p", "bias")) if dry_run else (plain, KINDS)
    tried["warm_up"] = partial(_warmed_up, *warmed)
    tried["torch.compile"] = lambda: _compiled(plain, dry_run)
    wrong = []
    for name, attempt in tried.items():
        try:
            yield {name: attempt()}
        except Exception as error:
            wrong.append(f"{name}: {one_line(error)}")
    if wrong:
        raise AssertionError("; ".join(wrong))


def _launches(several: Candidate, world_size: int) -> int:
    """Return how many kernels each of several ranks launches in a plain step."""
    several.check()
    with listed(run_them=True) as launches:
        several.step()
    count, left = divmod(sum(launches.values()), world_size)
    if left or count > 2:
        raise AssertionError(f"{sum(launches.values())} launches of {world_size} ranks")
    return count


def _quiet(*candidates: Candidate) -> int:
    """See that plain eager steps, of one rank and of virtual ones, neither wait nor allocate."""
    for candidate in candidates:
        for _ in range(3):
            candidate.step()
        noise = noise_on_gpu if candidate.token_ids.device.type == "cuda" else noise_on_cpu
        if found := noise(candidate.step):
            number = candidate.token_ids.numel() // candidate.problem.rows
            raise AssertionError(f"{number} ranks: {found}")
    return 0


def _odd_shards(single: Candidate, several: Candidate, shards: list[VocabShard]) -> str:
    single.check()
    several.check()
    if not (several.token_ids == single.token_ids).all():
        raise AssertionError("ids differ from those of one rank")
    return f"shards start at {', '.join(str(shard.start) for shard in shards)}"


CONTROLS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {5: 4.0, 8: -3.0}, "bad_words": [[7], [2, 3]]},
    {"allowed_token_ids": list(range(3, 400, 5)), "logprobs": 3},
    {"min_tokens": 9, "stop_token_ids": [1, 4], "top_p": 0.9},
    {"top_k": 40, "top_p": 0.8, "repetition_penalty": 1.1},
    {"min_p": 0.02, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    *({rule.name: rule.example} for rule in ENDING if rule is not MIN_P),
    {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {6: 2.5}},
    {},
)
"""Controls of the rows in turn, on top of their temperature and seed."""


def _controlled(plain: Problem, left_out: Sequence[str] = ()) -> SamplingBatch:
    """Return rows that ask for `CONTROLS` without some fields; every 32nd id is masked."""
    rows, vocab_size, device = plain.rows, plain.vocab_size, plain.weight.device
    asked = [{**CONTROLS[row % len(CONTROLS)], "seed": 2000 + row} for row in range(rows)]
    fields = [{name: its[name] for name in its if name not in left_out} for its in asked]
    tokens = [[2, 11 + row, 17, 2] for row in range(rows)]
    batch = SamplingBatch.from_params(
        [SamplingParams(**{"temperature": 0.8, **its}) for its in fields],
        vocab_size=vocab_size,
        device=device,
        prompt_token_ids=tokens,
        output_token_ids=tokens,
    )
    batch.grammar_bitmask = torch.full(
        (rows, -(-vocab_size // 32)), -2, dtype=torch.int32, device=device
    )
    return batch


def _every_control(plain: Problem, dtype: torch.dtype) -> str:
    """One step of rows that ask for everything between them, against the reference."""
    weight, hidden = plain.weight.to(dtype), plain.hidden_states.to(dtype)
    rows = plain.rows
    bias = torch.linspace(-1, 1, plain.vocab_size, device=weight.device).to(dtype)
    head: dict[str, Any] = {"bias": bias, "logit_scale": 1.5, "logit_softcap": 20.0}
    batch = _controlled(plain)
    out = make_sampler(weight, rows, **head)(hidden, batch, plain.positions, num_samples=2)

    logits = reference.logits(hidden, weight, **head)
    given = (logits, batch, plain.positions, weight.shape[1])
    differ = sum(gate(out.token_ids[:, i], *given, sample=i).near_ties for i in range(2))
    same_logprobs(out, reference.logprobs(logits, batch, out.token_ids))
    return f"{2 * rows} draws, {differ} near ties"


def same_logprobs(out: SampleOutput, expected: Any) -> None:
    assert out.logprobs is not None
    torch.testing.assert_close(
        out.logprobs.values,
        expected.values,
        rtol=_LOGPROB_ERROR,
        atol=_LOGPROB_ERROR,
        equal_nan=True,
        check_dtype=False,
    )


def product_error(problem: Problem, dtype: torch.dtype) -> str:
    """Return how far products are from exact ones, in ‖w‖ ‖h‖; raises beyond a screen's bound.

    Half of each product is made of large terms that cancel each other in order.
    """
    weight, hidden = problem.weight[:4096].clone(), problem.hidden_states.clone()
    half = weight.shape[1] // 2
    weight[:, :half] += 8.0
    weight[:, half : 2 * half] -= 8.0
    hidden[:, half : 2 * half] = hidden[:, :half]
    weight, hidden = weight.to(dtype), hidden.to(dtype)
    found = products(make_sampler(weight, problem.rows), hidden).double()
    exact = hidden.double() @ weight.double().T
    norms = hidden.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :]
    error = float(((found - exact).abs() / norms).max())
    assumed = accumulation_error(weight.shape[1], FORMATS[dtype])
    if error > assumed:
        raise AssertionError(f"products are off by {error:.2e}, assumed {assumed:.2e}")
    return f"{error:.2e}, assumed {assumed:.2e}"


def products(sampler: LMHeadSampler, hidden_states: Tensor) -> Tensor:
    """Return all logits [B, V], as the sampler stores them for logprobs."""
    rows, device = hidden_states.shape[0], hidden_states.device
    asking = [SamplingParams(temperature=0.0, seed=0, logprobs=0)] * rows
    batch = SamplingBatch.from_params(asking, vocab_size=sampler.vocab_size, device=device)
    step = sampler.local.prepare(hidden_states, batch._view_of(rows), batch.seed, num_samples=0)
    sampler.local.best_words(step, batch.seed.new_empty(0))
    assert step.logits is not None
    return step.logits


def _warmed_up(problem: Problem, kinds: Collection[Kind]) -> str:
    """After a warm-up, steps of each kind, which are captured at once where there is a GPU."""
    device, rows = problem.weight.device, problem.rows
    sampler = make_sampler(problem.weight, rows)
    sampler.warm_up(list(kinds), rows=[rows])
    for kind in kinds:
        its = list(batches_of([kind], rows, problem.vocab_size, device, most=rows))
        batch = next((each for each in its if each.plan.fixed_rounds), its[0])
        out = sampler(problem.hidden_states, batch, problem.positions)
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = sampler(problem.hidden_states, batch, problem.positions)
            graph.replay()
            if not torch.equal(out.token_ids, again.token_ids):
                raise AssertionError(f"{kind}: a captured step draws other ids")
    return f"{len(kinds)} kinds"


def _compiled(problem: Problem, dry_run: bool) -> str:
    """Compile a function that scales the hidden states and samples, as one whole graph. It runs for
    plain batches of two sizes and for one with every control but logprobs, before and after a token
    was appended."""
    sampler = make_sampler(problem.weight, problem.rows)

    def model(hidden: Tensor, batch: SamplingBatch, positions: Tensor) -> Tensor:
        out: SampleOutput = sampler((hidden.float() * 1.5).to(hidden.dtype), batch, positions)
        return out.token_ids + 0

    backend = "aot_eager" if dry_run else "inductor"
    torch._dynamo.reset()  # it counts how often this code was compiled, by former calls, too
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    halves, wrong = (problem, problem.take(range(problem.rows // 2))), []
    controlled = _controlled(problem, left_out=("logprobs", "logprobs_mode"))
    tried = [(f"batch {part.rows}", part, part.batch, 0) for part in halves]
    tried += [(f"every control, step {i}", problem, controlled, i) for i in (1, 2)]
    with torch.no_grad():
        for name, part, batch, step in tried:
            given = (part.hidden_states, batch, part.positions + step)
            token_ids = model(*given)
            if not torch.equal(compiled(*given), token_ids):
                wrong.append(name)
            if batch is controlled:
                batch.append(token_ids)
                assert batch.grammar_bitmask is not None
                batch.grammar_bitmask = batch.grammar_bitmask.mul(2)  # one id more of 32 is masked
    if wrong:
        raise AssertionError(f"{', '.join(wrong)}: ids differ from those outside")
    return f"{backend}, {len(tried)} steps"
