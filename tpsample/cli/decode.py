"""Decodes a batch: every rank runs the trunk, or its part of it, and the sampler draws the tokens.

With drafts, one pass of the model verifies several tokens of each row. A row's drafts are the
tokens that followed the last occurrence of its longest suffix, of up to 4 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpsample.cli.model import Model
from tpsample.cli.requests import Row
from tpsample.core import word
from tpsample.core.word import Status
from tpsample.record.trace import TopKTrace
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler
from tpsample.speculative import verify

LONGEST_NGRAM = 4


class NoToken(RuntimeError):
    """A row could not be given a token."""


@dataclass
class Decoded:
    """The steps that some rows took, and how many of their drafts were accepted.

    Attributes:
        first_s: how long the first pass and its tokens took, which may compile kernels.
        seconds: how long all later ones took.
        forwards: passes of the model, the prompt's included.
        row_steps: row × pass, of rows that had not ended.
        proposed, accepted: drafts of such rows.
    """

    rows: Sequence[Row]
    first_s: float = 0.0
    seconds: float = 0.0
    forwards: int = 0
    row_steps: int = 0
    proposed: int = 0
    accepted: int = 0


@torch.inference_mode()
def decode(
    model: Model,
    rows: Sequence[Row],
    sampler: LMHeadSampler,
    *,
    num_drafts: int = 0,
    trace: TopKTrace | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Decoded:
    """Continue the prompts of all rows together, until each has ended.

    Prompts are padded on the left. A row that ended stays in the batch, uncollected, so that the
    batch keeps its shape. Rejected drafts stay in the cache, masked, unless every row rejected
    them.

    Args:
        num_drafts: K, per row and pass; the text is that of K = 0.
        trace: records the logprobs of every step, with K = 0.
        on_step: called after each pass of the model.

    Raises:
        NoToken: the logits of a row are NaN, or all masked.
        ValueError: a model whose cache cannot forget tokens.
    """
    device = model.lm_head.weight.device
    prompts, done = [row.prompt for row in rows], Decoded(rows)
    logprobs = None if trace is None else trace.top_token_ids.shape[2]
    batch = SamplingBatch.from_params(
        [replace(row.params, logprobs=logprobs) for row in rows],
        vocab_size=sampler.vocab_size,
        device=device,
        prompt_token_ids=prompts,
    )
    longest = max(map(len, prompts))
    feed = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache: Any = None
    drafts = positions.new_zeros(len(rows), 0)
    start = time.perf_counter()
    while True:
        states, cache = model.hidden_states(
            feed,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -feed.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        width = drafts.shape[1] + 1
        hidden_states = states[:, -width:].contiguous()
        if width > 1:
            drawn = verify(sampler, hidden_states, drafts, batch, positions)
            token_ids, counts, status = drawn.token_ids, drawn.num_accepted, drawn.status
        else:
            sampled = sampler(hidden_states[:, 0], batch, positions)
            token_ids, status = sampled.token_ids.unsqueeze(1), sampled.status
            counts = torch.zeros_like(positions)
            if trace is not None:
                trace.record(sampled)
        batch.append(token_ids)
        done.forwards += 1

        found = (each.tolist() for each in (token_ids, counts, (drafts >= 0).sum(dim=1), status))
        for index, (row, ids, count, proposed, code) in enumerate(zip(rows, *found, strict=True)):
            if row.ended:
                continue
            if code != Status.OK:
                raise NoToken(f"row {index}: no token could be sampled: {Status(code).name}")
            done.row_steps += 1
            done.proposed += proposed
            done.accepted += count
            for token_id, state in zip(ids[: count + 1], hidden_states[index], strict=False):
                row.take(token_id, state)
                if row.ended:
                    break
        on_step()
        if done.forwards == 1:
            done.first_s = time.perf_counter() - start
        if all(row.ended for row in rows):
            break

        if width > 1:
            mask = _without_rejected(cache, mask, counts, width)
        last = token_ids.gather(1, counts.unsqueeze(1)).clamp(min=0)
        positions = positions + counts + 1
        drafts = torch.tensor([_drafts(row, num_drafts) for row in rows], device=device).long()
        feed = torch.cat([last, drafts.clamp(min=0)], dim=1)
        mask = torch.cat([mask, torch.ones_like(last), (drafts >= 0).long()], dim=1)
    done.seconds = time.perf_counter() - start - done.first_s
    return done


def _drafts(row: Row, count: int) -> list[int]:
    """Return `count` ids, -1 after those that follow the suffix."""
    found = [] if row.ended else continuation(row.prompt + row.drawn, count)
    return found + [word.NO_TOKEN] * (count - len(found))


def continuation(text: Sequence[int], count: int) -> list[int]:
    """Return up to `count` ids that followed the last occurrence of the longest suffix."""
    for length in range(min(LONGEST_NGRAM, len(text) - 1), 0, -1):
        suffix = list(text[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if list(text[start : start + length]) == suffix:
                return list(text[start + length : start + length + count])
    return []


def _without_rejected(cache: Any, mask: Tensor, accepted: Tensor, width: int) -> Tensor:
    """Mask the rejected drafts, and take those after the longest accepted prefix out."""
    kept = torch.arange(width, device=mask.device) <= accepted.unsqueeze(1)
    mask = torch.cat([mask[:, :-width], mask[:, -width:] * kept], dim=1)
    surplus = width - 1 - int(accepted.max())
    if not surplus:
        return mask
    if any(type(layer).__name__ != "DynamicLayer" for layer in cache.layers):
        raise ValueError("draft: this model's cache cannot forget tokens; decode without drafts")
    cache.crop(-surplus)
    return mask[:, :-surplus]
