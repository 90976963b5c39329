"""A first step of an engine against the definition, before the first request is served.

It goes through the engine's own structures: what its scheduler makes of requests, its batch, and
the tokens that its worker returns. Only the hidden states are replaced: those of request r by row r
of the identity, so that its logits are a column of the LM head on every device. A row is known by
the hidden states that its request had alone. So a version of an engine that was not tried is
served, or refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from tpsample import reference
from tpsample.core.checks import kind_and_text
from tpsample.integrations.heads import HeadTap
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams

LENGTH = 2
"""The number of tokens of a prompt."""
NAMES = ("_tpsample_0_", "_tpsample_1_", "_tpsample_2_")
"""The names of the requests."""
WAY_OUT = "take a version that was tried, or start the server without tpsample"

Step = Callable[[list[str]], dict[str, list[int]]]
"""Takes a step of new requests by their names, and returns their tokens. Collective."""


def compare_first_step(
    engine: str,
    logger: logging.Logger,
    head: HeadTap | None,
    requests: Mapping[str, SamplingParams],
    step: Step,
    local_logits: Callable[[int], Tensor] | None,
) -> None:
    """Take a step of a few requests, and compare its tokens with the definition's. Collective.

    Args:
        engine: with its version, for messages.
        head: None on a rank that samples nothing, which takes part in the forward pass.
        requests: by name.
        local_logits: returns fp32 [rows, V_local], the definition's logits of as many rows of the
            identity, for this rank's ids; None on a rank that samples nothing.

    Raises:
        RuntimeError: a token differs, or the step failed; the server does not start.
    """
    wrong, names = f"self-test: a step of {engine} with tpsample", list(requests)
    try:
        if head is None or local_logits is None:
            for those in (*([name] for name in names), names):
                step(those)
            return
        alone: list[Tensor] = []
        with head.given(lambda hidden_states: _noted(hidden_states, alone)):
            for name in names:
                step([name])
        rows = partial(_identity, alone=torch.cat(alone))
        with head.given(rows, compared=True):
            token_ids = step(names)
        expected = _definition(head, requests, local_logits(len(names)))
    except Exception as error:
        raise RuntimeError(f"{wrong} failed: {kind_and_text(error)}; {WAY_OUT}") from error
    if token_ids != expected:
        raise RuntimeError(
            f"{wrong} returned the tokens {token_ids}, the definition has {expected}; {WAY_OUT}"
        )
    logger.info(
        "tpsample: a first step of %d requests returned the definition's tokens", len(names)
    )


def prompt_of(name: str) -> list[int]:
    """Return the prompt of a request, which no other request has."""
    start = LENGTH * NAMES.index(name)
    return list(range(start, start + LENGTH))


def _noted(hidden_states: Tensor, notes: list[Tensor]) -> Tensor:
    """Note the hidden states of a request that is alone in its step, and return them."""
    notes.append(hidden_states[:1].float())
    return hidden_states


def _identity(hidden_states: Tensor, alone: Tensor) -> Tensor:
    """Return the row of the identity for each request, found by the hidden states it had alone.

    Where a model has the same ones for all prompts, as with weights of zeros, rows count as they
    come.
    """
    rows, size = hidden_states.shape
    request_of_row = torch.cdist(hidden_states.float(), alone).argmin(dim=1)
    if len(alone) > 1 and torch.pdist(alone).min() <= 1e-3 * alone.norm(dim=1).max():
        request_of_row = torch.arange(rows, device=request_of_row.device)
    identity = torch.eye(rows, size, device=request_of_row.device)
    return identity[request_of_row].to(hidden_states.dtype)


def _definition(
    head: HeadTap, requests: Mapping[str, SamplingParams], local_logits: Tensor
) -> dict[str, list[int]]:
    """Return the tokens that the definition has for these rows. Collective."""
    sampler = head.sampler
    logits = local_logits.new_zeros(len(requests), sampler.vocab_size)
    logits[:, sampler.shard.start : sampler.shard.stop] = local_logits
    batch = SamplingBatch.from_params(
        list(requests.values()),
        vocab_size=sampler.vocab_size,
        prompt_token_ids=[prompt_of(name) for name in requests],
    )
    out = reference.sample(sampler.ranks.sum_tensor(logits).cpu(), batch, LENGTH)
    return dict(zip(requests, out.token_ids.unsqueeze(1).tolist(), strict=True))
