"""`generate` of transformers with tpsample: every token is sampled where its logits would be.

    from tpsample.integrations import transformers as tpsample_transformers

    model.generate(**inputs, do_sample=True, top_p=0.9, seeds=[1, 2],
                   custom_generate=tpsample_transformers.generate)

`custom_generate` is an official argument, and the model is not patched but for the forward of its
LM head, while the call lasts. A model that was loaded with ``tp_plan="auto"`` is sampled on its
shards, and nothing is gathered. Anything else is refused by name, see README.md.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import GenerationMode, StoppingCriteriaList

from tpsample.core.checks import describe
from tpsample.core.word import Status
from tpsample.errors import NoToken, UnsupportedParameter
from tpsample.integrations import TRIED, check_version
from tpsample.integrations.transformers_caller import (
    check_alone,
    check_dropped,
    check_greedy,
    check_prompts,
    passed_by_caller,
)
from tpsample.integrations.transformers_head import TransformersHead
from tpsample.integrations.transformers_params import Prompts, named_as_given, requests_of
from tpsample.request.batch import SamplingBatch
from tpsample.request.batch_checks import request_list
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler

_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    seeds: Sequence[int | None] | None = None,
    params: Sequence[SamplingParams] | None = None,
    stream_to: Any = None,
    sampler: LMHeadSampler | None = None,
    seed: None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate as `model.generate` does without `custom_generate`, one token per row and step.

    `model.generate` makes all of the arguments but these, which are passed to it by name.
    With tensor parallelism every rank calls with the same arguments.

    Args:
        seeds: one per row (and per returned sequence); None draws one. A row's text follows from
            its prompt and seed: not from the other rows, the padding or the number of ranks, for
            equal hidden states, and not from `torch.manual_seed`. Only with do_sample=True.
        params: one request per row, in place of `seeds` and of every argument that transformers
            makes a logits processor of. Processors are read by their exact types, so a version of
            transformers that was not tried is refused without `params`.
        stream_to: a streamer. It has another name because transformers does not hand its own
            `streamer` on to a function like this.
        sampler: to be used again, from `sampler_of`; default is one for this call. It takes the
            weight that the model has now.
        seed: refused, because each row has its own.

    Returns:
        int64 [B, L + new], prompts and tokens, padded behind a row's end.

    Raises:
        UnsupportedParameter: (a ValueError) something that is not honoured, by name.
        RankMismatch: (a ValueError) an argument is wrong on some ranks of a tensor-parallel model,
            or `sampler` is given on some alone; every rank raises it before its model runs.
        ImportError: this version of transformers was not tried.
        NoToken: (a RuntimeError) a row has none, because a logit is NaN or everything is masked.
    """
    if generation_config is None:
        raise TypeError(
            "generate: is called by transformers; call model.generate(input_ids, …, "
            "custom_generate=tpsample.integrations.transformers.generate)"
        )
    _check_model(model, synced_gpus)
    head, rows = TransformersHead(model), input_ids.shape[0]
    passed = passed_by_caller(inspect.currentframe())
    with head.agreed(sampler):
        if seed is not None:
            raise TypeError(f"seed: got {describe(seed)}; pass seeds=, one per row, such as [1, 2]")
        if stream_to is not None and not hasattr(stream_to, "put"):
            raise TypeError(
                "stream_to: expected a streamer of transformers, such as TextStreamer(tokenizer), "
                f"got {describe(stream_to)}"
            )
        _check_mode(generation_config)
        check_dropped(passed)
        check_prompts(passed, input_ids, model_kwargs, generation_config.num_return_sequences or 1)
        mask = model_kwargs.get("attention_mask")
        prompts = Prompts.of(input_ids, mask, getattr(generation_config, "_mask_length", None))
        if params is None:
            check_version("transformers", transformers.__version__)
            own_seeds = _seeds_of_rows(seeds, rows, drawn=generation_config.do_sample)
            with named_as_given(logits_processor):
                how = {"do_sample": generation_config.do_sample, "prompts": prompts}
                requests = requests_of(logits_processor, seeds=own_seeds, **how)
        else:
            configs = generation_config, model.generation_config
            check_alone(passed, seeds, logits_processor, *configs)
            if len(request_list(params)) != rows:
                raise ValueError(f"params: expected one per row, {rows}, got {len(params)}")
            requests = {"params": params, "prompt_token_ids": prompts.rows}
        batch = _batch_of(head, requests, () if params is not None else logits_processor)
        if params is not None:
            check_greedy(passed, batch.requests)
        if sampler is not None:
            head.check_sampler(sampler)
    own = head.sampler(max_rows=rows) if sampler is None else head.rebind_sampler(sampler)
    config = copy.copy(generation_config)
    config.do_sample, config.disable_compile = False, True  # the argmax of `_Drawn` is a draw
    try:
        positions = torch.tensor(prompts.positions, device=input_ids.device)
        draws = _Draws(stopping_criteria, own, head, batch, positions)
        if stream_to is not None:
            stream_to.put(input_ids.cpu())
        with head.aside():
            sequences: Tensor = model._sample(
                input_ids, draws.draw, draws, config, streamer=stream_to, **model_kwargs
            )
        return sequences
    except NoToken:
        if stream_to is not None:  # whose reader would wait for more
            stream_to.end()
        raise
    finally:
        if sampler is None:
            own.close()


