"""Arguments of `model.generate` that transformers drops, ignores or does not check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper

from tpsample.errors import UnsupportedParameter
from tpsample.request.params import SamplingParams

_DRAWING = {
    "temperature": 1.0,
    "top_h": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Arguments that transformers ignores without do_sample, with the values that change nothing."""

_NAMED = ("streamer", "assistant_model", "logits_processor")
"""Arguments that `model.generate` has by name; all that is read here but these is in its kwargs."""


def passed_by_caller(frame: Any) -> dict[str, Any]:
    """Return the arguments of `model.generate`, and what a `generation_config` among them sets.

    transformers fills in its defaults and hands on no difference. Its frame still has the
    arguments, and the frame of `torch.no_grad` around it the configuration.

    Args:
        frame: of the function that `model.generate` called. Nothing is returned for another.
    """
    called = frame.f_back if frame is not None else None
    if called is None or "custom_generate" not in called.f_locals:
        return {}
    own = called.f_locals
    named = {name: own.get(name) for name in _NAMED}
    return named | _configured(called.f_back) | own.get("kwargs", {})


def _configured(frame: Any) -> dict[str, Any]:
    """Return what the `generation_config` sets that the frame of `torch.no_grad` was given."""
    if frame is None or frame.f_code.co_name != "decorate_context":
        return {}
    args, kwargs = frame.f_locals["args"], frame.f_locals["kwargs"]
    config = args[2] if len(args) > 2 else kwargs.get("generation_config")
    given = {} if config is None else config.to_dict()
    return {name: value for name, value in given.items() if value is not None}


def check_dropped(passed: dict[str, Any]) -> None:
    """Refuse what `model.generate` was given and does not hand on."""
    for name, way_out in (("streamer", "pass stream_to="), ("assistant_model", "leave it out")):
        if passed.get(name) is not None:
            raise UnsupportedParameter(
                f"{name}: transformers does not hand it on to custom_generate; {way_out}"
            )


def check_prompts(passed: dict[str, Any], input_ids: Tensor, inputs: Any, copies: int) -> None:
    """Refuse embeddings without ids, and an attention mask of another shape than the ids.

    Args:
        input_ids: [B, L], `copies` rows of each prompt.
        inputs: of the model beside them. Its mask is not there if it had no padding.
    """
    rows, length = len(input_ids) // copies, input_ids.shape[1]
    embeds = inputs.get("inputs_embeds")
    cache = inputs.get("cache", inputs.get("past_key_values"))  # its name up to 5.23
    if embeds is not None and length == 0:
        raise UnsupportedParameter(
            "inputs_embeds: expected the ids of the prompts beside them, got no input_ids; pass "
            "model.generate(input_ids, inputs_embeds=…)"
        )
    mask = passed.get("attention_mask")
    if mask is None:
        return
    held = 0 if cache is None else int(cache.get_seq_length())
    name = "input_ids"
    if embeds is not None:
        name, length = "inputs_embeds", embeds.shape[1]
    if tuple(mask.shape) not in ((rows, length), (rows, held + length)):
        behind = f", or [{rows}, {held + length}] with the {held} ids of the cache" if held else ""
        raise UnsupportedParameter(
            f"attention_mask: expected [{rows}, {length}], as {name} has{behind}, got "
            f"{tuple(mask.shape)}; pass 1 for each id, and 0 for padding"
        )


def check_alone(
    passed: dict[str, Any], seeds: Any, logits_processor: Sequence[Any], config: Any, defaults: Any
) -> None:
    """Refuse what stands beside `params` and says the same in another way.

    Args:
        config: of the call, into which transformers has filled `defaults` and its own, such as a
            `top_k` of 50, which nobody asked for.
        defaults: of the model.
    """
    given = ["seeds"] * (seeds is not None)
    if passed and passed.get("top_k") is None and defaults.top_k is None:
        own = {id(processor) for processor in passed["logits_processor"] or ()}
        logits_processor = [
            processor
            for processor in logits_processor
            if type(processor) is not TopKLogitsWarper or id(processor) in own
        ]
    given += [type(processor).__name__ for processor in logits_processor]
    if not config.do_sample:
        given += [name for name in _DRAWING if passed.get(name) not in (None, _DRAWING[name])]
    if given:
        raise UnsupportedParameter(
            f"params: expected neither seeds nor logits processors beside it, got "
            f"{', '.join(given)}; set fields of params and "
            "model.generation_config = GenerationConfig()"
        )


def check_greedy(passed: dict[str, Any], requests: Sequence[SamplingParams]) -> None:
    """Refuse a do_sample=False of the caller beside requests that draw."""
    drawn = [row for row, request in enumerate(requests) if not request.greedy]
    if drawn and passed.get("do_sample") is False:
        row = drawn[0]
        raise UnsupportedParameter(
            f"do_sample: expected True, or none, beside params[{row}] of temperature "
            f"{requests[row].temperature:g}, got False; leave do_sample out, or pass "
            "SamplingParams(temperature=0)"
        )
