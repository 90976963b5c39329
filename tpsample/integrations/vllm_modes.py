"""The modes of vLLM in which the adapter would be wrong without a word; a server does not start.

Everything that looks at logits of the whole vocabulary, other than vLLM's own sampler, is among
them, because with the adapter there are none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from tpsample.errors import UnsupportedParameter


class Mode(NamedTuple):
    """A way to run vLLM.

    Attributes:
        name: the option or variable that asks for it.
        asked: whether a runner runs so.
        reason: why the adapter cannot.
    """

    name: str
    asked: Callable[[Any], bool]
    reason: str


def _drafts(runner: Any) -> bool:
    speculative = runner.vllm_config.speculative_config
    return speculative is not None and (
        runner.vllm_config.use_v2_model_runner or speculative.method != "ngram"
    )


def _waits_for_tokens(runner: Any) -> bool:
    config = runner.vllm_config
    return config.scheduler_config.async_scheduling and not config.use_v2_model_runner


REFUSED = (
    Mode(
        "--logits-processors",
        lambda r: bool(r.model_config.logits_processors),
        "a processor of your own would be handed logits that do not exist",
    ),
    Mode(
        "entry points vllm.logits_processors",
        lambda r: bool(entry_points(group="vllm.logits_processors")),
        "an installed processor would be handed logits that do not exist; uninstall its package",
    ),
    Mode(
        "--enable-lora",
        lambda r: r.vllm_config.lora_config is not None,
        "an adapter may change the LM head",
    ),
    Mode(
        "--watermark-config",
        lambda r: r.vllm_config.watermark_config is not None,
        "the noise is ours, so it carries no watermark",
    ),
    Mode(
        "--enable-batch-sharded-sampling",
        lambda r: bool(r.vllm_config.parallel_config.enable_batch_sharded_sampling),
        "it sends logits to be sampled elsewhere; with tpsample none are sent",
    ),
    Mode(
        "--return-sampling-mask",
        lambda r: r.model_config.return_sampling_mask,
        "the kept set of a row is not listed",
    ),
    Mode(
        "--enable-trace-replay",
        lambda r: r.model_config.enable_trace_replay,
        "no tokens are replayed",
    ),
    Mode(
        "--enable-prompt-embeds",
        lambda r: r.model_config.enable_prompt_embeds,
        "penalties would not see such a prompt",
    ),
    Mode(
        "--speculative-config",
        _drafts,
        "drafts are verified for ngram with the V1 runner; "
        "for others they were not tried (VLLM_USE_V2_MODEL_RUNNER=0 chooses V1)",
    ),
    Mode(
        "--async-scheduling",
        _waits_for_tokens,
        "with the V1 runner it was not tried; pass --no-async-scheduling, or choose the V2 runner",
    ),
    Mode(
        "--prefill-context-parallel-size",
        lambda r: r.vllm_config.parallel_config.prefill_context_parallel_size > 1,
        "each group of ranks would draw seeds of its own",
    ),
    Mode(
        "--distributed-executor-backend external_launcher",
        lambda r: getattr(r, "broadcast_pp_output", False),
        "with several pipeline stages it sends logits to all of them",
    ),
    Mode(
        "--runner pooling",
        lambda r: r.is_pooling_model,
        "such a model samples no tokens",
    ),
    Mode(
        "VLLM_COMPUTE_NANS_IN_LOGITS",
        lambda r: os.environ.get("VLLM_COMPUTE_NANS_IN_LOGITS", "0") not in ("", "0"),
        "it would count NaN in no logits and find none",
    ),
)
"""What a server refuses when it starts, whatever its requests."""


def check_modes(runner: Any) -> None:
    """Raise for every mode at once that the adapter does not honour.

    Raises:
        UnsupportedParameter: (a ValueError) naming the options.
    """
    asked = [mode for mode in REFUSED if mode.asked(runner)]
    if asked:
        told = "; ".join(f"{mode.name}: {mode.reason}" for mode in asked)
        raise UnsupportedParameter(f"vLLM with tpsample does not run so: {told}")
