"""The advice of messages, done as they say: the tokens that it gives, and those that must come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.support import wrong_batches as batches
from tests.support import wrong_samplers as samplers
from tests.support.mistakes import (
    HIDDEN,
    SHARDED,
    WEIGHT,
    B,
    D,
    Model,
    V,
    batch_of,
    sampler_over,
    tokens,
    under_meta,
)
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference, verify

LOGITS = HIDDEN @ WEIGHT.T
LINEAR, BIAS = torch.nn.Linear(D, V), torch.linspace(3, 0, V)
PENALISED: dict[str, Any] = {"temperature": 0, "frequency_penalty": 2}


def right_of(
    logits: torch.Tensor, batch: SamplingBatch | None = None, position: int = 0
) -> list[int]:
    """Return the tokens of the definition, of two plain rows without a batch."""
    found = reference.sample(logits.detach(), batch or batch_of(), position).token_ids
    return found.tolist()  # type: ignore[no-any-return]


def _drawn(batch: Any = None, **given: Any) -> list[int]:
    return tokens(sampler_over(), batch, **given)


def _after(*outputs: list[int]) -> SamplingBatch:
    """Return rows with penalties after these tokens."""
    params = [SamplingParams(seed=row, **PENALISED) for row in range(B)]
    return SamplingBatch.from_params(params, vocab_size=V, output_token_ids=list(outputs))


def _compiled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a compiled function made; the sampler is called outside of it."""
    return torch.compile(lambda: tensor + 0, backend="eager")()  # type: ignore[no-any-return]


def _inside_of_compile() -> list[int]:
    sampler, batch = sampler_over(), batch_of()
    step = torch.compile(lambda hidden: sampler(hidden, batch, 0).token_ids + 0, backend="eager")
    return step(HIDDEN).tolist()


def _of_logits(logits: torch.Tensor) -> list[int]:
    """Return the tokens of a sampler without a weight."""
    sampler = sampler_over(torch.empty(V, 0))
    return sampler.sample_logits(logits, batch_of(), 0).token_ids.tolist()


def _quantised() -> list[int]:
    """A head with a scale, which its 8-bit weight alone does not have."""
    quantised = (WEIGHT / 0.01).round().to(torch.int8)
    logits = 0.01 * (HIDDEN @ quantised.float().T)
    return _of_logits(logits)


def _assigned_anew() -> list[int]:
    batch = batch_of()
    batch.forced_token_ids = torch.tensor([3, 9])
    batch.permute([1, 0])
    batch.forced_token_ids = torch.tensor([9, 3])
    return _drawn(batch)


def _masked(name: str, mask: torch.Tensor) -> list[int]:
    batch = batch_of()
    setattr(batch, name, mask)
    return _drawn(batch)


def _two_slots() -> SamplingBatch:
    batch = batches.slots_of()
    batch.put(1, SamplingParams(seed=1))
    return batch


def _seeded(*seeds: int, device: Any = None) -> SamplingBatch:
    params = [SamplingParams(seed=each) for each in seeds]
    return SamplingBatch.from_params(params, vocab_size=V, device=device)


def _of_temperatures(*values: float) -> SamplingBatch:
    params = [SamplingParams(temperature=each, seed=row) for row, each in enumerate(values)]
    return SamplingBatch.from_params(params, vocab_size=V)


def _drawn_first() -> tuple[list[int], list[int]]:
    sampler, batch = sampler_over(), batch_of(seed=None)
    sampler.draw_seeds(batch)
    none = torch.zeros(B, 0, dtype=torch.int64)
    batch.with_drafts(none)
    found = verify(sampler, HIDDEN.unsqueeze(1), none, batch, 0)
    return found.token_ids.flatten().tolist(), right_of(LOGITS, batch)


def _with_room() -> list[int]:
    batch = SamplingBatch.from_params([SamplingParams(seed=0)], vocab_size=V, max_rows=B)
    batch.add(SamplingParams(seed=1))
    return _drawn(batch)


def _listed() -> list[int]:
    batch = _seeded(0, 1, 2)
    batch.drop(2)
    return _drawn(batch)


def _updated() -> list[int]:
    """A field of a request is changed by a whole request."""
    batch = batch_of()
    batch.update(0, replace(batch.requests[0], temperature=0.3))
    return _drawn(batch)


def _logprobs() -> list[float]:
    found = sampler_over().prompt_logprobs(HIDDEN, torch.tensor([1, 2])).values[:, 0]
    right = reference.logits(HIDDEN, WEIGHT).double().log_softmax(1)[[0, 1], [1, 2]]
    return (found - right).round(decimals=4).abs().tolist()


