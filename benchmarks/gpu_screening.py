"""What `screening="int8"` rests on, tried in section `features` of `gpu_check`."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.problem import Problem, make_sampler
from benchmarks.screened import listed_percent
from tpsample import LMHeadSampler, SamplingParams
from tpsample.local.screen_launches import accumulation_error
from tpsample.request.plan import BatchPlan, BatchView


def screened_ids(problem: Problem) -> str:
    """The ids of a screened step, which must be those of a plain one, each of them."""
    plain = make_sampler(problem.weight, problem.rows)
    screened = make_sampler(problem.weight, problem.rows, screening="int8")
    expected, found = problem.sampled_by(plain), problem.sampled_by(screened)
    expected.check()
    found.check()
    if not torch.equal(found.token_ids, expected.token_ids):
        raise AssertionError("ids differ from those of a plain step")
    percent = listed_percent(screened)
    if not percent:
        raise AssertionError("the step was not screened")
    return f"{problem.rows} rows, {percent:.2f} % of the ids computed exactly"


def product_error(problem: Problem, dtype: torch.dtype) -> str:
    """How far products are from exact ones, in ‖w‖ ‖h‖; raises if further than a screen assumes.

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
    assumed = accumulation_error(weight.shape[1], dtype)
    if error > assumed:
        raise AssertionError(f"products are off by {error:.2e}, assumed {assumed:.2e}")
    return f"{error:.2e}, assumed {assumed:.2e}"


def products(sampler: LMHeadSampler, hidden_states: Tensor) -> Tensor:
    """Return all logits [B, V], as the sampler stores them for logprobs."""
    rows, device = hidden_states.shape[0], hidden_states.device
    asking = SamplingParams(temperature=0.0, logprobs=0)
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    plan = BatchPlan.of([asking] * rows, sampler.vocab_size, device)
    batch = BatchView(zeros.to(torch.float32), zeros, plan)
    step = sampler.local.prepare(hidden_states, batch, zeros, num_samples=0)
    sampler.local.best_words(step, zeros.new_empty(0))
    assert step.logits is not None
    return step.logits