def sampler_of(model: Any, max_rows: int) -> LMHeadSampler:
    """Return a sampler for several calls of `generate` with up to `max_rows` rows. Collective."""
    return TransformersHead(model).sampler(max_rows=max_rows)


def _seeds_of_rows(seeds: Any, rows: int, *, drawn: bool) -> list[int | None]:
    """Return one seed, or None, per row; `drawn` says whether rows draw at all."""
    if seeds is None:
        return [None] * rows
    if not drawn:
        raise UnsupportedParameter(
            "seeds: do_sample=False takes the most likely tokens and draws none; pass "
            "do_sample=True, or leave seeds out"
        )
    if not isinstance(seeds, Sequence):
        raise TypeError(f"seeds: expected one per row, such as [1, 2], got {describe(seeds)}")
    if len(seeds) != rows:
        raise ValueError(f"seeds: expected one per row, {rows}, got {len(seeds)}")
    return list(seeds)


def _batch_of(head: TransformersHead, requests: dict[str, Any], named: Any) -> SamplingBatch:
    """Return the rows of a call, whose errors name what the logits processors `named` set."""
    vocab_size, device = len(head.weight), head.weight.device
    with named_as_given(named):
        batch = SamplingBatch.from_params(**requests, vocab_size=vocab_size, device=device)
    if any(request.asks_logprobs for request in batch.requests):
        raise UnsupportedParameter(
            "params: logprobs and logprob_token_ids are not supported, because generate "
            "returns token ids alone; leave them out"
        )
    return batch


class _Drawn:
    """Stands for scores [B, V] in `GenerationMixin._sample`; its argmax are the tokens drawn."""

    def __init__(self, token_ids: Tensor) -> None:
        self._token_ids = token_ids

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Tensor:
        if function is not torch.argmax:
            raise RuntimeError(
                f"transformers: expected its loop to take the argmax of scores, it called "
                f"{function.__name__}; pip install 'transformers=={TRIED['transformers'][-1]}.*'"
            )
        token_ids: Tensor = args[0]._token_ids
        return token_ids


class _Draws(StoppingCriteriaList):  # type: ignore[misc]
    """Draws the tokens of a call, and ends it where a row that goes on has none.

    Nobody is shown an id below 0, which a model, a streamer or a criterion may take as an index.
    """

    def __init__(
        self,
        criteria: Any,
        sampler: LMHeadSampler,
        head: TransformersHead,
        batch: SamplingBatch,
        positions: Tensor,
    ) -> None:
        super().__init__(criteria)
        self._sampler, self._head, self._batch, self._step = sampler, head, batch, 0
        self._positions = positions.to(batch.device)
        self._done = torch.zeros_like(positions, dtype=torch.bool)

    def draw(self, input_ids: Tensor, scores: Tensor) -> _Drawn:
        """Stand in for the logits processors, with the hidden states that the head has kept."""
        hidden_states = self._head.hidden_states[:, -1].to(self._sampler.weight.dtype)
        out = self._sampler(hidden_states.contiguous(), self._batch, self._positions + self._step)
        self._batch.append(out.token_ids)
        self._status, self._step = out.status, self._step + 1
        return _Drawn(out.token_ids.clamp(min=0).to(input_ids.device))  # of a row that has ended

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        failed = (self._status != Status.OK).to(input_ids.device) & ~self._done
        for row in failed.nonzero().flatten().tolist():
            raise NoToken(
                f"generate: row {row} has no token {self._step - 1} behind its prompt, status "
                f"{Status(int(self._status[row])).name}"
            )
        ends: Tensor = super().__call__(input_ids, scores, **options)
        self._done = self._done | ends
        return ends


def _check_model(model: Any, synced_gpus: bool) -> None:
    """Refuse models that `generate` can run and this loop cannot."""
    if model.config.is_encoder_decoder:
        raise UnsupportedParameter("model: encoder-decoder models are not supported")
    if synced_gpus or any(type(part).__name__.startswith("FSDP") for part in model.modules()):
        raise UnsupportedParameter("model: FSDP and DeepSpeed ZeRO-3 are not supported")


def _check_mode(config: Any) -> None:
    """Refuse what `generate` can do and this loop does not."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise UnsupportedParameter(f"generate: expected sampling or greedy search, got {mode}")
    if config.return_dict_in_generate or any(getattr(config, name, False) for name in _OUTPUTS):
        raise UnsupportedParameter(
            "return_dict_in_generate, " + ", ".join(_OUTPUTS) + ": not supported, because no "
            "logits are made; leave them off"
        )


class _Generates(ModuleType):
    """This module, which may be passed for its function: transformers passes over a
    `custom_generate` that it cannot call, and draws the tokens itself."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _Generates