def _reported() -> list[int]:
    out = sampler_over()(HIDDEN, batch_of(logprobs=2), 0)
    assert out.logprobs.token_ids.shape == (B, 3)
    return out.token_ids.tolist()


def _verified(**options: Any) -> list[int]:
    drafts = torch.full((B, 2 if options else 1), -1)
    states = torch.ones(B, drafts.shape[1] + 1, D)
    found = verify(sampler_over(**options), states, drafts, batch_of(), 0).token_ids
    return found[:, 0].tolist()


FOLLOWED: dict[str, Callable[[], tuple[Any, Any]]] = {
    # --- requests and batches
    "a typing error": lambda: (
        _drawn(batch_of(temperature=0.4)),
        right_of(LOGITS, batch_of(temperature=0.4)),
    ),
    "n": lambda: (
        sampler_over()(HIDDEN, batch_of(), 0, num_samples=2).token_ids[:, 0].tolist(),
        LOGITS,
    ),
    "best_of": lambda: (tokens(sampler_over()), LOGITS),
    "prompt_logprobs": lambda: (_logprobs(), [0.0, 0.0]),
    "a field of a file": lambda: (
        _masked("grammar_bitmask", torch.full((B, 1), 1 << 7, dtype=torch.int32)),
        [7, 7],
    ),
    "logits_processors": lambda: (
        _drawn(batch_of(logit_bias={3: 100.0})),
        right_of(LOGITS + 100 * (torch.arange(V) == 3)),
    ),
    "top_logprobs": lambda: (_reported(), LOGITS),
    "min_tokens without the ids it holds back": lambda: (
        _drawn(batch_of(temperature=0, min_tokens=2, stop_token_ids=[18])),
        LOGITS.index_fill(1, torch.tensor([18]), -torch.inf).argmax(1).tolist(),
    ),
    "nothing left to draw": lambda: (
        _drawn(batch_of(allowed_token_ids=[5, 6], bad_words=[[5]])),
        [6, 6],
    ),
    "a device that is not here": lambda: (_drawn(_seeded(0, 1, device="cpu")), LOGITS),
    "a field for update": lambda: (_updated(), right_of(LOGITS, _of_temperatures(0.3, 1.0))),
    "a list for a batch": lambda: (
        _drawn(SamplingBatch.from_params(batch_of().requests, vocab_size=V)),
        LOGITS,
    ),
    "a batch built under another default device": lambda: (_drawn(under_meta("cpu")), LOGITS),
    "another number of rows": lambda: (
        _drawn(SamplingBatch.from_params(SamplingParams(seed=0), vocab_size=V)),
        right_of(LOGITS, batch_of(seed=0)),
    ),
    "more rows than there is room for": lambda: (tokens(sampler_over(max_rows=B)), LOGITS),
    "a mask of rows that left": lambda: (_assigned_anew(), [9, 3]),
    "a mask of other rows": lambda: (batches.forced([3, 9]), [3, 9]),
    "a kept set of a selection": lambda: (_drawn(batch_of().select(torch.tensor([0, 1]))), LOGITS),
    "a kept set in fixed rounds": lambda: (
        _drawn(batch_of(fixed_rounds=True, top_p=0.5)),
        right_of(LOGITS, batch_of(cap=4, top_p=0.5)),
    ),
    "slots without a request": lambda: (
        _drawn(_two_slots().select(torch.tensor([1, 0]))),
        right_of(LOGITS, _seeded(1, 0)),
    ),
    "an update without the tokens so far": lambda: (
        _drawn(batches.updated(_after([], [4]), output_token_ids=[])),
        right_of(LOGITS, _after([], [4])),
    ),
    "more requests than rows": lambda: (_with_room(), LOGITS),
    "one request that is to change": lambda: (_listed(), LOGITS),
    "a sampler that comes late": lambda: (
        batches.late(prepared=True),
        right_of(LOGITS, _after([3], [4])),
    ),
    "tokens that nobody appended": lambda: (
        batches.two_steps(appended=True),
        right_of(LOGITS, _after(*([token] for token in right_of(LOGITS, _after([], [])))), 1),
    ),
    "tensors of other rows": lambda: (
        _drawn(batches.over().select(torch.tensor([1])), hidden=HIDDEN[:1]),
        right_of(LOGITS[:1], _seeded(1)),
    ),
    "a selection of other rows": lambda: (
        _drawn(batch_of().select(torch.tensor([0, -1]))),
        [right_of(LOGITS)[0], -1],
    ),
    "a selection of rows that moved": lambda: (batches.moved(again=True), LOGITS),
    "a mask by slot for a verification": lambda: (batches.verified(by_slot=False), [3, 9]),
    "drafts of rows without a seed": _drawn_first,
    # --- samplers and steps
    "a module for a weight": lambda: (
        tokens(LMHeadSampler(LINEAR.weight, bias=LINEAR.bias)),
        LINEAR(HIDDEN),
    ),
    "a model for a weight": lambda: (
        tokens(LMHeadSampler(Model().lm_head.weight, bias=Model().lm_head.bias)),
        Model().lm_head(HIDDEN),
    ),
    "a transposed weight": lambda: (tokens(LMHeadSampler(WEIGHT.T.T)), LOGITS),
    "a weight [D, V]": lambda: (tokens(LMHeadSampler(WEIGHT.T.T.contiguous())), LOGITS),
    "a weight of another dtype": lambda: (
        tokens(LMHeadSampler(WEIGHT.double().to(torch.float32))),
        LOGITS,
    ),
    "a quantised weight": lambda: (_quantised(), 0.01 * (HIDDEN @ (WEIGHT / 0.01).round().T)),
    "a weight as a DTensor": lambda: (tokens(LMHeadSampler(WEIGHT)), LOGITS),
    "hidden states as a DTensor": lambda: (
        _drawn(hidden=SHARDED.as_subclass(torch.Tensor)),
        LOGITS,
    ),
    "hidden states of another dtype": lambda: (_drawn(hidden=HIDDEN.bfloat16().to(WEIGHT)), LOGITS),
    "hidden states of whole sequences": lambda: (_drawn(hidden=torch.ones(B, 3, D)[:, -1]), LOGITS),
    "hidden states of one row": lambda: (
        _drawn(_seeded(0), hidden=HIDDEN[0].unsqueeze(0)),
        right_of(LOGITS[:1], _seeded(0)),
    ),
    "strided hidden states": lambda: (_drawn(hidden=samplers.STRIDED.contiguous()), LOGITS),
    "strided logits": lambda: (_of_logits(LOGITS.T.T.contiguous()), LOGITS),
    "hidden states for no weight": lambda: (_of_logits(LOGITS), LOGITS),
    "an 8-bit copy of no weight": lambda: (_of_logits(LOGITS), LOGITS),
    "an 8-bit copy without a kernel": lambda: (
        tokens(LMHeadSampler(WEIGHT, screening="int8", backend="auto")),
        LOGITS,
    ),
    "an 8-bit copy of another weight": lambda: (samplers.changed(refreshed=True), 3 * LOGITS),
    "kernels without a GPU": lambda: (samplers.on_a_cpu_alone("auto"), LOGITS),
    "a bias that came later": lambda: (tokens(LMHeadSampler(WEIGHT, bias=BIAS)), LOGITS + BIAS),
    "another kind of weight": lambda: (
        tokens(LMHeadSampler(WEIGHT.bfloat16()), hidden=HIDDEN.bfloat16()),
        reference.logits(HIDDEN.bfloat16(), WEIGHT.bfloat16()),
    ),
    "a sampler that was closed": lambda: (tokens(sampler_over()), LOGITS),
    "a typing error of an attribute": lambda: (
        _masked("forced_token_ids", torch.tensor([3, 9])),
        [3, 9],
    ),
    "a prompt without its next token": lambda: (_logprobs(), [0.0, 0.0]),
    "more drafts than there is room for": lambda: (_verified(max_rows=6), LOGITS),
    "a draft of coupled verification": lambda: (_verified(), LOGITS),
    "an output inside torch.compile": lambda: (_inside_of_compile(), LOGITS),
    "a selection inside torch.compile": lambda: (
        _drawn(batch_of().select(samplers.BOTH), hidden=_compiled(HIDDEN)),
        LOGITS,
    ),
    "logits inside torch.compile": lambda: (_of_logits(_compiled(LOGITS)), LOGITS),
    "filters inside torch.compile": lambda: (
        _drawn(batch_of(top_p=0.9), hidden=_compiled(HIDDEN)),
        right_of(LOGITS, batch_of(top_p=0.9)),
    ),
}
"""Mistakes by name: a function does what the message says, and gives the tokens that it gives and
those that must come, or the logits that these are drawn of."""
