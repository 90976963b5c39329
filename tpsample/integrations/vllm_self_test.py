"""One step of a vLLM worker against the definition, before the first request is served."""

from __future__ import annotations

import logging
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm import __version__
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from tpsample.integrations.self_test import LENGTH, NAMES, compare_first_step, prompt_of
from tpsample.integrations.vllm_head import VllmHead
from tpsample.request.params import SamplingParams

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers

REQUESTS: dict[str, dict[str, Any]] = {
    NAMES[0]: {"temperature": 0.8, "seed": 11, "top_k": 7, "top_p": 0.9},
    NAMES[1]: {"temperature": 0.0, "repetition_penalty": 1.3},
    NAMES[2]: {"temperature": 1.2, "seed": 12, "min_p": 0.02, "logit_bias": {3: 1.5}},
}
"""Requests by name: fields that have one name in vLLM and here."""


def check_first_step(worker: Any, head: VllmHead | None) -> None:
    """Take a step of a few requests, and compare its tokens with the definition's. Collective.

    It is left out where a step needs more than a prompt: beside a KV connector, and for models
    that encode first.

    Args:
        head: None on a rank that samples nothing, which takes part in the forward pass.

    Raises:
        RuntimeError: a token differs, or the step failed; the server does not start.
    """
    if worker.vllm_config.kv_transfer_config or worker.model_config.is_encoder_decoder:
        logger.warning("tpsample: no self-test, beside a KV connector or an encoder")
        return
    names = list(REQUESTS)[: worker.model_runner.max_num_reqs]
    kept, local_logits = (None, None) if head is None else (head.kept, head.logits_of_identity)
    compare_first_step(
        f"vLLM {__version__}",
        logger,
        kept,
        {name: SamplingParams(**REQUESTS[name]) for name in names},
        lambda those: _step(worker, those),
        local_logits,
    )


def _step(worker: Any, names: list[str]) -> dict[str, list[int]]:
    """Return the tokens of new requests by name."""
    groups = len(worker.model_runner.kv_cache_config.kv_cache_groups)
    scheduled = SchedulerOutput.make_empty()
    scheduled.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=prompt_of(name),
            mm_features=[],
            sampling_params=VllmSamplingParams(max_tokens=2, **REQUESTS[name]),
            pooling_params=None,
            block_ids=([1 + index],) * groups,  # block 0 stands for none
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=prompt_of(name),
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
