"""Checks generated tokens: samples each again, on one rank and by the definition."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from tpsample.agreement.arguments import BackendName
from tpsample.cli.model import Model
from tpsample.distributed import Job
from tpsample.ranks.ranks import Ranks
from tpsample.record.format import Record
from tpsample.record.verify import SAMPLED_LOGITS, logits_of, sampled_again
from tpsample.sampler import LMHeadSampler


def verdict_sentence(
    compared: int, differ: int, near_ties: int, same_on_every_rank: bool, world_size: int
) -> tuple[str, bool]:
    """Return one sentence for people, and whether all tokens are right.

    The sentence starts with "same tokens" only if they are.

    Args:
        compared: tokens looked at.
        differ: of these, tokens that are not what one rank and the oracle give.
        near_ties: differences from the oracle excused because its scores tie.
        same_on_every_rank: all ranks emitted the same sequences.
    """
    ok = compared > 0 and differ == 0 and same_on_every_rank
    ways = ["1 rank", *([f"{world_size} ranks"] if world_size > 1 else []), "oracle"]
    sentence = "same tokens: " + " = ".join(ways) if ok else "TOKENS DIFFER"
    between = "" if same_on_every_rank else " BETWEEN RANKS"
    counts = f"{compared} tokens compared, {differ} differ, {near_ties} near ties"
    return f"{sentence}{between} ({counts})", ok


@torch.inference_mode()
def check(
    model: Model, record: Record, job: Job, backend: BackendName, on_token: Callable[[], None]
) -> tuple[str, bool]:
    """Sample every token of a record again, and return the verdict on the comparison.

    Collective: each rank samples a share of the tokens.
    """
    weight, bias, head = model.whole_head()
    count = len(record.params)
    own = range(count * job.rank // job.world_size, count * (job.rank + 1) // job.world_size)
    most = max(1, min(len(own), SAMPLED_LOGITS // len(weight)))
    one_rank = LMHeadSampler(
        weight, group=Ranks(), bias=bias, max_rows=most, backend=backend, **head
    )
    exact = backend == "torch" and job.device.type == "cpu"
    differ = near_ties = 0
    for rows, logits in logits_of(record, own, weight, bias, head):
        part, batch = record.part(rows), record.batch(rows, len(weight))
        again = one_rank(part["hidden_states"], batch, part["positions"]).token_ids
        right = (again == part["token_ids"]).tolist()
        verdicts = sampled_again(record, rows, logits, exact=exact)
        for alone, verdict in zip(right, verdicts, strict=True):
            confirmed = alone and verdict.confirmed
            differ += not confirmed
            near_ties += confirmed and verdict.near_tie
            on_token()

    emitted = zlib.crc32(repr(record.tensors["token_ids"].tolist()).encode())
    answers = job.gather([len(own), differ, near_ties, emitted])
    compared, differ, near_ties, _ = map(sum, zip(*answers, strict=True))
    same = len({answer[-1] for answer in answers}) == 1
    return verdict_sentence(compared, differ, near_ties, same, job.world_size)
