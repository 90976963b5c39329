"""Launches that steps over zeros leave out: lists of few tokens, verifications by ratio, drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from tpsample.backends import room_of
from tpsample.backends.torch_.room import Room
from tpsample.core.acceptance import DOMAIN_DRAFT
from tpsample.core.order import BINS
from tpsample.core.row_noise import RowNoise
from tpsample.core.vocab_shard import VocabShard
from tpsample.noise import DOMAIN_TOKEN
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.request.plan import Undrawn
from tpsample.request.row_filter import LOWEST, MAX_TOP_WORDS

LAWS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of a drafter's logits."""


def list_over_zeros(
    shard: VocabShard, vocab_size: int, num_ranks: int, device: torch.device
) -> None:
    """Launch the kernels of rows whose kept tokens fit into a list, as equal logits never do."""
    request = SamplingParams(seed=0, top_p=0.9, logprobs=1, logprobs_mode="processed_logprobs")
    batch = SamplingBatch.from_params([request], vocab_size=vocab_size, device=device)
    filters, logprob_rows = batch.plan.filters, batch.plan.logprobs
    assert filters is not None and logprob_rows is not None
    lowest = filters.column(LOWEST)
    thresholds = filters.thresholds(lowest, lowest)._replace(total=lowest)
    logits, noise = (
        torch.zeros(1, len(shard), device=device),
        RowNoise(batch.temperature, batch.seed, lowest, 1),
    )
    given = logits, logits, shard.start, vocab_size, noise.temperature, noise
    room = room_of("triton")
    rows = room.passes(*given, top=noise.temperature)
    cuts = room.cuts(rows)
    cuts.list_end(lowest.new_zeros(1, BINS), lowest, thresholds.share, 1)
    for count in (1, MAX_TOP_WORDS + 1):
        words = cuts.words_from(lowest, count)
        first = rows.first_of(words.expand(num_ranks, 1, count), count)
        kept_set = rows.set_of_first(first, thresholds)
        rows.weighed_words(logprob_rows, first, kept_set.drawn, kept_set.cut)


def verify_over_zeros(
    shard: VocabShard, vocab_size: int, num_drafts: int, device: torch.device
) -> None:
    """Launch every kernel of verifications and of drafters' draws except the LM head.

    Args:
        num_drafts: the most drafts per row of later verifications.
    """
    room, zero = room_of("triton"), torch.zeros(1, dtype=torch.int64, device=device)
    for width in _widths(num_drafts + 1):
        _verify(room, shard, vocab_size, width, zero)
    logits = torch.zeros(1, len(shard), device=device)
    noise = RowNoise(torch.ones_like(logits[:, 0]), zero, zero, 1)
    for domain, dtype in product((DOMAIN_TOKEN, DOMAIN_DRAFT), LAWS):
        words = room.draft_words(logits.to(dtype), shard.start, noise, 0, domain)
        for undrawn in (None, Undrawn(*torch.zeros_like(zero, dtype=torch.bool).expand(2, 1))):
            room.decoder()(words, zero, SampleOutput.empty(zero, None), undrawn)


def _widths(most: int) -> Iterator[int]:
    """Yield numbers of positions whose kernels serve every number up to `most`.

    All numbers up to 32 share kernels. So do all numbers between a larger power of two and the
    next one.
    """
    width = 32
    while width < most:
        yield width
        width *= 2
    yield most


def _verify(room: Room, shard: VocabShard, vocab_size: int, width: int, zero: Tensor) -> None:
    """Launch what verifications of a row with so many positions launch, by each method and law."""
    zeros, drafts = zero.expand(width).contiguous(), zero.expand(1, width).contiguous()
    logits = torch.zeros(width, len(shard), device=zero.device)
    noise = RowNoise(torch.ones_like(logits[:, 0]), zeros, zeros, 1)
    for undrawn in (None, torch.zeros_like(zero, dtype=torch.bool)):
        room.drafted_rows(drafts[:, 1:], undrawn, zero, vocab_size)
    room.coupled_output(drafts, SampleOutput(zeros, zeros.int(), zeros))
    rows = room.passes(logits, logits, shard.start, vocab_size, noise.temperature, noise)
    replace(rows, top=noise.temperature).held_from(zeros)  # of kept sets
    for block, dtype in product((False, True), (None, *LAWS)):
        draft = None if dtype is None else logits[None, 1:].to(dtype)
        verification = room.verification(
            rows, draft, drafts, drafts, drafts.int(), zero, zero, block
        )
        laws = verification.laws(verification.tops().unsqueeze(0))
        laws, places = verification.accept(laws, verification.sums(laws))
        verification.output(laws, places, verification.residuals(laws, places).unsqueeze(0))
