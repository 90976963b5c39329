"""The modes of vLLM in which the adapter would be wrong without a word; a server does not start.

Everything that looks at logits of the whole vocabulary, other than vLLM's own sampler, is among
them, because with the adapter there are none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from tpsample.errors import UnsupportedParameter

VERIFIED = {
    "V1": ("ngram",),
    "V2": ("ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp"),
}
"""The methods of drafting whose drafts are verified, by runner."""


def _drafts(runner: Any, name: str) -> Any:
    """Return a setting of speculative decoding; None without drafts."""
    return getattr(runner.vllm_config.speculative_config, name, None)


def _processors(runner: Any) -> object:
    """Return the logits processors that are not vLLM's."""
    return runner.model_config.logits_processors or entry_points(group="vllm.logits_processors")


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "--logits-processors": (
        lambda r: r.model_config.logits_processors and not r.vllm_config.use_v2_model_runner,
        "with the V1 runner a processor of your own would be handed logits that do not exist; "
        "choose the V2 runner",
    ),
    "entry points vllm.logits_processors": (
        lambda r: (
            entry_points(group="vllm.logits_processors") and not r.vllm_config.use_v2_model_runner
        ),
        "with the V1 runner an installed processor would be handed logits that do not exist; "
        "uninstall its package, or choose the V2 runner",
    ),
    "--logits-processors beside --speculative-config": (
        lambda r: _processors(r) and r.vllm_config.speculative_config is not None,
        "drafts are verified without processors of your own; leave one of them out",
    ),
    "--logits-processors with raw logprobs": (
        lambda r: _processors(r) and r.model_config.logprobs_mode.startswith("raw"),
        "they would be those after the processors; pass --logprobs-mode processed_logprobs",
    ),
    "--watermark-config": (
        lambda r: r.vllm_config.watermark_config,
        "the noise is ours, so it carries no watermark",
    ),
    "--enable-batch-sharded-sampling": (
        lambda r: r.vllm_config.parallel_config.enable_batch_sharded_sampling,
        "it sends logits to be sampled elsewhere; with tpsample none are sent",
    ),
    "--enable-trace-replay": (
        lambda r: r.model_config.enable_trace_replay,
        "no tokens are replayed",
    ),
    "--enable-prompt-embeds": (
        lambda r: r.model_config.enable_prompt_embeds,
        "penalties would not see such a prompt",
    ),
    "--speculative-config method": (
        lambda r: (
            r.vllm_config.speculative_config is not None
            and _drafts(r, "method")
            not in VERIFIED["V2" if r.vllm_config.use_v2_model_runner else "V1"]
        ),
        "drafts are verified for ngram with the V1 runner, and for ngram, ngram_gpu, draft_model, "
        "eagle, eagle3 and mtp with the V2 runner",
    ),
    "--speculative-config rejection_sample_method": (
        lambda r: _drafts(r, "rejection_sample_method") not in (None, "standard"),
        "it is a rule of vLLM's own; ours has --additional-config "
        '\'{"tpsample": {"verification": "block"}}\'',
    ),
    "--speculative-config enable_adaptive_verification": (
        lambda r: _drafts(r, "enable_adaptive_verification"),
        "the host would not know how many drafts a row has",
    ),
    "--async-scheduling": (
        lambda r: (
            r.vllm_config.scheduler_config.async_scheduling
            and not r.vllm_config.use_v2_model_runner
        ),
        "with the V1 runner it was not tried; pass --no-async-scheduling, or choose the V2 runner",
    ),
    "--prefill-context-parallel-size": (
        lambda r: r.vllm_config.parallel_config.prefill_context_parallel_size > 1,
        "each group of ranks would draw seeds of its own",
    ),
    "--distributed-executor-backend external_launcher": (
        lambda r: getattr(r, "broadcast_pp_output", False),
        "with several pipeline stages it sends logits to all of them",
    ),
    "--runner pooling": (
        lambda r: r.is_pooling_model,
        "such a model samples no tokens",
    ),
    "VLLM_COMPUTE_NANS_IN_LOGITS": (
        lambda r: os.environ.get("VLLM_COMPUTE_NANS_IN_LOGITS", "0") not in ("", "0"),
        "it would count NaN in no logits and find none",
    ),
}
"""Options and variables with which a server does not start: whether a runner has one, and why."""


def check_modes(runner: Any) -> None:
    """Raise for every mode at once that the adapter does not honour.

    Raises:
        UnsupportedParameter: (a ValueError) naming the options.
    """
    refused = [f"{name}: {why}" for name, (holds, why) in REFUSED.items() if holds(runner)]
    if refused:
        reasons = "; ".join(refused)
        raise UnsupportedParameter(f"vLLM with tpsample does not run so: {reasons}")


def check_verification(runner: Any, verification: str) -> None:
    """Raise for a rule of accepting drafts that has no effect, or none that is right.

    Raises:
        UnsupportedParameter: (a ValueError) there are no drafts of runner V2; or a GPU draws them
            in a CUDA graph, where the host does not know their number.
    """
    config = runner.vllm_config
    if verification == "coupled":
        return
    named = f"--additional-config: tpsample: verification: {verification!r}"
    if config.speculative_config is None or not config.use_v2_model_runner:
        raise UnsupportedParameter(
            f"{named} needs --speculative-config and vLLM's runner V2; leave it out"
        )
    drawn = _drafts(runner, "draft_sample_method") == "probabilistic"
    if drawn and runner.device.type == "cuda" and not runner.model_config.enforce_eager:
        raise UnsupportedParameter(
            f"{named} draws no drafts in a CUDA graph; pass --enforce-eager, or leave "
            "draft_sample_method out"
        )
