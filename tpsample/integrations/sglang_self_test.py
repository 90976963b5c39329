"""One step of a scheduler of SGLang against the definition, before the first request is served."""

from __future__ import annotations

import logging
from array import array
from functools import partial
from typing import Any

import torch
from sglang import __version__
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams as SglangSamplingParams

from tpsample.integrations.heads import HeadTap
from tpsample.integrations.self_test import NAMES, compare_first_step, prompt_of
from tpsample.request.params import SamplingParams

logger = logging.getLogger(__name__)

REQUESTS: dict[str, dict[str, Any]] = {
    NAMES[0]: {"temperature": 0.8, "sampling_seed": 11, "top_k": 7, "top_p": 0.9},
    NAMES[1]: {"temperature": 0.0, "sampling_seed": 13},
    NAMES[2]: {"temperature": 1.2, "sampling_seed": 12, "min_p": 0.02},
}
"""Requests by name, as SGLang's fields."""


def check_first_step(scheduler: Any, head: HeadTap) -> None:
    """Take a step of a few requests, and compare its tokens with the definition's. Collective.

    It is left out where a step needs more than a prompt: where prompts are computed elsewhere, and
    for models that encode first.

    Raises:
        RuntimeError: a token differs, or the step failed; the server does not start.
    """
    apart = scheduler.disaggregation_mode.value != "null"
    if apart or scheduler.model_config.is_encoder_decoder:
        logger.warning("tpsample: no self-test, with prefill apart from decode or an encoder")
        return
    names = list(REQUESTS)[: scheduler.max_running_requests]
    compare_first_step(
        f"SGLang {__version__}",
        logger,
        head,
        {name: _params(REQUESTS[name]) for name in names},
        partial(_step, scheduler),
        head.logits_of_identity,
    )


def _params(request: dict[str, Any]) -> SamplingParams:
    """Return our request for one of `REQUESTS`."""
    fields = {name: value for name, value in request.items() if name != "sampling_seed"}
    return SamplingParams(**fields, seed=request["sampling_seed"], filter_order="min_p_last")


@torch.inference_mode()
def _step(scheduler: Any, names: list[str]) -> dict[str, list[int]]:
    """Return the tokens of new requests by name, and give their memory back."""
    requests = []
    for name in names:
        params = SglangSamplingParams(max_new_tokens=2, **REQUESTS[name])
        params.normalize(scheduler.tokenizer)
        request = Req(name, "", array("q", prompt_of(name)), params)
        request.init_next_round_input(scheduler.tree_cache)
        request.lock = scheduler.tree_cache.lock(request.last_node)
        request.extend_end = len(request.full_untruncated_fill_ids)
        requests.append(request)
    batch = ScheduleBatch.init_new(
        requests,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_extend()
    try:
        token_ids = scheduler.run_batch(batch).next_token_ids
    finally:
        for request in requests:
            release_kv_cache(request, scheduler.tree_cache, checkpoint=False)
    those = [request.rid for request in batch.reqs]
    return dict(zip(those, token_ids.unsqueeze(1).tolist(), strict=True))
