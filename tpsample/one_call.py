"""sample: one step of a script in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from tpsample.agreement.construction import refuse_to_build
from tpsample.agreement.misplaced import collective
from tpsample.core.checks import is_integer
from tpsample.core.tensors import outside_of_graphs
from tpsample.core.vocab_shard import VocabShard
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch, Tokens
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler


@outside_of_graphs
@collective(refuse_to_build)
def sample(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    params: Sequence[SamplingParams],
    *,
    positions: Tensor | int,
    prompt_token_ids: Tokens = None,
    output_token_ids: Tokens = None,
    group: dist.ProcessGroup | Literal["alone"] | None = None,
    num_samples: int | None = None,
    vocab_size: int | None = None,
    shard: VocabShard | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> SampleOutput:
    """Sample one step: build an `LMHeadSampler`, call it and close it.

    Arguments, result and errors are those of `LMHeadSampler` and its call, but for two: `params` is
    a list of B requests, and the tokens so far are those of `SamplingBatch.from_params`. Rows with
    ``seed=None`` get a seed that is drawn on one rank and stands in the output's `seeds`.
    """
    num_rows = (
        hidden_states.shape[0] if isinstance(hidden_states, Tensor) and hidden_states.ndim else 1
    )
    samples = int(num_samples) if is_integer(num_samples) else 1  # the step refuses others
    with LMHeadSampler(
        lm_head_weight,
        vocab_size=vocab_size,
        shard=shard,
        group=group,
        bias=bias,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        max_rows=max(_FEW_ROWS, num_rows * samples),
    ) as sampler:
        try:
            batch = SamplingBatch.from_params(
                params,
                vocab_size=sampler.vocab_size,
                prompt_token_ids=prompt_token_ids,
                output_token_ids=output_token_ids,
                device=sampler.weight.device,
            )
        except Exception as wrong:  # which the peers, whose step has begun, are told
            sampler.agreement.refuse(wrong)
        return sampler(hidden_states, batch, positions, num_samples=num_samples)


_FEW_ROWS = 256
"""The least `max_rows`, so that ranks whose arguments differ mostly build one sampler and are told
of the difference by name."""
