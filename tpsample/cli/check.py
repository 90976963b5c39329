"""Checks generated tokens: samples every step again, on one rank and by the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample import reference
from tpsample.agreement.arguments import BackendName
from tpsample.cli.decode import DecodedStep
from tpsample.cli.model import Model
from tpsample.cli.tensor_parallel import whole
from tpsample.distributed import Job
from tpsample.ranks.ranks import Ranks
from tpsample.reference import NEAR_TIE
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler


class Verdict(NamedTuple):
    """The result of a comparison.

    Attributes:
        compared: tokens looked at.
        differ: of these, tokens that are not what one rank and the oracle give.
        near_ties: differences from the oracle excused because its scores tie within NEAR_TIE.
        same_on_every_rank: all ranks emitted the same sequences.
    """

    compared: int = 0
    differ: int = 0
    near_ties: int = 0
    same_on_every_rank: bool = True

    @property
    def ok(self) -> bool:
        return self.compared > 0 and self.differ == 0 and self.same_on_every_rank

    def line(self, world_size: int) -> str:
        """Return one sentence for people, which starts with "same tokens" only if `ok`."""
        ways = ["1 rank", *([f"{world_size} ranks"] if world_size > 1 else []), "oracle"]
        sentence = "same tokens: " + " = ".join(ways) if self.ok else "TOKENS DIFFER"
        if not self.same_on_every_rank:
            sentence += " BETWEEN RANKS"
        return (
            f"{sentence} ({self.compared} tokens compared, {self.differ} differ, "
            f"{self.near_ties} near ties)"
        )


def compare(
    emitted: Tensor, one_rank: Tensor, oracle: Tensor, scores: Tensor, *, near_tie: float
) -> Verdict:
    """Compare one step's tokens.

    Args:
        emitted, one_rank, oracle: int64 [B], the tokens of the job, of one rank, of the oracle.
        scores: [B, V], the oracle's.
        near_tie: a token that one rank emits too may lose to the oracle's by less than this.
    """
    best = scores.gather(1, oracle.unsqueeze(1))
    # With filters a token outside the kept set may score above the oracle's; that is no near tie.
    apart = (best - scores.gather(1, emitted.unsqueeze(1))).squeeze(1).abs()
    wrong = (emitted != one_rank) | (emitted != oracle)
    near = wrong & (emitted == one_rank) & (apart < near_tie)
    return Verdict(len(emitted), int((wrong & ~near).sum()), int(near.sum()))


@torch.inference_mode()
def check(
    model: Model,
    batch: SamplingBatch,
    steps: Sequence[DecodedStep],
    job: Job,
    backend: BackendName,
    on_step: Callable[[], None],
) -> Verdict:
    """Sample the recorded hidden states of every step again and compare. Collective.

    The ranks share the steps out; each holds one step's logits at a time.

    Args:
        batch: as it was before the first step; the recorded tokens are appended to it.
    """
    weight = whole(model.lm_head_weight)
    bias = None if model.lm_head_bias is None else whole(model.lm_head_bias)
    one_rank = LMHeadSampler(
        weight, group=Ranks(), bias=bias, max_rows=batch.rows, backend=backend, **model.head
    )
    exact = backend == "torch" and job.device.type == "cpu"
    near_tie, counts = 0.0 if exact else NEAR_TIE, [0, 0, 0]
    batch.prepare(one_rank.shard)
    for number, step in enumerate(steps):
        if number % job.world_size == job.rank:
            again = one_rank(step.hidden_states, batch, step.positions).token_ids
            logits = reference.logits(step.hidden_states, weight, bias=bias, **model.head)
            oracle = reference.sample(logits, batch, step.positions).token_ids
            scores = reference.scores(logits, batch, step.positions)
            seen = step.token_ids >= 0
            rows = [each[seen] for each in (step.token_ids, again, oracle, scores)]
            found = compare(*rows, near_tie=near_tie)
            counts = [a + b for a, b in zip(counts, found, strict=False)]
            on_step()
        batch.append(step.token_ids)

    emitted = repr([step.token_ids.tolist() for step in steps])
    answers = job.gather([*counts, zlib.crc32(emitted.encode())])
    compared, differ, near_ties, _ = map(sum, zip(*answers, strict=True))
    same = len({answer[-1] for answer in answers}) == 1
    return Verdict(compared, differ, near_ties, same)
