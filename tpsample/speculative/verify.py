"""verify: it takes drafts and returns tokens that follow the target's law exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpsample.agreement.misplaced import (
    collective,
    refuse_on_sampler,
    require_sampler_on_all_ranks,
)
from tpsample.agreement.step import Call
from tpsample.backends import room_of
from tpsample.core import word
from tpsample.core.checks import INDICES, check_tensor, positions_tensor
from tpsample.core.ranges import range_of
from tpsample.core.tensors import outside_of_graphs
from tpsample.filters.kept_sets import kept_sets_of
from tpsample.output import Logprobs, SampleOutput, VerifyOutput, reached
from tpsample.request.plan import BatchView
from tpsample.request.step import Inputs
from tpsample.request.step_batch import StepBatch
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.acceptance import verify_by_ratio
from tpsample.speculative.drafting import (
    Draft,
    Method,
    check_draft_logits,
    check_drafts,
    check_request,
)


@outside_of_graphs
@collective(refuse_on_sampler)
def verify(
    sampler: LMHeadSampler,
    hidden_states: Tensor,
    draft_token_ids: Tensor | Sequence[Draft],
    batch: StepBatch,
    positions: Tensor | int,
    *,
    method: Method = "coupled",
    draft_logits: Tensor | None = None,
    lengths: Tensor | None = None,
) -> VerifyOutput:
    """Accept a prefix of each row's drafts, and emit it with one token more. Collective.

        coupled     accept while the draft is the token that plain decoding draws, so that the
                    tokens are plain decoding's, bit for bit
        rejection   accept with min(1, p / q), else draw from max(p - q, 0): the tokens follow the
                    target's law, but are not those of plain decoding (`.acceptance`)
        block       the same by whole prefixes, which accepts more (`.acceptance`)

    With each of them a greedy row emits the argmax at every position. Each position has the
    parameters of its row. All that decides a token is an integer that every rank receives. So the
    ids do not depend on ranks, shards, other rows or the padding of K. No logits are gathered;
    beside words of 8 bytes, ranks exchange integers per row and position.

    Args:
        sampler: the target's. Every rank calls with the same arguments, but for its own columns of
            `draft_logits`.
        hidden_states: [B, K + 1, D]: of the token before the drafts, then of each draft.
        draft_token_ids: int64 [B, K]. The first id outside the vocabulary, such as -1, ends the
            drafts of its row; hidden states after it may be anything. K may be 0. Or the K drafts
            that `sample_draft` returned, in order; they bring their logits.
        batch: B rows, or B slots (`SamplingBatch.select`).
        positions: int64 [B], or one int: absolute position of the first token to be emitted.
        method: "coupled", "rejection" or "block".
        draft_logits: [B, K, V_local], the drafter's logits for this rank's shard, before
            temperature: no probabilities, and not divided by T. The drafts must be draws from
            softmax(draft_logits / T) (T = 1 in greedy rows) in streams of their own, as
            `sample_draft` makes them. A law that is not theirs makes the result follow neither. A
            position may have one logit of +inf, which is certain then, and not several.
            None: the drafts were certain, as an argmax is. Not with "coupled".
        lengths: int32 or int64 [B], how many of its drafts a row has, in place of an id outside the
            vocabulary after them. Numbers below 0 are 0, those above K are K. Default: K.

    Returns:
        The tokens, how many drafts were accepted, and the status.

    Raises:
        TypeError, ValueError: a wrong or unknown argument, before anything is sent.
    """
    require_sampler_on_all_ranks(sampler)
    inputs, drafts = Inputs(hidden_states), (draft_token_ids, draft_logits, lengths)
    return _verify(sampler, inputs, method, batch, positions, *drafts)


@outside_of_graphs
@collective(refuse_on_sampler)
def verify_logits(
    sampler: LMHeadSampler,
    local_logits: Tensor,
    draft_token_ids: Tensor | Sequence[Draft],
    batch: StepBatch,
    positions: Tensor | int,
    *,
    method: Method = "coupled",
    draft_logits: Tensor | None = None,
    lengths: Tensor | None = None,
    head_applied: bool = False,
) -> VerifyOutput:
    """Verify drafts as `verify` does, from logits that the caller computed. Collective.

    It is to `verify` what `LMHeadSampler.sample_logits` is to a step: for heads that are quantised,
    adapted or otherwise not a plain weight. Nothing is gathered.

    Args:
        local_logits: fp32, bf16 or fp16 [B, K + 1, V_local], the columns of this rank's shard: of
            the token before the drafts, then of each draft.
        head_applied: as in `LMHeadSampler.sample_logits`.

    The other arguments, what is returned and what is raised are those of `verify`.
    """
    require_sampler_on_all_ranks(sampler)
    inputs = Inputs(local_logits, are_logits=True, head_applied=head_applied)
    drafts = draft_token_ids, draft_logits, lengths
    return _verify(sampler, inputs, method, batch, positions, *drafts)


def _verify(sampler: LMHeadSampler, inputs: Inputs, method: Method, *others: Any) -> VerifyOutput:
    """Agree on a verification with the other ranks, and carry it out.

    Args:
        others: the other arguments of `_checked`.
    """
    arguments = sampler, inputs, method, *others
    with sampler.agreement:
        call = sampler.agreement.check_on_all_ranks(_checked, *arguments, words_follow=True)
        agreed, at, drafts = call.batch, call.positions, call.token_ids
        assert isinstance(agreed, StepBatch) and at is not None and drafts is not None

        sampler.local.read_slots(agreed)
        undrawn = None if agreed._undrawn_rows is None else agreed._undrawn_rows.rows
        room = room_of(sampler.backend)
        drafts, at_rows = room.drafted_rows(drafts, undrawn, at, sampler.vocab_size)
        agreed._note_step(sampler.pipeline, inputs.tensor, at, call.position_bytes, 1)
        expanded = agreed._with_drafts(drafts[:, :-1], is_read=True)
        if call.rows == 0:
            none = torch.zeros_like(at)
            return VerifyOutput.of(none, drafts, drafts.int(), agreed.seed.clone())
        with range_of("verification"):
            if method == "coupled":
                verified = _verify_coupled(sampler, inputs, drafts, expanded, at_rows)
            else:
                rows = drafts, expanded, at, at_rows
                how: dict[str, Any] = {"block": method == "block", "draft": call.draft_logits}
                verified = verify_by_ratio(sampler, inputs, *rows, **how)
        agreed._note_tokens(verified.token_ids)
        return sampler.pipeline.count_step(verified)


def _checked(
    sampler: LMHeadSampler,
    inputs: Inputs,
    method: Method,
    batch: StepBatch,
    positions: Tensor | int,
    draft_token_ids: Tensor | Sequence[Draft],
    draft_logits: Tensor | None,
    lengths: Tensor | None,
) -> Call:
    """Return the call of a verification.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    check_request(sampler, method, batch)
    device, token_ids, drawn = sampler.weight.device, draft_token_ids, _drawn(draft_token_ids)
    if drawn:
        if draft_logits is not None:
            raise ValueError(
                "draft_logits: the drafts of sample_draft bring their own; leave it out"
            )
        token_ids, draft_logits = Draft.together(drawn, method)
    check_tensor("draft_token_ids", token_ids, (torch.int64,), "BK", device)
    assert isinstance(token_ids, Tensor)
    num_rows, num_drafts = token_ids.shape
    if lengths is not None:
        check_tensor("lengths", lengths, INDICES, (num_rows,), device)
        column = torch.arange(num_drafts, device=device)
        token_ids = token_ids.where(column < lengths.unsqueeze(1), word.NO_TOKEN)
    sampler.checks.check_inputs(inputs, (num_rows, num_drafts + 1))
    law = "certain"
    if draft_logits is not None:
        if method == "coupled":
            raise ValueError(
                'draft_logits: method="coupled" looks at no draft probabilities; leave it out, '
                'or choose "rejection" or "block"'
            )
        check_draft_logits("draft_logits", draft_logits, (num_rows, num_drafts), sampler)
        law, draft_logits = f"by {draft_logits.dtype} logits", draft_logits.detach()
    at = positions_tensor(positions, num_rows, device)
    if drawn:
        check_drafts(drawn, batch._for_rows(num_rows), at)
    call = sampler.checks.call_on_rows(
        f"verify {method} {law}{inputs.dtype_suffix}",
        batch,
        num_rows,
        at,
        masked_rows=num_rows * (num_drafts + 1),
        num_samples=num_drafts,
        token_ids=token_ids,
        # Those after the first id outside the vocabulary may be anything.
        hidden_states=None if inputs.are_logits else inputs.tensor[:, 0],
    )
    _check_last_position(call, num_drafts)
    return call._replace(draft_logits=draft_logits)


