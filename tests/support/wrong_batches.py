"""Mistakes with requests and batches: each call, and the whole message that must come."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from tests.support.mistakes import (
    HIDDEN,
    B,
    D,
    V,
    batch_of,
    request,
    sampler_over,
    under_meta,
)
from tpsample import SamplingBatch, SamplingParams, verify
from tpsample.request.as_json import from_json


def with_stale_mask() -> object:
    batch = batch_of()
    batch.forced_token_ids = torch.tensor([3, 9])
    batch.drop(0)
    return sampler_over()(HIDDEN[:1], batch, 0)


def slots_of() -> SamplingBatch:
    """Return slots, and the last is empty."""
    batch = SamplingBatch.of_slots(B, vocab_size=V)
    batch.put(0, SamplingParams(seed=0))
    return batch


def late() -> object:
    """Let a sampler see a batch first after tokens were appended."""
    batch = batch_of(frequency_penalty=2)
    batch.append(torch.tensor([3, 4]))
    return sampler_over()(HIDDEN, batch, 0)


def two_steps() -> object:
    """Take a second step with penalties before the first one's tokens are appended."""
    sampler, batch = sampler_over(), batch_of(frequency_penalty=2)
    sampler(HIDDEN, batch, 0)
    return sampler(HIDDEN, batch, 1)


def moved() -> object:
    """Take a step of rows that moved after they were selected."""
    batch = batch_of()
    rows = batch.select(torch.tensor([0, 1]))
    batch.permute([1, 0])
    return sampler_over()(HIDDEN, rows, 0)


def verified() -> object:
    """Verify drafts of slots whose mask has a row per slot."""
    batch = batch_of()
    rows = batch.select(torch.tensor([0, 1]))
    batch.forced_token_ids = torch.tensor([3, 9])
    hidden_states = HIDDEN.unsqueeze(1).repeat(1, 2, 1)
    return verify(sampler_over(), hidden_states, torch.tensor([[3], [9]]), rows, 0)


def forced(ids: list[int]) -> object:
    """Take a step of two rows with so many forced ids."""
    batch = batch_of()
    batch.forced_token_ids = torch.tensor(ids)
    return sampler_over()(HIDDEN, batch, 0)


