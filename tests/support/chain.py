"""A target and a drafter whose laws at a position depend on the token before it, and tests of
whether what is emitted follows the target.

Rows are seeds. A row that stops early is continued with draws from the target, so that every
position of every row can be compared, and pairs of neighbours with the joint law.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.support.distribution import cells_of, chi_squared
from tpsample import SamplingBatch
from tpsample.noise import row_stream, tile_noise
from tpsample.speculative import acceptance, reference

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

    def draw_drafts(self, seeds: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """int64 [B, num_drafts], each given the one before it; token -1 had context 0."""
        batch = SamplingBatch.over(
            temperature=torch.ones(len(seeds)), seed=seeds, vocab_size=self.vocab_size
        )
        context, drafts = torch.zeros_like(seeds), []
        for index in range(num_drafts):
            if self.certain is not None:
                drafts.append(self.certain[context])
            else:
                drafts.append(gumbel_draft(self.draft[context], batch, index))
            context = drafts[-1] % CONTEXTS
        return torch.stack(drafts, dim=1)

    def verify(
        self, seeds: torch.Tensor, drafts: torch.Tensor, method: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emitted ids [B, K + 1] and accepted counts [B]."""
        context = torch.nn.functional.pad(drafts, (1, 0)) % CONTEXTS
        batch = SamplingBatch.over(
            temperature=torch.ones(len(seeds)), seed=seeds, vocab_size=self.vocab_size
        )
        draft = None if self.draft is None else self.draft[context[:, :-1]]
        out = reference.verify(
            self.target[context], drafts, batch, POSITION, method=method, draft=draft
        )
        return out.token_ids, out.num_accepted

    def emit(self, count: int, num_drafts: int, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` rows, continued to num_drafts + 1 tokens; and accepted counts."""
        generator = torch.Generator().manual_seed(77)
        token_ids, accepted = [], []
        for first in range(0, count, CHUNK_ELEMENTS // self.vocab_size):
            seeds = torch.arange(first, min(count, first + CHUNK_ELEMENTS // self.vocab_size))
            emitted, its = self.verify(seeds, self.draw_drafts(seeds, num_drafts), method)
            token_ids.append(emitted)
            accepted.append(its)
        text = torch.cat(token_ids)
        context = torch.zeros(len(text), dtype=torch.int64)
        for i in range(num_drafts + 1):
            for parity in range(CONTEXTS):
                missing = ((text[:, i] < 0) & (context == parity)).nonzero().flatten()
                if len(missing):
                    text[missing, i] = self.probabilities()[parity].multinomial(
                        len(missing), replacement=True, generator=generator
                    )
            context = text[:, i] % CONTEXTS
        return text, torch.cat(accepted)


def gumbel_draft(
    logits: torch.Tensor, batch: SamplingBatch, index: int, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what `tpsample.sample_draft` draws, from full logits."""
    positions = torch.tensor([index]) if positions is None else positions
    places = (POSITION + positions).unsqueeze(1)
    stream = row_stream(batch.seed.unsqueeze(1), places, index, domain=acceptance.DOMAIN_DRAFT)
    noise = tile_noise(stream, 0, logits.shape[1], 10)
    return (logits.double() * math.log2(math.e) - noise.double()).argmax(dim=1)


def text_of_several_calls(chain: Chain, method: str, count: int) -> torch.Tensor:
    """Three tokens: a verification of two drafts, and another one from where it stopped."""
    seeds = torch.arange(count)
    batch = SamplingBatch.over(
        temperature=torch.ones(count), seed=seeds, vocab_size=chain.vocab_size
    )
    text = torch.full((count, 6), -1)
    done = torch.zeros(count, dtype=torch.int64)
    for _ in range(3):
        last = text.gather(1, (done - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        first = context = torch.where(done > 0, last % CONTEXTS, 0)
        drawn = []
        for index in range(2):
            drawn.append(gumbel_draft(chain.draft[context], batch, index, positions=done + index))
            context = drawn[-1] % CONTEXTS
        drafts = torch.stack(drawn, dim=1)
        contexts = torch.cat([first.unsqueeze(1), drafts % CONTEXTS], dim=1)
        out = reference.verify(
            chain.target[contexts], drafts, batch, POSITION + done, method=method,
            draft=chain.draft[contexts[:, :2]],
        )  # fmt: skip
        active = done < 3
        for i in range(3):
            write = active & (out.token_ids[:, i] >= 0)
            text[write, (done + i)[write]] = out.token_ids[write, i]
        done = torch.where(active, done + out.num_accepted + 1, done)
    assert (done >= 3).all()
    return text[:, :3]


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


def noise_floor(law: torch.Tensor, count: int, trials: int = 20) -> float:
    """The largest total variation of direct draws from the law itself."""
    generator = torch.Generator().manual_seed(5)
    return max(
        total_variation(law.multinomial(count, replacement=True, generator=generator), law)
        for _ in range(trials)
    )
