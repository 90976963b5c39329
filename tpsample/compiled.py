"""The sampler as one operator, so that model code under torch.compile can call it.

Inside a compiled function `LMHeadSampler.__call__` becomes a call of ``tpsample::sample``, into
which the compiler does not look. So there is no graph break with fullgraph=True, even when the
batch changes its size, and the tokens are those of a call outside. Without `desync_every`,
`compare` does not see such a step.

A step that needs the host, and every other call, breaks the graph and runs outside of it, so its
tokens are right, too. With fullgraph=True the compiler refuses it instead, and gives our reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step_batch import StepBatch

T = TypeVar("T")


@torch._disable_dynamo  # torch.compiler.disable, but for the import of the compiler: a second
def outside(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Make a call outside of the graph that is being compiled."""
    return call(*arguments, **named)


# With fullgraph=True the compiler names the function that it was told to leave alone.
outside.__name__ = outside.__qualname__ = (
    "tpsample: inside torch.compile every row needs a seed, and filters, logprobs, penalties and "
    "constraints must be off; leave fullgraph=True out, or call it outside"
)


# An operator takes tensors and numbers, so it finds its `LMHeadSampler` by number.
_samplers: WeakValueDictionary[int, Any] = WeakValueDictionary()
_handles = itertools.count()


def register(sampler: object) -> int:
    """Return a number that stands for the sampler as long as it lives."""
    handle = next(_handles)
    _samplers[handle] = sampler
    return handle


@torch.library.custom_op("tpsample::sample", mutates_args=())
def _sample(
    hidden_states: Tensor,
    temperature: Tensor,
    seed: Tensor,
    positions: Tensor,
    num_samples: int,
    handle: int,
) -> tuple[Tensor, Tensor]:
    sampler = _samplers[handle]
    plan = BatchPlan(len(seed), sampler.vocab_size, seed.device)
    batch = BatchView(temperature, seed, plan)
    out = sampler(hidden_states, batch, positions, num_samples=num_samples or None)
    sampler._forget_step()  # its tensors may lie in the memory pool of the compiler's CUDA graphs
    return out.token_ids, out.status


@_sample.register_fake
def _(
    hidden_states: Tensor,
    temperature: Tensor,
    seed: Tensor,
    positions: Tensor,
    num_samples: int,
    handle: int,
) -> tuple[Tensor, Tensor]:
    num_rows = hidden_states.shape[0]
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
    if not isinstance(batch, SamplingBatch) or out is not None or _needs_host(batch, hidden_states):
        return outside(sampler, hidden_states, batch, positions, num_samples=num_samples, out=out)
    num_rows = hidden_states.shape[0]
    batch = batch._for_rows(num_rows)
    if isinstance(positions, int):
        positions = torch.full(
            (num_rows,), positions, dtype=torch.int64, device=hidden_states.device
        )
    token_ids, status = _sample(
        hidden_states, batch.temperature, batch.seed, positions, num_samples or 0, sampler.handle
    )
    return SampleOutput(token_ids=token_ids, status=status, seeds=batch.seed.clone())


def _needs_host(batch: SamplingBatch, hidden_states: Tensor) -> bool:
    """Return whether rows wait for a seed, or have filters, logprobs, penalties or constraints."""
    batch = batch._for_rows(hidden_states.shape[0])
    return bool(batch.unseeded) or batch.plan.stored_index is not None or batch._has_controls
