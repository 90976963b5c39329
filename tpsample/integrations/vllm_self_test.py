"""One step of a vLLM worker against the definition, before the first request is served.

It goes through the engine's own structures: what its scheduler sends, its runner's batch, and the
tokens that its worker returns. Only the hidden states are replaced: those of request r by row r of
the identity, so that its logits are a column of the LM head on every device. A row is known by the
hidden states that its request had alone. So a version of vLLM that was not tried is served, or
refused with the reason.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmSamplingParams
from vllm import __version__
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from tpsample import reference
from tpsample.integrations.vllm_head import VllmHead
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers

LENGTH = 2
"""The number of tokens of a prompt. That of request r begins with the id r · LENGTH."""
REQUESTS: dict[str, dict[str, Any]] = {
    "_tpsample_0_": {"temperature": 0.8, "seed": 11, "top_k": 7, "top_p": 0.9},
    "_tpsample_1_": {"temperature": 0.0, "repetition_penalty": 1.3},
    "_tpsample_2_": {"temperature": 1.2, "seed": 12, "min_p": 0.02, "logit_bias": {3: 1.5}},
}
"""Requests by name: fields that have one name in vLLM and here."""
_WRONG = f"self-test: a step of vLLM {__version__} with tpsample"
_WAY_OUT = "take a version that was tried, or start the server without tpsample"


def check_first_step(worker: Any, head: VllmHead | None) -> None:
    """Take a step of a few requests, and compare its tokens with the definition's. Collective.

    It is left out where a step needs more than a prompt: beside a KV connector, and for models
    that encode first.

    Args:
        head: None on a rank that samples nothing, which takes part in the forward pass.

    Raises:
        RuntimeError: a token differs, or the step failed; the server does not start.
    """
    runner = worker.model_runner
    if worker.vllm_config.kv_transfer_config or worker.model_config.is_encoder_decoder:
        logger.warning("tpsample: no self-test, beside a KV connector or an encoder")
        return
    names = list(REQUESTS)[: runner.max_num_reqs]
    try:
        if head is None:
            for those in (*([name] for name in names), names):
                _step(worker, those)
            return
        alone: list[Tensor] = []
        with head.given(lambda hidden_states: _noted(hidden_states, alone)):
            for name in names:
                _step(worker, [name])
        with head.given(lambda hidden_states: _identity(hidden_states, torch.cat(alone))):
            found = _step(worker, names)
        expected = _definition(head, names)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{_WRONG} failed: {told}; {_WAY_OUT}") from error
    if found != expected:
        raise RuntimeError(
            f"{_WRONG} returned the tokens {found}, the definition has {expected}; {_WAY_OUT}"
        )
    logger.info(
        "tpsample: a first step of %d requests returned the definition's tokens", len(names)
    )


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
    its = torch.cdist(hidden_states.float(), alone).argmin(dim=1)
    if len(alone) > 1 and torch.pdist(alone).min() <= 1e-3 * alone.norm(dim=1).max():
        its = torch.arange(rows, device=its.device)
    identity = torch.eye(rows, size, device=its.device)
    return identity[its].to(hidden_states.dtype)


def _prompt(name: str) -> list[int]:
    """Return the prompt of a request, which no other request has."""
    start = LENGTH * list(REQUESTS).index(name)
    return list(range(start, start + LENGTH))


def _step(worker: Any, names: list[str]) -> dict[str, list[int]]:
    """Return the tokens of new requests by name."""
    groups = len(worker.model_runner.kv_cache_config.kv_cache_groups)
    scheduled = SchedulerOutput.make_empty()
    scheduled.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=_prompt(name),
            mm_features=[],
            sampling_params=VllmSamplingParams(max_tokens=2, **REQUESTS[name]),
            pooling_params=None,
            block_ids=([1 + index],) * groups,  # block 0 stands for none
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=_prompt(name),
        )
        for index, name in enumerate(names)
    ]
    scheduled.num_scheduled_tokens = dict.fromkeys(names, LENGTH)
    scheduled.total_num_scheduled_tokens = len(names) * LENGTH
    scheduled.num_common_prefix_blocks = [0] * groups
    output = worker.execute_model(scheduled)
    if output is None:
        output = worker.sample_tokens(None)
    if hasattr(output, "get_output"):  # of a step that the host has not waited for
        output = output.get_output()
    done = SchedulerOutput.make_empty()
    done.finished_req_ids = set(names)
    worker.execute_model(done)
    if output is None:
        return {}
    return dict(zip(output.req_ids, map(list, output.sampled_token_ids), strict=True))


def _definition(head: VllmHead, names: list[str]) -> dict[str, list[int]]:
    """Return the tokens that the definition has for these rows."""
    sampler = head.kept.sampler
    own = head.logits_of_identity(len(names))
    logits = own.new_zeros(len(names), sampler.vocab_size)
    logits[:, sampler.shard.start : sampler.shard.stop] = own
    batch = SamplingBatch.from_params(
        [SamplingParams(**REQUESTS[name]) for name in names],
        vocab_size=sampler.vocab_size,
        prompt_token_ids=[_prompt(name) for name in names],
    )
    out = reference.sample(sampler.ranks.sum_tensor(logits).cpu(), batch, LENGTH)
    return dict(zip(names, out.token_ids.unsqueeze(1).tolist(), strict=True))
