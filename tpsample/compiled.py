"""The sampler as one operator, so that model code under torch.compile can call it.

Inside a compiled function `LMHeadSampler.__call__` becomes a call of ``tpsample::sample``, into
which the compiler does not look. So there is no graph break with fullgraph=True, even when the
batch changes its size, and the tokens are those of a call outside. `compare` does not see such a
step.

A graph may compute seeds, temperatures and masks before the step, so they are arguments. The rest
of the batch is found by its number, and a batch has another number once its rows change. No graph
can change that rest, because dynamo cannot enter the lock that every change takes. So for a graph
the operator is a pure function, and it declares neither writes nor side effects.

A step that needs the host, and every other call, breaks the graph and runs outside of it, so its
tokens are right, too. With fullgraph=True the compiler refuses it instead, and gives our reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpsample.core.handles import object_of
from tpsample.core.tensors import left_alone
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.graph_rows import GraphRows
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step_batch import StepBatch

outside = left_alone(
    lambda sampler, *arguments, **named: sampler(*arguments, **named),
    "tpsample: inside torch.compile every row of a SamplingBatch needs a seed, without logprobs "
    "and kept_cap",
)
"""A step outside of the graph that is being compiled."""

PLAIN = 0
"""It stands for the number of a batch if a step reads only seeds and temperatures."""


@torch.library.custom_op("tpsample::sample", mutates_args=())
def _sample(
    hidden_states: Tensor,
    temperature: Tensor,
    seed: Tensor,
    positions: Tensor,
    grammar_bitmask: Tensor | None,
    forced_token_ids: Tensor | None,
    num_samples: int,
    of_sampler: int,
    of_batch: int,
) -> tuple[Tensor, Tensor]:
    sampler, rows = object_of(of_sampler, "sampler"), len(seed)
    batch: StepBatch | BatchView
    if of_batch == PLAIN:
        batch = BatchView(temperature, seed, BatchPlan(rows, sampler.vocab_size, seed.device))
    else:
        masks = {"grammar_bitmask": grammar_bitmask, "forced_token_ids": forced_token_ids}
        given = {name: mask for name, mask in masks.items() if mask is not None}
        batch = GraphRows(object_of(of_batch, "batch"), temperature, seed, given)
    out = sampler(hidden_states, batch, positions, num_samples=num_samples or None)
    # Its tensors may lie in the memory pool of the compiler's CUDA graphs.
    sampler.pipeline.forget_step()
    return out.token_ids, out.status


@_sample.register_fake
def _(hidden_states: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    num_rows, num_samples = hidden_states.shape[0], others[-3]
    shape = (num_rows, num_samples) if num_samples else (num_rows,)
    return (
        hidden_states.new_empty(shape, dtype=torch.int64),
        hidden_states.new_empty(num_rows, dtype=torch.int32),
    )


def call(
    sampler: Any,
    hidden_states: Tensor,
    batch: StepBatch | BatchView,
    positions: Tensor | int,
    num_samples: int | None,
    out: SampleOutput | None,
) -> SampleOutput:
    """Sample inside a compiled function; arguments and result as `LMHeadSampler.__call__`."""
    num_rows = hidden_states.shape[0]
    if not isinstance(batch, SamplingBatch) or out is not None or _needs_host(batch, num_rows):
        how = {"num_samples": num_samples, "out": out}
        stepped: SampleOutput = outside(sampler, hidden_states, batch, positions, **how)
        return stepped
    if isinstance(positions, int):
        positions = torch.full(
            (num_rows,), positions, dtype=torch.int64, device=hidden_states.device
        )
    token_ids, status = _sample(
        *(hidden_states, batch.temperature, batch.seed, positions),
        *(batch.grammar_bitmask, batch.forced_token_ids),
        *(num_samples or 0, sampler.handle, batch._handle if batch._reads_tables else PLAIN),
    )
    return SampleOutput(token_ids=token_ids, status=status, seeds=batch.seed.clone())


def _needs_host(batch: SamplingBatch, num_rows: int) -> bool:
    """Return whether rows wait for a seed or report more than tokens. Return True, too, if the step
    is refused with a reason that a graph cannot give."""
    reports = batch.plan.logprobs is not None or batch.plan.kept_cap is not None
    version, masks = batch._table.version, batch._assigned.values()
    stale = any(mask.version != version or len(mask.tensor) != num_rows for mask in masks)
    refused = stale or bool(batch._table.empty) or batch.rows != num_rows
    return refused or reports or bool(batch.unseeded)
