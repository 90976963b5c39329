"""Decodes a batch with drafts: one forward pass verifies several tokens per row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.cli.decode import Decoded, Ends, NoToken, Step, never, pad_left
from tpsample.cli.drafters import Decoding, Drafter
from tpsample.cli.model import Model
from tpsample.core import word
from tpsample.core.word import Status
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler
from tpsample.speculative import VerifyOutput, verify


@dataclass
class Speculated(Decoded):
    """The decoded rows. Step t holds token t of every row, -1 in rows that ended before it.

    Attributes:
        forwards: passes of the model, the prompt's included.
        row_steps: row × pass, of rows that had not ended.
        proposed, accepted: drafts of such rows.
    """

    forwards: int = 0
    row_steps: int = 0
    proposed: int = 0
    accepted: int = 0

    def summary(self, name: str, plain: Decoded) -> list[tuple[str, str]]:
        """Return lines for people, beside plain decoding of the same requests."""
        tokens = sum(map(len, self.rows))
        same = sum(ours == theirs for ours, theirs in zip(self.rows, plain.rows, strict=True))
        rate = self.accepted / self.proposed if self.proposed else 0.0
        per_step = (self.accepted + self.row_steps) / self.row_steps
        return [
            ("draft", name),
            ("accepted", f"{rate:.1%} of {self.proposed} drafts"),
            ("tokens per target step", f"{per_step:.2f} (per row that had not ended)"),
            ("target steps", f"{self.forwards}, instead of {len(plain.steps)}"),
            (
                "time",
                f"{self.seconds:.1f} s for {tokens} tokens, {plain.seconds:.1f} s plainly",
            ),
            ("same text as plain decoding", f"{same} of {len(self.rows)} rows"),
        ]


@torch.inference_mode()
def decode_with_drafts(
    model: Model,
    prompts: Sequence[list[int]],
    sampler: LMHeadSampler,
    batch: SamplingBatch,
    drafter: Drafter,
    *,
    num_drafts: int,
    max_new_tokens: int,
    on_token: Callable[[], None],
    ends: Ends = never,
) -> Speculated:
    """Continue all prompts together, as `decode` does, each row at its own pace.

    Rejected drafts stay in the cache, masked, unless every row rejected them. A row that ended
    stays in the batch without drafts.

    Args:
        on_token: called for every token that all rows have got beyond, or have ended before.

    Raises:
        NoToken: the logits of a row are NaN, or all masked.
        ValueError: a model whose cache cannot forget tokens.
    """
    device = model.lm_head_weight.device
    feed, feed_mask = pad_left(prompts, device)
    positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
    drafts = positions.new_zeros(len(prompts), 0)
    state = Decoding([list(p) for p in prompts], None, feed_mask[:, :0], feed[:, -1:], positions)
    done = Speculated(rows=[[] for _ in prompts])
    ended, told = [False] * len(prompts), 0
    seen: list[list[Tensor]] = [[] for _ in prompts]
    start = time.perf_counter()
    while True:
        mask = torch.cat([state.mask, feed_mask], dim=1)
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -feed.shape[1] :]
        out = model.trunk(
            input_ids=feed,
            attention_mask=mask,
            position_ids=places,
            past_key_values=state.cache,
            use_cache=True,
        )
        state.cache = out.past_key_values
        width = drafts.shape[1] + 1
        hidden_states = out.last_hidden_state[:, -width:].contiguous()
        verified = verify(sampler, hidden_states, drafts, batch, state.positions)
        batch.append(verified.token_ids)
        done.forwards += 1
        for row, count in enumerate(verified.num_accepted.tolist()):
            if not ended[row]:
                left = max_new_tokens - len(done.rows[row])
                seen[row] += hidden_states[row, : min(count + 1, left)].unbind()
        _collect(done, ended, state, verified, drafts, model.eos_token_ids, max_new_tokens, ends)
        while told < max_new_tokens and all(
            end or len(row) > told for end, row in zip(ended, done.rows, strict=True)
        ):
            on_token()
            told += 1
        if all(ended):
            break

        _forget_rejected(state, mask, verified.num_accepted, width)
        drafts = drafter.propose(state, num_drafts)
        over = torch.tensor(ended, device=device).unsqueeze(1)
        drafts = drafts.where(~over, word.NO_TOKEN)
        feed = torch.cat([state.last, drafts.clamp(min=0)], dim=1)
        feed_mask = torch.cat([torch.ones_like(state.last), (drafts >= 0).long()], dim=1)
    done.seconds = time.perf_counter() - start
    done.steps = _steps(seen, state.texts, prompts)
    return done


def _steps(
    seen: list[list[Tensor]], texts: list[list[int]], prompts: Sequence[list[int]]
) -> list[Step]:
    """Return the hidden states from which the rows' tokens were sampled, token by token."""
    nothing = torch.zeros_like(seen[0][0])
    steps = []
    for t in range(max(map(len, seen))):
        hidden_states = [states[t] if t < len(states) else nothing for states in seen]
        positions = [len(prompt) + t for prompt in prompts]
        token_ids = [
            text[position] if t < len(states) else word.NO_TOKEN
            for text, position, states in zip(texts, positions, seen, strict=True)
        ]
        device = nothing.device
        steps.append(
            Step(
                torch.stack(hidden_states),
                torch.tensor(positions, device=device),
                torch.tensor(token_ids, device=device),
            )
        )
    return steps


def _forget_rejected(state: Decoding, mask: Tensor, accepted: Tensor, width: int) -> None:
    """Mask the rejected drafts, and take those behind the longest accepted prefix out."""
    kept = torch.arange(width, device=mask.device) <= accepted.unsqueeze(1)
    mask = torch.cat([mask[:, :-width], mask[:, -width:] * kept], dim=1)
    surplus = width - 1 - int(accepted.max())
    if surplus:
        if any(type(layer).__name__ != "DynamicLayer" for layer in state.cache.layers):
            raise ValueError(
                "draft: this model's cache cannot forget tokens; decode without drafts"
            )
        state.cache.crop(-surplus)
        mask = mask[:, :-surplus]
    state.mask = mask


def _collect(
    done: Speculated,
    ended: list[bool],
    state: Decoding,
    verified: VerifyOutput,
    drafts: Tensor,
    eos: frozenset[int],
    max_new_tokens: int,
    ends: Ends,
) -> None:
    """Take the emitted tokens of every row up to its end."""
    proposed = (drafts >= 0).sum(dim=1).tolist()
    accepted, statuses = verified.num_accepted.tolist(), verified.status.tolist()
    for row, token_ids in enumerate(verified.token_ids.tolist()):
        if statuses[row] != Status.OK:
            name = Status(statuses[row]).name
            raise NoToken(f"row {row}: no token could be sampled: {name}")
        if not ended[row]:
            done.row_steps += 1
            done.proposed += proposed[row]
            done.accepted += accepted[row]
        emitted = token_ids[: accepted[row] + 1]
        state.texts[row] += emitted
        for token_id in emitted:
            ended[row] |= token_id in eos or len(done.rows[row]) == max_new_tokens
            if not ended[row]:
                done.rows[row].append(token_id)
                ended[row] = ends(row, done.rows[row])
        ended[row] |= len(done.rows[row]) == max_new_tokens
    state.last = verified.token_ids.gather(1, verified.num_accepted.unsqueeze(1))
    state.positions = state.positions + verified.num_accepted + 1
