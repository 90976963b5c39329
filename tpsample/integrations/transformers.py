"""`generate` of transformers with tpsample: every token is sampled where its logits would be.

    from tpsample.integrations import transformers as tpsample_transformers

    model.generate(**inputs, do_sample=True, top_p=0.9, seeds=[1, 2],
                   custom_generate=tpsample_transformers.generate)

`custom_generate` is an official argument, and the model is not patched but for the forward of its
LM head, while the call lasts. A model that was loaded with ``tp_plan="auto"`` is sampled on its
shards, and nothing is gathered. Anything else is refused by name, see README.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import GenerationMode

from tpsample.core.word import Status
from tpsample.errors import UnsupportedParameter
from tpsample.integrations import check_version
from tpsample.integrations.transformers_head import TransformersHead
from tpsample.integrations.transformers_params import Prompts, requests_of
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler

check_version("transformers", transformers.__version__)

_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    seeds: Sequence[int | None] | None = None,
    stream_to: Any = None,
    sampler: LMHeadSampler | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate as `model.generate` does without `custom_generate`, one token per row and step.

    `model.generate` makes all of the arguments but these three, which are passed to it by name.
    With tensor parallelism every rank calls with the same arguments.

    Args:
        seeds: one per row (and per returned sequence); None draws one. A row's text follows from
            its prompt and seed: not from the other rows, the padding or the number of ranks, for
            equal hidden states.
        stream_to: a streamer. It has another name because transformers does not hand its own
            `streamer` on to a function like this.
        sampler: to be used again, from `sampler_of`; default is one for this call.

    Returns:
        int64 [B, L + new], prompts and tokens, padded behind a row's end.

    Raises:
        UnsupportedParameter: (a ValueError) something that is not honoured, by name.
        RuntimeError: a row has no token, because a logit is NaN or everything is masked.
    """
    _check(model, generation_config, synced_gpus)
    _check_dropped(inspect.currentframe())
    rows, mask = input_ids.shape[0], model_kwargs.get("attention_mask")
    prompts = Prompts.of(input_ids, mask)
    seeds = [None] * rows if seeds is None else list(seeds)
    if len(seeds) != rows:
        raise ValueError(f"seeds: expected one per row, {rows}, got {len(seeds)}")
    requests = requests_of(
        logits_processor, do_sample=generation_config.do_sample, prompts=prompts, seeds=seeds
    )
    head = TransformersHead(model)
    own = head.sampler(rows) if sampler is None else sampler
    try:
        batch = SamplingBatch.from_params(
            requests.params,
            vocab_size=own.vocab_size,
            device=own.weight.device,
            prompt_token_ids=requests.prompt_token_ids,
            output_token_ids=requests.output_token_ids,
        )
        positions = torch.tensor([len(row) for row in prompts.rows], device=own.weight.device)
        with head.aside():
            return _decode(
                model,
                input_ids,
                stopping_criteria,
                generation_config,
                stream_to,
                model_kwargs,
                lambda step: _tokens(own, head, batch, positions + step),
            )
    finally:
        if sampler is None:
            own.close()


def sampler_of(model: Any, max_rows: int) -> LMHeadSampler:
    """Return a sampler for several calls of `generate` with up to `max_rows` rows. Collective."""
    return TransformersHead(model).sampler(max_rows)


def _tokens(
    sampler: LMHeadSampler, head: TransformersHead, batch: SamplingBatch, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tokens and status of a step, whose hidden states the head has kept."""
    assert head.hidden_states is not None
    hidden_states = head.hidden_states[:, -1].to(sampler.weight.dtype).contiguous()
    out = sampler(hidden_states, batch, positions)
    batch.append(out.token_ids)
    return out.token_ids, out.status


def _decode(
    model: Any,
    input_ids: Tensor,
    stopping_criteria: Any,
    config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
    sample: Any,
) -> Tensor:
    """The loop of `GenerationMixin._sample`, in which `sample(step)` draws the tokens."""
    pad = config._pad_token_tensor
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones(len(input_ids), dtype=torch.int64, device=input_ids.device)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    step, going = 0, True
    while going:
        if step:
            inputs = model.prepare_inputs_for_generation(
                input_ids,
                next_sequence_length=1 if model_kwargs["use_cache"] else None,
                **model_kwargs,
            )
            outputs = model(**inputs, return_dict=True)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        token_ids, status = (x.to(input_ids.device) for x in sample(step))
        failed = (status != Status.OK) & (unfinished == 1)
        if ends:
            token_ids = token_ids * unfinished + pad.to(input_ids.device) * (1 - unfinished)
        input_ids = torch.cat([input_ids, token_ids.unsqueeze(1)], dim=1)
        unfinished = unfinished & ~stopping_criteria(input_ids, None)
        going, any_failed = torch.stack([unfinished.any(), failed.any()]).tolist()
        if any_failed:
            row = int(failed.nonzero()[0])
            raise RuntimeError(
                f"generate: row {row} has no token {step} behind its prompt, status "
                f"{Status(int(status[row])).name}"
            )
        if streamer is not None:
            streamer.put(token_ids.cpu())
        step += 1
    if streamer is not None:
        streamer.end()
    return input_ids


def _check_dropped(frame: Any) -> None:
    """Refuse what `model.generate` was given and does not hand on; its frame is the caller's."""
    given = frame.f_back.f_locals if frame is not None and frame.f_back is not None else {}
    for name, way_out in (("streamer", "pass stream_to="), ("assistant_model", "leave it out")):
        if given.get(name) is not None and "custom_generate" in given:
            raise UnsupportedParameter(
                f"{name}: transformers does not hand it on to custom_generate; {way_out}"
            )


def _check(model: Any, config: Any, synced_gpus: bool) -> None:
    """Refuse what `generate` can do and this loop does not."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise UnsupportedParameter(f"generate: expected sampling or greedy search, got {mode}")
    if model.config.is_encoder_decoder:
        raise UnsupportedParameter("model: encoder-decoder models are not supported")
    if config.return_dict_in_generate or any(getattr(config, name, False) for name in _OUTPUTS):
        raise UnsupportedParameter(
            "return_dict_in_generate, " + ", ".join(_OUTPUTS) + ": not supported, because no "
            "logits are made; leave them off"
        )
    if synced_gpus or any(type(part).__name__.startswith("FSDP") for part in model.modules()):
        raise UnsupportedParameter("model: FSDP and DeepSpeed ZeRO-3 are not supported")
