"""Lets a model runner of vLLM sample with tpsample. Importing it needs a version that was tried."""

from __future__ import annotations

from typing import Any

import vllm

from tpsample.errors import UnsupportedParameter
from tpsample.integrations import check_version

check_version("vllm", vllm.__version__)

from vllm.distributed.parallel_state import get_tp_group  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists  # noqa: E402

from tpsample.integrations import (  # noqa: E402
    vllm_v1,
    vllm_v2,
    vllm_v2_drafts,
    vllm_v2_processors,
)
from tpsample.integrations.vllm_head import VllmHead, only_processor  # noqa: E402
from tpsample.integrations.vllm_modes import check_modes, check_verification  # noqa: E402
from tpsample.speculative.drafting import Method  # noqa: E402


def attach(runner: Any, *, verification: Method = "coupled", **options: Any) -> VllmHead:
    """Let a model runner, V1 or V2, sample with tpsample. Collective over tensor parallelism.

    Args:
        verification: how drafts of runner V2 are accepted, as `method` of `tpsample.verify`.
        options: of `LMHeadSampler`, such as exchange.

    Raises:
        UnsupportedParameter: (a ValueError) the model or a mode is not supported, by name.
    """
    check_modes(runner)
    check_verification(runner, verification)
    drafts = runner.vllm_config.speculative_config
    customs: list[Any] = []
    if runner.vllm_config.use_v2_model_runner:
        customs = vllm_v2_processors.custom_processors(runner.sampler)
    head = VllmHead(
        only_processor(runner.model, LogitsProcessor),
        runner,
        group=get_tp_group().device_group,
        depth=1 if drafts is None else 1 + drafts.num_speculative_tokens,
        fused=not customs,
        **options,
    )
    if runner.vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput
        from vllm.v1.worker.gpu.sample.sampler import Sampler
    else:
        from vllm.v1.outputs import SamplerOutput
        from vllm.v1.sample.sampler import Sampler
    if type(runner.sampler) is not Sampler:
        raise UnsupportedParameter(
            f"model: it brings its own sampler, {type(runner.sampler).__name__}, which would be "
            "left out"
        )
    if runner.vllm_config.use_v2_model_runner:
        count = get_num_sampled_and_rejected
        kinds = vllm_v2.Kinds(SamplerOutput, LogprobsTensors, SamplingMaskLists, count)
        own, kept = runner.sampler, head.kept.sampler
        sampler = vllm_v2.attach(runner, head, kinds)
        if customs:
            from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

            sampler.processors = vllm_v2_processors.V2Processors(own, LogitsContext, kept)
        if drafts is not None:
            vllm_v2_drafts.attach(runner, sampler, verification)
    else:
        vllm_v1.attach(runner, head, SamplerOutput, LogprobsTensors)
    return head
