"""Verifications by ratio and drafts over zeros, so that later ones compile nothing."""

from __future__ import annotations

from itertools import product

import torch

from tpsample.backends import room_of
from tpsample.core.acceptance import DOMAIN_DRAFT
from tpsample.core.row_noise import RowNoise
from tpsample.core.vocab_shard import VocabShard
from tpsample.noise import DOMAIN_TOKEN
from tpsample.output import SampleOutput

LAWS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of a drafter's logits."""


def verify_over_zeros(
    backend: str, shard: VocabShard, vocab_size: int, num_drafts: int, device: torch.device
) -> None:
    """Launch each kernel that a verification, or a draw of a drafter, may need behind the LM head.

    Any number of drafts up to 31 stands for all of these, because they share one kernel.
    """
    room, width = room_of(backend), num_drafts + 1
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    zeros, drafts = zero.expand(width).contiguous(), zero.expand(1, width).contiguous()
    logits = torch.zeros(width, len(shard), device=device)
    noise = RowNoise(torch.ones_like(logits[:, 0]), zeros, zeros, 1)
    rows = room.passes(logits, logits, shard.start, vocab_size, noise.temperature, noise)
    for block, dtype in product((False, True), (None, *LAWS)):
        draft = None if dtype is None else logits[None, 1:].to(dtype)
        its = room.verification(rows, draft, drafts, drafts.int(), zero, zero, block)
        laws = its.laws(its.tops().unsqueeze(0))
        laws, places = its.accept(laws, its.sums(laws))
        its.output(laws, places, its.residuals(laws, places).unsqueeze(0))
    for domain, dtype in product((DOMAIN_TOKEN, DOMAIN_DRAFT), LAWS):
        words = room.draft_words(
            logits[:1].to(dtype), shard.start, noise.select(slice(1)), 0, domain
        )
        room.decoder()(words, zero, SampleOutput.empty(zero, None))
