"""The parts of the golden tokens: how requests, batches, heads and drafts come together.

A part is a function of `make(weight, **options)`, which builds this rank's sampler of a whole
weight, because ranks of several kinds run the same parts. It yields names and what was returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.fields import OTHER_FILTERS, one_with
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    sample_draft,
    verify,
    verify_logits,
)

V, D, STEPS, DRAFTS = 401, 6, 4, 2
PROMPT, OUTPUT = [1, 3, 9], [3, 5, 5, 7]

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    **{
        f"top_k {k}, top_p {p}, min_p {m}": {"top_k": k, "top_p": p, "min_p": m}
        for k, p, m in itertools.product((0, 7, 300), (1.0, 0.8), (0.0, 0.02))
        if (k, p, m) != (0, 1.0, 0.0)
    },
    "keep ties": {"top_k": 5, "ties": "keep", "temperature": 3.0},
    "joint": {"top_k": 20, "top_p": 0.5, "filter_order": "joint"},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "output alone": {"repetition_penalty": 2.0, "repetition_scope": "output"},
    "bias": {"logit_bias": {4: 3.5, 5: -100.0, 9: 250.0}},
    "allowed": {"allowed_token_ids": [3, 50, 200, 399], "top_p": 0.9},
    "bad words": {"bad_words": [[7, 8], [5, 7, 9], [200]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [2, 100, 101]},
    "unlike seeds": {"seed": 2**64 - 1},
    "negative seed": {"seed": -5},
}
FILTERED: list[dict[str, Any]] = [
    {},
    {"top_k": 4},
    {"top_p": 0.7, "presence_penalty": 0.5, "temperature": 0.6},
]
BY_FIRST_WORDS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 300, "top_p": 0.01},
    {"top_k": 30, "min_p": 0.5},
    {"top_k": 90, "top_p": 0.9},
]
"""Requests whose first tokens decide them."""

REPORTING: list[dict[str, Any]] = [
    {"logprobs": 3, "logprob_token_ids": [0, 5, V - 1], "logprobs_mode": mode, **fields}
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
    for fields in FILTERED
]

RULES: list[dict[str, Any]] = [
    {**each, **fields}
    for each in one_with(OTHER_FILTERS)
    for fields in (
        {},
        {"top_k": 30, "top_p": 0.8},
        {"top_p": 0.7, "min_p": 0.1, "filter_order": "min_p_last", "temperature": 2.0},
        {"top_k": 300, "presence_penalty": 0.5, "logprobs": 2},
        {"top_p": 0.6, "logprobs": 2, "logprobs_mode": "processed_logprobs", "ties": "keep"},
    )
]
"""With rules that `REQUESTS` has not. They have a head of their own, so that new ones change no
other token."""

Make = Callable[..., LMHeadSampler]
Found = Iterator[tuple[str, Any]]


def requests(fields: Iterable[dict[str, Any]] = REQUESTS.values()) -> list[SamplingParams]:
    return [SamplingParams(**{"seed": 40 + row, **each}) for row, each in enumerate(fields)]


ROWS = len(REQUESTS)


def so_far(rows: int) -> dict[str, list[list[int]]]:
    """A prompt and some output of every row."""
    return {"prompt_token_ids": [PROMPT] * rows, "output_token_ids": [OUTPUT] * rows}


def batch_of(params: Sequence[SamplingParams], shard: VocabShard, **options: Any) -> SamplingBatch:
    """A batch whose rows have had a prompt and some output."""
    its = so_far(len(params)) | {"device": torch.get_default_device()} | options
    made = SamplingBatch.from_params(params, vocab_size=V, **its)
    made.prepare(shard)
    return made


def integers(least: int, most: int, *shape: int, generator: torch.Generator) -> Tensor:
    """Return random integers from `least` on and below `most`, the same on every device."""
    made = torch.randint(least, most, shape, generator=generator, device="cpu")
    return made.to(torch.get_default_device())


def head(rows: int) -> tuple[Tensor, Tensor]:
    """Small integers, whose products are exact in every order and dtype."""
    generator = torch.Generator().manual_seed(77)
    hidden_states = integers(-2, 3, rows, DRAFTS + 1, D, generator=generator)
    weight = integers(-2, 3, V, D, generator=generator)
    return hidden_states.float(), weight.float()


def cancelling_head(rows: int) -> tuple[Tensor, Tensor]:
    """Real numbers of 24 bits whose products, of ±1.5e7, cancel by seven digits."""
    generator = torch.Generator().manual_seed(78)
    hidden_states, weight, rest = (
        integers(-(2**24), 2**24, size, 24, generator=generator) / scale
        for size, scale in ((rows, 4800.0), (V, 3200.0), (V, 1.6e10))
    )
    return hidden_states.repeat(1, 2), torch.cat([weight, rest - weight], dim=1)


def masks(rows: int) -> tuple[Tensor, Tensor]:
    """A grammar bitmask that bars some ids of every other row, and forced ids of some rows."""
    bits = torch.full((rows, -(-V // 32)), -1, dtype=torch.int32)
    bits[::2, ::3] = 0
    return bits, torch.where(torch.arange(rows) % 5 == 4, torch.arange(rows), -1)


def steps(make: Make) -> Found:
    hidden_states, weight = head(ROWS)
    sampler, params = make(weight), requests()
    batch = batch_of(params, sampler.shard)
    for step in range(STEPS):
        out = sampler(hidden_states[:, 0], batch, 100 * step + torch.arange(ROWS))
        batch.append(out.token_ids)
        yield f"{step}", out
    batch = batch_of(params, sampler.shard)
    yield "samples", sampler(hidden_states[:, 1], batch, 9, num_samples=2)
    batch.grammar_bitmask, batch.forced_token_ids = masks(ROWS)
    yield "masks", sampler(hidden_states[:, 0], batch, 7)
    fixed = batch_of(params, sampler.shard, fixed_rounds=True)
    yield "fixed rounds", sampler(hidden_states[:, 2], fixed, 2**40)


def cancelling(make: Make) -> Found:
    hidden_states, weight = cancelling_head(ROWS)
    sampler, params = make(weight), requests()
    for step in range(STEPS):
        batch = batch_of(params, sampler.shard)
        yield f"{step}", sampler(hidden_states, batch, 100 * step + torch.arange(ROWS))
    params = requests(REPORTING)
    batch = batch_of(params, sampler.shard)
    yield "logprobs", sampler(hidden_states[: len(params)], batch, 5)
    asked = [{"logprobs": -1, "logprobs_mode": "raw_logits"}] * ROWS
    yield "all logits", sampler(hidden_states, batch_of(requests(asked), sampler.shard), 5)


def heads(make: Make) -> Found:
    hidden_states, weight = head(ROWS)
    bias = torch.arange(V) % 7 / 4
    for name, options in {
        "scale and bias": {"logit_scale": 0.75, "bias": bias},
        "soft-cap": {"logit_softcap": 3.0},
        "bf16": {},
    }.items():
        sampler = make(weight.bfloat16() if name == "bf16" else weight, **options)
        batch = batch_of(requests(), sampler.shard)
        yield name, sampler(hidden_states[:, 1].to(sampler.weight.dtype), batch, 11)


def reports(make: Make) -> Found:
    params = requests(REPORTING)
    rows = len(params)
    hidden_states, weight = head(rows)
    sampler = make(weight)
    batch = batch_of(params, sampler.shard)
    yield "logprobs", sampler(hidden_states[:, 0], batch, 5)
    batch = batch_of(params[:3], sampler.shard)
    yield "logprobs of samples", sampler(hidden_states[:3, 1], batch, 5, num_samples=2)
    yield "prompt", sampler.prompt_logprobs(hidden_states[:, 2], torch.arange(rows) * 30, top=2)
    batch = batch_of(requests(), sampler.shard, kept_cap=12)
    yield "kept", sampler(head(ROWS)[0][:, 0], batch, 5)
    batch = batch_of(requests(BY_FIRST_WORDS), sampler.shard, kept_cap=12)
    yield "kept of first words", sampler(hidden_states[: len(BY_FIRST_WORDS), 0], batch, 5)


def logits(make: Make) -> Found:
    """Logits of the caller, real numbers; every kind of request meets each way to fail."""
    generator = torch.Generator().manual_seed(79)
    whole = integers(-(2**16), 2**16, ROWS, V, generator=generator) / 2.0**13
    failing = whole.clone()
    failing[1::5, 17], failing[2::5] = torch.nan, -torch.inf
    failing[3::5, 90] = failing[3::5, 30] = torch.inf
    for name, each, options in (
        ("real", whole, {}),
        ("half", whole.bfloat16(), {}),
        ("fp16", whole.half(), {}),
        ("failing", failing, {}),
        ("failing, as 9", failing, {"on_failed": 9}),
        ("ties", whole.round(), {}),
    ):
        sampler = make(torch.empty(V, 0), **options)
        own = each[:, sampler.shard.start : sampler.shard.stop].contiguous()
        batch = batch_of(requests(), sampler.shard)
        yield name, sampler.sample_logits(own, batch, torch.arange(ROWS))


def slots(make: Make) -> Found:
    hidden_states, weight = head(8)
    sampler, params = make(weight), [*requests(), *requests(REPORTING)[3:]]
    batch = SamplingBatch.of_slots(8, vocab_size=V, device=torch.get_default_device())
    batch.prepare(sampler.shard)
    order = [6, 1, 7, 0, 3, 5, 2, 4]
    for wave in range(0, len(params), 8):
        here = list(zip(order, params[wave : wave + 8], strict=False))
        batch.put([slot for slot, _ in here], [each for _, each in here], **so_far(len(here)))
        for number, named in enumerate(
            ([5, -1, 0, 3, 3, 99, 2, -1], [7, 6, -7, 4, 1], [*range(8)])
        ):
            rows = batch.select(torch.tensor(named))
            if number == 1:
                rows.grammar_bitmask, rows.forced_token_ids = masks(len(named))
            samples = 2 if number == 2 else None
            out = sampler(
                hidden_states[: len(named), number], rows, wave + number, num_samples=samples
            )
            yield f"{wave} {number}", out
            for column in out.token_ids.view(len(named), -1).unbind(1):  # samples are no text
                rows.append(column)
        batch.free([wave % 5, 6])
        rows = batch.select(torch.tensor([6, 7, 6, wave % 5, -1, 3], dtype=torch.int32))
        yield f"{wave} freed", sampler(hidden_states[:6, 0], rows, wave)
        drafts = torch.tensor([[0, 9]] * 6)
        yield f"{wave} verified", verify(sampler, hidden_states[:6], drafts, rows, wave)


def tensors(make: Make) -> Found:
    count = 24
    hidden_states, weight = head(count)
    sampler, index = make(weight), torch.arange(count)
    columns = {
        "temperature": torch.tensor([0.0, 2.0, 5.0, 30.0])[index % 4],
        "seed": index * 2**60 - 5,
        "top_k": torch.tensor([0, 7, 300, -1, 60])[index % 5],
        "top_p": torch.tensor([1.0, 0.7, 0.3], dtype=torch.float64)[index % 3],
        "min_p": torch.tensor([0.3, 0.0])[index // 3 % 2],
    }
    for filter_order in ("sequential", "joint", "min_p_last"):
        batch = SamplingBatch.from_tensors(vocab_size=V, **columns, filter_order=filter_order)
        yield filter_order, sampler(hidden_states[:, 0], batch, index)
        rows = batch.select(torch.tensor([3, -1, 11, 0, 3, 50]))
        yield f"{filter_order}, some", sampler(hidden_states[:6, 1], rows, 3, num_samples=2)
        for given in (("top_p",), ("top_k", "min_p"), ()):
            its = {name: columns[name] for name in ("temperature", "seed", *given)}
            batch = SamplingBatch.from_tensors(vocab_size=V, **its, filter_order=filter_order)
            yield (
                f"{filter_order}, only {' '.join(given)}",
                sampler(hidden_states[:, 2], batch, 4),
            )


def changes(make: Make) -> Found:
    hidden_states, weight = head(ROWS)
    sampler, params = make(weight), requests()
    batch = batch_of(params[:16], sampler.shard, max_rows=20)
    of_row = {"prompt_token_ids": PROMPT, "output_token_ids": OUTPUT}
    changed: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "add": lambda: [batch.add(each, **of_row) for each in params[16:20]],
        "drop": lambda: batch.drop([1, 4, 17]),
        "permute": lambda: batch.permute([*range(batch.rows)][::-1]),
        "arrange": lambda: batch.arrange([3, 17, 0, *range(5, 15), 18], params[20:22], **so_far(2)),
        "update": lambda: batch.update(7, params[2], **of_row),
        "write": lambda: (batch.temperature[3:5].fill_(0.5), batch.seed[5:7].fill_(-9)),
        "drop one": lambda: batch.drop(0),
    }
    for number, (name, change) in enumerate(changed.items()):
        change()
        if number % 3 == 2:
            batch.grammar_bitmask, batch.forced_token_ids = masks(batch.rows)
        out = sampler(hidden_states[: batch.rows, number % 3], batch, 10 * number)
        yield name, out
        batch.append(out.token_ids)
        batch.grammar_bitmask = batch.forced_token_ids = None


def verified(make: Make) -> Found:
    hidden_states, weight = head(ROWS)
    sampler, params = make(weight, on_failed=9), [*requests()[:-2], *requests(REPORTING)[10:]]
    own = (hidden_states[:, 1] @ weight.T)[:, sampler.shard.start : sampler.shard.stop]
    lengths = torch.arange(ROWS) % 4 - 1
    for method in ("coupled", "rejection", "block"):
        batch = batch_of(params, sampler.shard)
        drafts = torch.stack(
            [
                sample_draft(sampler, own, batch, 20 + i, i, method=method).token_ids
                for i in range(DRAFTS)
            ],
            1,
        )
        yield f"{method}, drafts", drafts
        laws = {} if method == "coupled" else {"draft_logits": torch.stack([own] * DRAFTS, dim=1)}
        yield method, verify(sampler, hidden_states, drafts, batch, 20, method=method, **laws)
        if method != "coupled":
            certain = verify(sampler, hidden_states, drafts, batch, 21, method=method)
            yield f"{method}, certain", certain
        logits = (hidden_states @ weight.T)[..., sampler.shard.start : sampler.shard.stop]
        logits = logits.clone()
        logits[::7] = torch.nan
        how: dict[str, Any] = {"method": method, "lengths": lengths}
        found = verify_logits(sampler, logits.contiguous(), drafts, batch, 20, **how)
        yield f"{method}, of logits", found


def rules(make: Make) -> Found:
    for fields in RULES:
        hidden_states, weight = head(4)
        sampler, positions = make(weight), torch.arange(4)
        params = requests([fields] * 4)
        for name, options in {"": {}, ", fixed rounds": {"fixed_rounds": True}}.items():
            batch = batch_of(params, sampler.shard, kept_cap=20, **options)
            yield f"{fields}{name}", sampler(hidden_states[:, 0], batch, positions, num_samples=2)
        drafts = torch.tensor([[3, 9]] * 4)
        for method in ("coupled", "rejection", "block"):
            batch = batch_of(params, sampler.shard)
            found = verify(sampler, hidden_states, drafts, batch, positions, method=method)
            yield f"{fields}, {method}", found


PARTS = {
    each.__name__: each
    for each in (
        steps,
        cancelling,
        heads,
        reports,
        logits,
        slots,
        tensors,
        changes,
        verified,
        rules,
    )
}
