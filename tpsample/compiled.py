"""The sampler as one operator, so that model code under torch.compile can call it.

Inside a compiled function `LMHeadSampler.__call__` becomes a call of ``tpsample::sample``, into
which the compiler does not look. So there is no graph break with fullgraph=True, even when the
batch changes its size, and the tokens are those of a call outside. Without `desync_every`,
`compare` does not see such a step.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tpsample.errors import UnsupportedParameter
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.plan import BatchPlan, BatchView

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
    sampler.forget_step()  # its tensors may lie in the memory pool of the compiler's CUDA graphs
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
    handle: int,
    hidden_states: Tensor,
    batch: SamplingBatch,
    positions: Tensor | int,
    num_samples: int | None,
    out: SampleOutput | None,
) -> SampleOutput:
    """Sample inside a compiled function; arguments and result as `LMHeadSampler.__call__`.

    Raises:
        UnsupportedParameter: rows without a seed, or with filters, logprobs, penalties or
            constraints, which need the host; or an `out`, because the operator makes its own.
    """
    if out is not None:
        raise UnsupportedParameter("out: not inside torch.compile; leave it out there")
    num_rows = hidden_states.shape[0]
    batch = batch.for_rows(num_rows)
    if batch.unseeded or batch.plan.stored_index is not None or batch.has_controls:
        raise UnsupportedParameter(
            "batch: inside torch.compile every row needs a seed, and filters, logprobs, penalties "
            "and constraints must be off; call the sampler outside the compiled function"
        )
    if isinstance(positions, int):
        positions = torch.full(
            (num_rows,), positions, dtype=torch.int64, device=hidden_states.device
        )
    token_ids, status = _sample(
        hidden_states, batch.temperature, batch.seed, positions, num_samples or 0, handle
    )
    return SampleOutput(token_ids=token_ids, status=status, seeds=batch.seed.clone())