BATCHES: dict[str, tuple[Callable[[], object], str]] = {
    "bad_words of ids": (
        lambda: SamplingParams(bad_words=[5, 6]),
        "bad_words: expected sequences of token ids, such as [[5, 6]], got 5 among them; words of "
        "text are the tokenizer's to encode",
    ),
    "max_tokens": (
        lambda: request(temperature=1, max_tokens=16),
        "max_tokens: not a field of SamplingParams; when an answer ends is the engine's to decide, "
        "between two steps",
    ),
    "stop": (
        lambda: request(stop=["."]),
        "stop: not a field of SamplingParams; texts that end an answer are the engine's to look "
        "for; for ids see stop_token_ids",
    ),
    "n": (
        lambda: request(n=2),
        "n: not a field of SamplingParams; give each answer a request with a seed of its own, or "
        "call the sampler with num_samples=",
    ),
    "a typing error": (
        lambda: request(temprature=1),
        "temprature: not a field of SamplingParams; did you mean temperature?",
    ),
    "a field of a file": (
        lambda: from_json("params[0]", {"structured_outputs": {}}),
        "params[0]: structured_outputs: not a field of SamplingParams; set "
        "SamplingBatch.grammar_bitmask before each step",
    ),
    "a temperature beyond fp32": (
        lambda: SamplingParams(temperature=1e39),
        "temperature: expected a finite fp32 number >= 0, got 1e+39, which is inf in fp32",
    ),
    "a seed of 65 bits": (
        lambda: SamplingParams(seed=2**64),
        "seed: expected None or an int of 64 bits, got 18446744073709551616",
    ),
    "an id outside the vocabulary": (
        lambda: batch_of(min_tokens=1, stop_token_ids=[V]),
        "stop_token_ids: expected ids in [0, 20), got 20",
    ),
    "nothing left to draw": (
        lambda: SamplingParams(allowed_token_ids=[5], bad_words=[[5]]),
        "allowed_token_ids: bad_words and min_tokens forbid every id in it, so no token is left; "
        "allow another id",
    ),
    "fields without their names": (
        lambda: SamplingParams(0.7, 1),
        "SamplingParams: expected every field by its name, such as temperature=0.7, got 0.7 "
        "without a name; give it one",
    ),
    "a mask for allowed ids": (
        lambda: SamplingParams(allowed_token_ids=[0, 1, 1, 0]),
        "allowed_token_ids: expected each id once, got some repeatedly; of a mask take the ids, "
        "mask.nonzero().flatten().tolist()",
    ),
    "a bias that comes later": (
        lambda: SamplingParams(logit_bias={1: 1.0}).logit_bias.update({7: 1000.0}),
        "a request is frozen; make another by dataclasses.replace",
    ),
    "ids to stop at": (
        lambda: SamplingParams(stop_token_ids=[2]),
        "stop_token_ids has no effect without min_tokens, because it names the ids that min_tokens "
        "holds back; end the text yourself when one of them is drawn",
    ),
    "a request put into the listing of a batch": (
        lambda: operator.setitem(batch_of().requests, 0, SamplingParams()),
        "'tuple' object does not support item assignment",
    ),
    # --- batches
    "one prompt in place of one per row": (
        lambda: SamplingBatch.from_params([SamplingParams()], vocab_size=V, prompt_token_ids=[5]),
        "prompt_token_ids[0]: expected a sequence of token ids, got 5; a batch takes one per row, "
        "such as [[5, 6], []]",
    ),
    "a field for update": (
        lambda: batch_of().update(0, temperature=0.3),
        "update: expected a whole SamplingParams, got temperature=0.3; pass "
        "dataclasses.replace(batch.requests[0], temperature=0.3)",
    ),
    "a device that is not here": (
        lambda: SamplingBatch.from_params([], vocab_size=V, device="cuda:99"),
        "device: torch has no 'cuda:99' here (",
    ),
    "tokens of other rows": (
        lambda: batch_of(frequency_penalty=1).append(torch.zeros(3, dtype=torch.int64)),
        "token_ids: expected the tokens of 2 rows, as the batch has, got 3 rows",
    ),
    "a list for a batch": (
        lambda: sampler_over()(HIDDEN, [SamplingParams()] * B, 0),
        "batch: expected a SamplingBatch, got list; see SamplingBatch.from_params",
    ),
    "a batch of another vocabulary": (
        lambda: sampler_over()(HIDDEN, SamplingBatch.from_params([], vocab_size=V + 1), 0),
        "batch: expected vocab_size 20 as the sampler has, got 21",
    ),
    "a batch built under another default device": (
        lambda: sampler_over()(HIDDEN, under_meta(), 0),
        "batch: expected tensors on cpu, got meta; build it with device='cpu'",
    ),
    "another number of rows": (
        lambda: sampler_over()(torch.ones(3, D), batch_of(), 0),
        "batch: expected 3 rows, as hidden_states or logits have, got 2; pass one SamplingParams "
        "per row",
    ),
    "more rows than there is room for": (
        lambda: sampler_over()(torch.ones(5, D), SamplingBatch.from_params([], vocab_size=V), 0),
        "hidden_states: 5 rows × 1 samples exceed max_rows=4; build the sampler with a larger "
        "max_rows",
    ),
    "a mask of rows that left": (
        with_stale_mask,
        "batch.forced_token_ids: rows of the batch joined, left, moved or changed since it was "
        "assigned; assign it anew, or None",
    ),
    "best_of": (
        lambda: request(best_of=2),
        "best_of: not a field of SamplingParams; answers are not ranked; give each a request with "
        "a seed of its own",
    ),
    "prompt_logprobs": (
        lambda: request(prompt_logprobs=1),
        "prompt_logprobs: not a field of SamplingParams; see LMHeadSampler.prompt_logprobs",
    ),
    "logits_processors": (
        lambda: request(logits_processors=[]),
        "logits_processors: not a field of SamplingParams; functions of the logits are not "
        "supported; see logit_bias",
    ),
    "top_logprobs": (
        lambda: request(top_logprobs=2),
        "top_logprobs: not a field of SamplingParams; give logprobs= the number of tokens to "
        "report",
    ),
    "min_tokens without the ids it holds back": (
        lambda: request(min_tokens=2),
        "min_tokens=2 has no effect without the ids it holds back; give them in stop_token_ids, "
        "the end-of-sequence id among them",
    ),
    "slots without a request": (
        lambda: sampler_over()(HIDDEN, slots_of(), 0),
        "batch: slots [1] have no request; name the slots of the step by batch.select, or drop "
        "these",
    ),
    "an update without the tokens so far": (
        lambda: batch_of(frequency_penalty=1).update(0, SamplingParams(frequency_penalty=2)),
        "output_token_ids: expected the tokens so far of row 0, which penalties, bad_words and "
        "min_tokens refer to; pass [] if there are none",
    ),
    "more requests than rows": (
        lambda: batch_of().add(SamplingParams()),
        "params: 3 rows exceed max_rows=2; drop rows, or build the batch with a larger max_rows",
    ),
    "one request for all rows": (
        lambda: SamplingBatch.from_params(SamplingParams(seed=1), vocab_size=V),  # type: ignore[arg-type]
        "params: expected a list of SamplingParams, one per row, got a single one; pass "
        "[params] * B, or params.fork(B) if it has a seed",
    ),
    "a sampler that comes late": (
        late,
        "batch: tokens were appended before a sampler of VocabShard(start=0, stop=20) first saw "
        "it, so their counts are not known there; call batch.prepare(shard) before the first "
        "append, or build a new batch with output_token_ids=",
    ),
    "tokens that nobody appended": (
        two_steps,
        "batch: a step at later positions, and no token was appended since the last one, so "
        "penalties, bad_words and min_tokens do not see it; call batch.append(out.token_ids) "
        "after each step",
    ),
    "a selection of other rows": (
        lambda: sampler_over()(HIDDEN, batch_of().select(torch.tensor([1])), 0),
        "batch: expected 2 rows, as hidden_states or logits have, got a selection of 1 slots; pad "
        "slots with -1",
    ),
    "a selection of rows that moved": (
        moved,
        "batch: requests joined, left, moved or changed since this selection was made; call "
        "batch.select again",
    ),
    "a mask by slot for a verification": (
        verified,
        "batch.forced_token_ids: has a row per slot, but a verification needs one per position; "
        "assign one to the selection",
    ),
    "a mask of other rows": (
        lambda: forced([3, 9, 4, 5]),
        "batch.forced_token_ids: expected a row for each of the 2 rows of the step, got 4; assign "
        "another",
    ),
    "a batch by its name": (
        lambda: SamplingBatch([request()], vocab_size=V),  # type: ignore[arg-type]
        "SamplingBatch: is not built by its name, got list [SamplingParams(temperature=1.0, "
        "top_k=0, top_p=1.0, min_p=0.0, epsilon_cutoff=0 …; call SamplingBatch.from_params(params, "
        "vocab_size=…), from_tensors or of_slots",
    ),
    "a temperature for a selection": (
        lambda: setattr(batch_of().select(torch.tensor([0])), "temperature", 0.5),
        "temperature: is fixed once Selection is built; it stays in its place; write "
        "batch.temperature[:] = values",
    ),
    "seeds for a batch": (
        lambda: setattr(batch_of(), "seed", torch.arange(B)),
        "seed: is fixed once SamplingBatch is built; it stays in its place; write batch.seed[:] = "
        "values",
    ),
    "requests for a batch": (
        lambda: setattr(batch_of(), "requests", [SamplingParams()]),
        "requests: is fixed once SamplingBatch is built; call update, add, drop or arrange to "
        "change the requests",
    ),
    "room for more rows": (
        lambda: setattr(batch_of(), "max_rows", 64),
        "max_rows: is fixed once SamplingBatch is built; build a new batch",
    ),
    "another vocabulary for a batch": (
        lambda: setattr(batch_of(), "vocab_size", V + 1),
        "vocab_size: is fixed once SamplingBatch is built; build a new batch",
    ),
    "another device for a selection": (
        lambda: setattr(batch_of().select(torch.tensor([0])), "device", "cuda"),
        "device: is fixed once Selection is built; build a new batch",
    ),
    "another plan for a batch": (
        lambda: setattr(batch_of(), "plan", None),
        "plan: is fixed once SamplingBatch is built; call update, add, drop or arrange to change "
        "the requests",
    ),
    "drafts of rows without a seed": (
        lambda: batch_of(seed=None)._with_drafts(torch.zeros(B, 1, dtype=torch.int64)),
        "batch: rows without a seed; draw them first, see draw_seeds",
    ),
}
