"""Random requests with controls, as an engine's host knows them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support import oracle
from tests.support.oracle import Context, Request
from tpsample import SamplingBatch, SamplingParams


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """A request with each parameter on or off by chance, never contradictory."""

    def some(value: object, otherwise: object, chance: float = 0.4) -> object:
        return value if rng.random() < chance else otherwise

    def ids(most: int) -> list[int]:
        return rng.sample(range(vocab_size), min(vocab_size, rng.randint(1, most)))

    # Few distinct ids in words and stop lists, so that they meet the output.
    words = [[rng.randrange(6) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 5))]
    stop = ids(5)
    allowed = some(sorted({*ids(vocab_size // 2), *rng.sample(range(vocab_size), 20)}), None, 0.25)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.2, 0.7, 1.0, 1.0, 1.5, 3.0]),
        top_k=some(rng.choice([1, 2, 20, 50]), 0, 0.2),
        top_p=some(rng.choice([0.1, 0.9, 0.95]), 1.0, 0.2),
        min_p=some(rng.choice([0.05, 0.5]), 0.0, 0.2),
        seed=rng.getrandbits(63),
        repetition_penalty=some(rng.choice([0.5, 1.1, 1.3, 2.0]), 1.0),
        presence_penalty=some(rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        logit_bias=some({v: rng.uniform(-120, 120) for v in ids(8)}, None),
        allowed_token_ids=allowed,
        bad_words=some(words, None),
        min_tokens=some(rng.randint(1, 12), 0),
        stop_token_ids=stop,
        ties=some("keep", "exact", 0.1),
        filter_order=some("joint", "sequential", 0.1),
        repetition_scope=some("output", "all", 0.3),
    )


def oracle_request(params: SamplingParams) -> Request:
    """Return the same request for the oracle."""
    return Request(**{name: getattr(params, name) for name in Request.__dataclass_fields__})


@dataclass
class Conversation:
    """One request and its tokens so far, as an engine's host knows them."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    @staticmethod
    def random(rng: random.Random, vocab_size: int) -> Conversation:
        """Short ranges of ids, so that penalties and bad words have something to act on."""
        width = min(vocab_size, rng.choice([6, vocab_size]))
        prompt = [rng.randrange(width) for _ in range(rng.randint(0, 12))]
        output = [rng.randrange(width) for _ in range(rng.randint(0, 12))]
        return Conversation(random_params(rng, vocab_size), prompt, output)

    def processed(self, logits: Tensor, **masks: Any) -> Tensor:
        """Return fp32 [V] of one row, by the oracle."""
        context = Context(tuple(self.prompt), tuple(self.output), **masks)
        found = oracle.process(logits.float().numpy(), oracle_request(self.params), context)
        return torch.from_numpy(found)


def batch_of(talks: Sequence[Conversation], vocab_size: int, **options: Any) -> SamplingBatch:
    """Return a batch whose rows these are."""
    return SamplingBatch.from_params(
        [talk.params for talk in talks],
        vocab_size=vocab_size,
        prompt_token_ids=[talk.prompt for talk in talks],
        output_token_ids=[talk.output for talk in talks],
        **options,
    )


def bitmask_of(allowed: list[set[int] | None], vocab_size: int) -> Tensor:
    """int32 [B, ceil(V / 32)] as grammar engines fill it; None allows everything."""
    every = range(vocab_size)
    rows = [oracle.bits(every if ids is None else sorted(ids), vocab_size) for ids in allowed]
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), -(-vocab_size // 32))