def _drawn(draft_token_ids: object) -> Sequence[Draft]:
    """Return the drafts of `sample_draft`, or none if these are token ids."""
    if not isinstance(draft_token_ids, Sequence):
        return ()
    return draft_token_ids if all(isinstance(each, Draft) for each in draft_token_ids) else ()


def _check_last_position(call: Call, num_drafts: int) -> None:
    """Raise a ValueError if a draft stands at a position that no step has, where the host reads."""
    assert call.batch is not None and call.positions is not None
    if not call.position_bytes:
        return
    undrawn, at = call.batch._undrawn_rows, call.positions
    largest = int((at if undrawn is None else at.masked_fill(undrawn.rows, 0)).max())
    if largest + num_drafts >= 2**63:
        raise ValueError(
            f"positions: expected 0 <= position <= 2^63 - {num_drafts + 1}, so that each of the "
            f"{num_drafts} drafts has one, got {largest}"
        )


def _verify_coupled(
    sampler: LMHeadSampler,
    inputs: Inputs,
    drafts: Tensor,
    batch: BatchView,
    positions: Tensor,
) -> VerifyOutput:
    """Accept a draft iff it is the token that plain decoding draws. Collective.

        y_i = the token of position i, sampled as ever     i = 0 … K
        accept x_(i+1) while it equals y_i; emit y_0 … y_a, a the number accepted

    All B · (K + 1) rows are sampled in one step. The tokens are plain decoding's bit for bit,
    whatever drafted them, if the hidden states are those of plain decoding. Noise belongs to (seed,
    position, token id), so a position's token does not depend on the step that draws it. A draft is
    accepted with probability p(x); one drawn with the same noise is accepted more often, with at
    least (1 - d) / (1 + d). Here d is the total variation between target and draft (Daliri, Musco,
    Suresh, arXiv 2408.07978).

    Args:
        inputs: hidden states or logits of [B, K + 1] rows.
        drafts: int64 [B, K + 1], -1 where there is none.
        batch: the rows after each of their drafts.
        positions: int64 [B · (K + 1)], those of all rows.
    """
    out = SampleOutput.empty(batch.seed, None)
    step = sampler.pipeline.begin(inputs, batch, positions, out)
    cut = sampler.pipeline.end(step)
    verified = room_of(sampler.backend).coupled_output(drafts, out)
    if out.logprobs is None and cut is None:
        return verified
    emitted = reached(verified.num_accepted, drafts.shape[1]).flatten()
    if out.logprobs is not None:
        verified.logprobs = _emitted(out.logprobs, emitted)
    if cut is not None:
        has_token = (verified.token_ids >= 0).flatten()
        verified.kept = kept_sets_of(cut, batch, sampler.ranks, has_token)
    return verified


def _emitted(logprobs: Logprobs, emitted: Tensor) -> Logprobs:
    """Blank the logprobs of positions where nothing was emitted."""
    emitted = emitted.unsqueeze(1)
    return Logprobs(
        logprobs.token_ids.where(emitted, -1),
        logprobs.values.where(emitted, torch.nan),
        logprobs.ranks.where(emitted, 0),
        logprobs.entropies.where(emitted.squeeze(1), torch.nan),
        logprobs.num_chosen,
    )
