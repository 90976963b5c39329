"""Decodes a batch: every rank runs the trunk, or its part of it; a sampler draws the next token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpsample.cli.model import Model
from tpsample.core.word import Status
from tpsample.output import SampleOutput

Sampler = Callable[[Tensor, Tensor], SampleOutput]
"""hidden states [B, D] and positions [B] to the next tokens."""

Ends = Callable[[int, list[int]], bool]
"""A row and its tokens so far to whether it has ended, beside the model's end of sequence."""


def never(row: int, token_ids: list[int]) -> bool:
    """Say that no tokens end a row."""
    return False


class NoToken(RuntimeError):
    """A row could not be given a token."""


@dataclass
class Step:
    """One step as the sampler saw it, which a check can repeat.

    Attributes:
        hidden_states: [B, D].
        positions: int64 [B], index in its own sequence of the token being generated.
        token_ids: int64 [B]; -1 in a row that is not to be compared.
    """

    hidden_states: Tensor
    positions: Tensor
    token_ids: Tensor


@dataclass
class Decoded:
    """Generated token ids per row, up to its end, and every step behind them.

    Attributes:
        seeds: int64 [B], that the rows drew with; None before the first step.
    """

    rows: list[list[int]]
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    seeds: Tensor | None = None


@torch.inference_mode()
def decode(
    model: Model,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    on_step: Callable[[], None],
    ends: Ends = never,
    on_rows: Callable[[list[list[int]]], None] | None = None,
) -> Decoded:
    """Continue all prompts together until each row ended or has `max_new_tokens`.

    Prompts are padded on the left. A row that ended stays in the batch, uncollected, so that the
    batch keeps its shape.

    Args:
        on_rows: is shown the rows' tokens after each step.

    Raises:
        NoToken: the logits of a row are NaN, or all masked.
    """
    device = model.lm_head_weight.device
    token_ids, mask = pad_left(prompts, device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    decoded = Decoded(rows=[[] for _ in prompts])
    ended = [False] * len(prompts)
    cache = None
    start = time.perf_counter()
    for step in range(max_new_tokens):
        positions = lengths + step
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
        out = model.trunk(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        hidden_states = out.last_hidden_state[:, -1].contiguous()

        sampled = sampler(hidden_states, positions)
        decoded.steps.append(Step(hidden_states, positions, sampled.token_ids))
        decoded.seeds = sampled.seeds
        _collect(decoded.rows, ended, sampled, model.eos_token_ids, ends)
        on_step()
        if on_rows is not None:
            on_rows(decoded.rows)
        if all(ended):
            break
        token_ids = sampled.token_ids.unsqueeze(1)
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    decoded.seconds = time.perf_counter() - start
    return decoded


def pad_left(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and mask, int64 [B, longest]."""
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return token_ids, mask


def _collect(
    rows: list[list[int]],
    ended: list[bool],
    sampled: SampleOutput,
    eos: frozenset[int],
    ends: Ends,
) -> None:
    pairs = zip(sampled.token_ids.tolist(), sampled.status.tolist(), strict=True)
    for row, (token_id, status) in enumerate(pairs):
        if status != Status.OK:
            raise NoToken(f"row {row}: no token could be sampled: {Status(status).name}")
        ended[row] |= token_id in eos
        if not ended[row]:
            rows[row].append(token_id)
            ended[row] = ends(row, rows[row])
