"""A target and a drafter whose laws at a position depend on the token before it. Tests ask whether
emitted tokens follow the target.

Rows are seeds. A row that stops early goes on in the next call. So every position of every row can
be compared, and pairs of neighbours with the joint law.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.support.distribution import cells_of, chi_squared
from tpsample import SamplingBatch, VerifyOutput
from tpsample.core import acceptance
from tpsample.noise import row_stream, tile_noise
from tpsample.speculative import reference

LEVEL = 1e-4
METHODS = ("rejection", "block")
DRAFTS = ("uniform", "one-hot-right", "one-hot-wrong", "anti-ranked", "equal", "disjoint")
CONTEXTS = 2
POSITION = 31
CHUNK_ELEMENTS = 2**16


class Chain:
    """Laws of token i given token i - 1, by its parity; fp32 logits [CONTEXTS, V] of each."""

    def __init__(self, vocab_size: int, kind: str) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        rank = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(2)])
        self.target = -1.1 * (1 + rank).double().log().float()
        half = torch.arange(vocab_size) < vocab_size // 2
        self.draft: Any = {  # None if the drafts are certain
            "uniform": torch.zeros(2, vocab_size),
            "anti-ranked": -1.1 * (vocab_size - rank).double().log().float(),
            "equal": self.target.clone(),
        }.get(kind)
        if kind == "disjoint":
            self.target = self.target.masked_fill(half, -math.inf)
            self.draft = torch.zeros(2, vocab_size).masked_fill(~half, -math.inf)
        certain = {"one-hot-right": rank.argmin(dim=1), "one-hot-wrong": rank.argmax(dim=1)}
        self.certain = certain.get(kind)

    @property
    def vocab_size(self) -> int:
        return self.target.shape[1]

    def probabilities(self) -> torch.Tensor:
        """float64 [CONTEXTS, V]."""
        return self.target.double().softmax(dim=1)

    def call(
        self,
        seeds: torch.Tensor,
        context: torch.Tensor,
        done: torch.Tensor,
        num_drafts: int,
        method: str,
    ) -> VerifyOutput:
        """Draft and verify behind `done` tokens; `context` is that of the next."""
        batch = SamplingBatch.from_tensors(
            temperature=torch.ones(len(seeds)), seed=seeds, vocab_size=self.vocab_size
        )
        contexts, drafts = [context], list[torch.Tensor]()
        for index in range(num_drafts):
            if self.certain is not None:
                drafts.append(self.certain[contexts[-1]])
            else:
                logits = self.draft[contexts[-1]]
                drafts.append(gumbel_draft(logits, batch, index, done + index))
            contexts.append(drafts[-1] % CONTEXTS)
        where = torch.stack(contexts, dim=1)
        return reference.verify(
            self.target[where],
            torch.stack(drafts, dim=1),
            batch,
            POSITION + done,
            method=method,
            draft_logits=None if self.draft is None else self.draft[where[:, :-1]],
        )

    def emit(self, count: int, num_drafts: int, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` rows of num_drafts + 1 tokens, by as many calls as that takes; and the counts
        that the first call accepted."""
        width = num_drafts + 1
        text, done = torch.full((count, 2 * width), -1), torch.zeros(count, dtype=torch.int64)
        accepted = torch.zeros_like(done)
        while len(left := (done < width).nonzero().flatten()):
            for rows in left.split(CHUNK_ELEMENTS // self.vocab_size):
                before = done[rows]
                last = text[rows, (before - 1).clamp(min=0)]
                context = torch.where(before > 0, last % CONTEXTS, 0)
                out = self.call(rows, context, before, num_drafts, method)
                for i, drawn in enumerate(out.token_ids.unbind(1)):
                    there = drawn >= 0
                    text[rows[there], before[there] + i] = drawn[there]
                accepted[rows] = torch.where(before > 0, accepted[rows], out.num_accepted)
                done[rows] += out.num_accepted + 1
        return text[:, :width], accepted


def gumbel_draft(
    logits: torch.Tensor, batch: SamplingBatch, index: int, positions: torch.Tensor
) -> torch.Tensor:
    """Return what `tpsample.sample_draft` draws, from full logits."""
    places = (POSITION + positions).unsqueeze(1)
    stream = row_stream(batch.seed.unsqueeze(1), places, index, domain=acceptance.DOMAIN_DRAFT)
    noise = tile_noise(stream, 0, logits.shape[1])
    return (logits.double() * math.log2(math.e) - noise.double()).argmax(dim=1)


def p_values(chain: Chain, text: torch.Tensor) -> list[float]:
    """Chi-squared of every position given its context, and of the first pair jointly."""
    law, found = chain.probabilities().numpy(), []
    context = np.zeros(len(text), dtype=int)
    for i in range(text.shape[1]):
        tokens = text[:, i].numpy()
        for parity in range(CONTEXTS):
            here = tokens[context == parity]
            if len(here) >= 200:
                found.append(chi_squared(here, law[parity]))
        context = tokens % CONTEXTS
    cells = [cells_of(one, len(text) // 10) for one in law]
    first, second = text[:, 0].numpy(), text[:, 1].numpy()
    # The joint law of the first token's cell and parity, and the second token's cell.
    width = max(each.max() for each in cells) + 1
    joint = np.zeros((width, CONTEXTS, width))
    for token, probability in enumerate(law[0]):
        parity = token % CONTEXTS
        second_law = np.bincount(cells[parity], weights=law[parity], minlength=width)
        joint[cells[0][token], parity] += probability * second_law
    parities = first % CONTEXTS
    second_cell = np.where(parities == 0, cells[0][second], cells[1][second])
    place = (cells[0][first] * CONTEXTS + parities) * width + second_cell
    found.append(chi_squared(place, joint.flatten()))
    return found


def total_variation(tokens: torch.Tensor, law: torch.Tensor) -> float:
    frequency = torch.bincount(tokens, minlength=len(law)).double() / len(tokens)
    return float((frequency - law).abs().sum() / 2)


def noise_floor(law: torch.Tensor, count: int) -> float:
    """The largest total variation of direct draws from the law itself."""
    generator = torch.Generator().manual_seed(5)
    return max(
        total_variation(law.multinomial(count, replacement=True, generator=generator), law)
        for _ in range(20)
    )
