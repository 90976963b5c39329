"""verify: it takes drafts and returns tokens that follow the target's law exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.agreement.step import Call
from tpsample.agreement.step_checks import positions_tensor
from tpsample.core import word
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.checks import Method, check_verify
from tpsample.speculative.coupled import verify_coupled
from tpsample.speculative.output import VerifyOutput
from tpsample.speculative.ratio import verify_by_ratio


def verify(
    sampler: LMHeadSampler,
    hidden_states: Tensor,
    draft_token_ids: Tensor,
    batch: SamplingBatch,
    positions: Tensor | int,
    *,
    method: Method = "coupled",
    draft: Tensor | None = None,
) -> VerifyOutput:
    """Accept a prefix of each row's drafts, and emit it with one token more. Collective.

        coupled     accept while the draft is the token that plain decoding draws, so that the
                    tokens are plain decoding's, bit for bit (`tpsample.speculative.coupled`)
        rejection   accept with min(1, p / q), else draw from max(p - q, 0): the tokens follow the
                    target's law, but are not those of plain decoding (`.tokenwise`)
        block       the same by whole prefixes, which accepts more (`.block`)

    With each of them a greedy row emits the argmax at every position. Each position has the
    parameters of its row. All that decides a token is an integer that every rank receives, so the
    ids do not depend on ranks, shards, other rows or the padding of K. No logits are gathered;
    beside words of 8 bytes, ranks exchange integers per row and position.

    Args:
        sampler: the target's. Every rank calls with the same arguments, but for its own columns of
            `draft`.
        hidden_states: [B, K + 1, D]: of the token before the drafts, then of each draft.
        draft_token_ids: int64 [B, K]. The first id outside the vocabulary, such as -1, ends the
            drafts of its row; hidden states behind it may be anything.
        batch: B rows, or one request for all rows.
        positions: int64 [B], or one int: absolute position of the first token to be emitted.
        method: "coupled", "rejection" or "block".
        draft: [B, K, V_local], the drafter's logits for this rank's shard, before temperature. The
            drafts must be draws from softmax(draft / T) (T = 1 in greedy rows) in streams of their
            own, as `sample_draft` makes them. None: the drafts were certain. Not with "coupled".

    Returns:
        The tokens, how many drafts were accepted, and the status.

    Raises:
        TypeError, ValueError: a wrong argument, before anything is sent.
        UnsupportedParameter: (a ValueError) "rejection" or "block", filters or logprobs between
            ranks without a process group.
    """

    def check() -> Call:
        check_verify(sampler, hidden_states, draft_token_ids, batch, method, draft)
        num_rows, num_drafts = draft_token_ids.shape
        if method != "coupled":
            sampler.ranks.require_group(f'method="{method}"')
        return sampler.checks.rows(
            f"verify {method} {'certain' if draft is None else 'by logits'}",
            batch,
            num_rows,
            positions_tensor(positions, num_rows, hidden_states.device),
            masked_rows=num_rows * (num_drafts + 1),
            num_samples=num_drafts,
            token_ids=draft_token_ids,
        )

    with sampler.agreement.leaving_on_error():
        call = sampler.agreement.settle(check)
        settled, at = call.batch, call.positions
        assert isinstance(settled, SamplingBatch) and at is not None

        known = (draft_token_ids >= 0) & (draft_token_ids < sampler.vocab_size)
        known = known.cumprod(dim=1).bool()
        drafts = F.pad(draft_token_ids.where(known, word.NO_TOKEN), (0, 1), value=word.NO_TOKEN)
        expanded = settled.with_drafts(drafts[:, :-1])
        hidden_states = hidden_states.detach()
        if call.rows == 0:
            none = torch.zeros_like(at)
            return VerifyOutput.of(none, drafts, drafts.int(), settled.seed.clone())
        if method == "coupled":
            return verify_coupled(sampler, hidden_states, drafts, expanded, at)
        return verify_by_ratio(
            sampler,
            hidden_states,
            drafts,
            expanded,
            at,
            block=method == "block",
            draft=None if draft is None else draft.detach(),
        )
