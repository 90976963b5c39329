"""A request of vLLM as one of ours: every field is honoured, left to vLLM, or refused by name.

`vllm.SamplingParams` has more fields than sampling needs. Those of `SAMPLED` become fields of
ours. Those of `LEFT_TO_VLLM` work as ever, because vLLM honours them outside its sampler. All
others would be dropped, so a request that sets one is ended at once, and the log says why.
"""

from __future__ import annotations

import logging
from typing import Any

from tpsample.errors import UnsupportedParameter
from tpsample.request.params import LogprobsMode, SamplingParams

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers

SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "_bad_words_token_ids"),
    *("min_tokens", "stop_token_ids", "_all_stop_token_ids", "_eos_token_id"),
    *("logprobs", "logprob_token_ids", "prompt_logprobs", "structured_outputs"),
)
"""Fields that the sampler of a step reads, the grammar's bits and the prompt's logprobs too."""

LEFT_TO_VLLM = (
    "n",  # its front end makes one request of each, whose seeds follow one another
    "stop",  # its front end looks for them in the text
    *("ignore_eos", "max_tokens", "repetition_detection"),  # its scheduler ends a request
    # Its front end makes the text.
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_text_buffer_length"),
    *("output_kind", "stream_interval"),  # its front end streams
    "flat_logprobs",  # its front end lists the logprobs
    "skip_clone",  # it is about a Python object
    "skip_reading_prefix_cache",  # its scheduler reads the cache
    "routed_experts_prompt_start",  # it is about what a model of experts reports
    "extra_args",  # its own sampler does not read them either
    "_watermarking_skipped",  # a server with a watermark does not start
)
"""Fields that vLLM honours outside its sampler."""

REFUSED = {
    "thinking_token_budget": "no end of thinking is forced",
    "trace_decode_token_ids": "no tokens are replayed",
    "watermarking": "there is no watermark",
    "prompt_logprob_token_ids": "a prompt's logprobs are those of its tokens and the most likely",
    "prompt_logprob_start": "a prompt's logprobs start at its first token",
}
"""Field by field, why a request that sets it is refused."""

_NEW = "this version of the adapter does not know the field"


def to_params(request: Any, vocab_size: int, logprobs_mode: LogprobsMode) -> SamplingParams:
    """Return our request for vLLM's.

    Args:
        request: `vllm.SamplingParams`, as vLLM's front end has checked and completed it.
        logprobs_mode: of the whole server.

    Raises:
        UnsupportedParameter: (a ValueError) a field that is not honoured, by name.
        TypeError, ValueError: a value that we cannot take.
    """
    _check_all_fields(request)
    held_back = sorted(request.all_stop_token_ids)
    # With ids of its own a request is told theirs and the drawn token's, not the most likely.
    chosen = request.logprob_token_ids or None
    allowed = request.allowed_token_ids
    least = request.min_tokens if held_back else 0
    params = SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k if 0 < request.top_k < vocab_size else 0,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=request.seed,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias or None,
        allowed_token_ids=None if allowed is None else list(dict.fromkeys(allowed)),
        bad_words=request.bad_words_token_ids or None,
        min_tokens=least,
        stop_token_ids=held_back if least else None,
        logprobs=0 if chosen else request.logprobs,
        logprob_token_ids=chosen,
        logprobs_mode=logprobs_mode,
    )
    params.check_vocab(vocab_size)
    return params


def _check_all_fields(request: Any) -> None:
    """Refuse what a request sets and nobody honours, be it a field of a later vLLM."""
    for name in request.__struct_fields__:
        if name.startswith("_") or name in SAMPLED or name in LEFT_TO_VLLM:
            continue  # with an underscore vLLM speaks to itself
        value = getattr(request, name)
        is_new = name not in REFUSED
        if value is None or value is False or (is_new and value == getattr(type(request)(), name)):
            continue
        reason = _NEW if is_new else REFUSED[name]
        raise UnsupportedParameter(f"{name}: not supported with tpsample: {reason}")


def end_of(request: Any, vocab_size: int) -> int:
    """Return the token that ends a request; 0 if no token of the vocabulary does.

    The ids are the client's, who may name any, and the next step would read one as an index.
    """
    eos = () if request.eos_token_id is None else (request.eos_token_id,)
    ends = *eos, *(request.stop_token_ids or ()), *sorted(request.all_stop_token_ids)
    return next((int(token_id) for token_id in ends if 0 <= token_id < vocab_size), 0)


def admit(
    name: object, request: Any, vocab_size: int, logprobs_mode: LogprobsMode
) -> SamplingParams:
    """Return our request, or one that draws the token that ends it, if it cannot be honoured.

    A worker has no way to answer a client, and an exception would end the server with everybody's
    requests. A request that vLLM's front end lets through and we cannot honour ends here, with an
    error in the log; every rank does the same.
    """
    try:
        return to_params(request, vocab_size, logprobs_mode)
    except (TypeError, ValueError) as error:
        logger.error("request %s is ended without a token: %s", name, error)
        logprobs = None if request.num_logprobs is None else 0
        ends = [end_of(request, vocab_size)]
        return SamplingParams(temperature=0.0, allowed_token_ids=ends, logprobs=logprobs)
