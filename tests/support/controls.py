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
from tests.support.random_requests import Theme, request
from tpsample import SamplingBatch, SamplingParams

THEME = Theme(("plain", "greedy", "greedy", "filtered"), controlled=1.0, told=0.0)


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
        fields = request(rng, vocab_size, THEME) | {"seed": rng.getrandbits(63)}
        return Conversation(SamplingParams(**fields), prompt, output)

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
