"""Decodes a batch: all ranks run the trunk, or their parts of it, and the sampler draws tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpsample.cli.model import Model
from tpsample.cli.requests import Row
from tpsample.core.word import Status
from tpsample.errors import NoToken
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler


@dataclass
class Decoded:
    """The steps that some rows took.

    Attributes:
        first_s: how long the first pass and its tokens took, which may compile kernels.
        seconds: how long all later ones took.
        forwards: passes of the model, the prompt's included.
    """

    rows: Sequence[Row]
    first_s: float = 0.0
    seconds: float = 0.0
    forwards: int = 0


@torch.inference_mode()
def decode(
    model: Model,
    rows: Sequence[Row],
    sampler: LMHeadSampler,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> Decoded:
    """Continue the prompts of all rows together, until each has ended.

    Prompts are padded on the left. A row that ended stays in the batch, uncollected, so that the
    batch keeps its shape.

    Args:
        on_step: called after each pass of the model.

    Raises:
        NoToken: the logits of a row are NaN, or all masked.
    """
    device = model.lm_head.weight.device
    prompts, done = [row.prompt for row in rows], Decoded(rows)
    batch = SamplingBatch.from_params(
        [row.params for row in rows],
        vocab_size=sampler.vocab_size,
        device=device,
        prompt_token_ids=prompts,
    )
    longest = max(map(len, prompts))
    feed = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache: Any = None
    start = time.perf_counter()
    while True:
        states, cache = model.hidden_states(
            feed,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -feed.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        hidden_states = states[:, -1].contiguous()
        out = sampler(hidden_states, batch, positions)
        batch.append(out.token_ids)
        done.forwards += 1

        drawn = zip(rows, out.token_ids.tolist(), out.status.tolist(), strict=True)
        for index, (row, token_id, code) in enumerate(drawn):
            if row.ended:
                continue
            if code != Status.OK:
                raise NoToken(f"row {index}: no token could be sampled: {Status(code).name}")
            row.take(token_id, hidden_states[index])
        on_step()
        if done.forwards == 1:
            done.first_s = time.perf_counter() - start
        if all(row.ended for row in rows):
            break

        feed = out.token_ids.unsqueeze(1).clamp(min=0)
        mask = torch.cat([mask, torch.ones_like(feed)], dim=1)
        positions = positions + 1
    done.seconds = time.perf_counter() - start - done.first_s
    return done
