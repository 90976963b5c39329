"""Draws of a drafter from its own sharded logits, in the stream that the verification expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import torch
from torch import Tensor

from tpsample.agreement.misplaced import (
    collective,
    refuse_on_sampler,
    require_sampler_on_all_ranks,
)
from tpsample.agreement.step import Call
from tpsample.backends import room_of
from tpsample.core.acceptance import DOMAIN_DRAFT
from tpsample.core.checks import (
    check_choice,
    check_int,
    check_tensor,
    positions_tensor,
    read_positions,
    require_plain,
)
from tpsample.core.row_noise import RowNoise
from tpsample.core.tensors import outside_of_graphs, readable
from tpsample.noise import DOMAIN_TOKEN
from tpsample.output import SampleOutput
from tpsample.request.step_batch import StepBatch
from tpsample.sampler import LMHeadSampler

Method = Literal["coupled", "rejection", "block"]
"""How drafts are accepted; see `tpsample.speculative.verify`."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The tokens that `sample_draft` drew of every row, and the law that they were drawn from.

    `verify` takes a list of drafts in place of tokens and logits, so the two cannot be mixed up.

    Attributes:
        token_ids: int64 [B], the same on every rank; -1 where the logits are NaN or all -inf, and
            in rows of a selection that are not drawn.
        logits: [B, V_local], the drafter's, kept by reference. Do not overwrite them before
            `verify`, which takes the law of the drafts from them.
        index: how many drafts of the same verification come before this one.
        method: how the drafts will be accepted.
        positions: int64 [B], of the token that was drafted.
        temperature: fp32 [B], of the rows when the token was drafted; None on a GPU, where a
            comparison would wait.
        written: torch's count of writes to the logits; None under inference mode.
    """

    token_ids: Tensor
    logits: Tensor
    index: int
    method: Method
    positions: Tensor
    temperature: Tensor | None = None
    written: int | None = None

    if not TYPE_CHECKING:  # a type checker knows the attributes, and tells of others

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an AttributeError that says where the tokens are."""
            raise AttributeError(
                f"Draft has no {name}; its tokens are token_ids, and a list of drafts is what "
                "verify takes"
            )

    @staticmethod
    def together(drafts: Sequence[Draft], method: str) -> tuple[Tensor, Tensor | None]:
        """Return tokens [B, K] and logits [B, K, V_local] of drafts in order; None for "coupled".

        Raises:
            ValueError: drafts of another method, in another order, of other rows, or whose logits
                were written over those of another.
        """
        for index, draft in enumerate(drafts):
            if (draft.method, draft.index) != (method, index):
                raise ValueError(
                    f"draft_token_ids[{index}]: expected the draft of index {index} for method="
                    f'"{method}", got one of index {draft.index} for "{draft.method}"; pass '
                    "sample_draft what verify is called with"
                )
            if (rows := draft.token_ids.shape[0]) != (first := drafts[0].token_ids.shape[0]):
                raise ValueError(
                    f"draft_token_ids[{index}]: expected a draft of {first} rows, as the first is, "
                    f"got one of {rows}; draft every row each time, and give lengths= to verify"
                )
        token_ids = torch.stack([draft.token_ids for draft in drafts], dim=1)
        if method == "coupled":  # which looks at no law
            return token_ids, None
        written: dict[int, int | None] = {}
        for index, draft in enumerate(drafts):
            place = draft.logits.data_ptr()
            if draft.logits.numel() and written.setdefault(place, draft.written) != draft.written:
                raise ValueError(
                    f"draft_token_ids[{index}]: its logits were written over those of a draft "
                    "before it, whose law is lost; give sample_draft other memory for each draft"
                )
        return token_ids, torch.stack([draft.logits for draft in drafts], dim=1)


@outside_of_graphs
@collective(refuse_on_sampler)
def sample_draft(
    sampler: LMHeadSampler,
    draft_logits: Tensor,
    batch: StepBatch,
    positions: Tensor | int,
    index: int,
    *,
    method: Method = "coupled",
) -> Draft:
    """Draft one token per row from a drafter's sharded logits. Collective.

        token ~ softmax(draft_logits / T);  a greedy row takes the argmax

    For "coupled" the draw uses the noise that the verification uses at this position. So target and
    draft agree as often as their laws allow. The other methods need a draw with noise of its own. A
    list of the drafts is what `verify` takes. A drafter that has hidden states and an
    `LMHeadSampler` drafts coupled by calling that with the same batch and positions, filters
    included.

    Args:
        sampler: the target's, whose ranks, and shard are used.
        draft_logits: [B, V_local], this rank's columns, before temperature.
        batch: B rows; its filters, penalties and masks do not count.
        positions: int64 [B], or one int: absolute position of the token to be drafted.
        index: how many drafts of the same verification come before this one.
        method: the one that `verify` will be called with.

    Returns:
        The tokens, with these logits as their law.

    Raises:
        TypeError, ValueError: a wrong or unknown argument, before anything is sent. With several
            ranks every rank raises a RankMismatch (a ValueError) instead of the first.
    """
    require_sampler_on_all_ranks(sampler)

    def check() -> Call:
        check_request(sampler, method, batch)
        number = check_int("index", index, 0, 2**31 - 1)
        check_draft_logits("draft_logits", draft_logits, ("B",), sampler)
        sampler.checks.ready()
        num_rows = draft_logits.shape[0]
        rows = batch._for_rows(num_rows)
        at = positions_tensor(positions, num_rows, draft_logits.device)
        read_positions(at, rows)
        return Call(f"sample_draft {method}", num_rows, rows, at, number)

    with sampler.agreement:
        call = sampler.agreement.check_on_all_ranks(check)
        agreed, at = call.batch, call.positions
        assert isinstance(agreed, StepBatch) and at is not None
        logits, number = draft_logits.detach(), call.num_samples
        if call.rows == 0:
            return Draft(at.clone(), logits, number, method, at.clone())
        sampler.local.read_slots(agreed)
        sample, domain = (0, DOMAIN_TOKEN) if method == "coupled" else (number, DOMAIN_DRAFT)
        noise = RowNoise(agreed.temperature, agreed.seed, at, 1)
        temperature = noise.temperature.clone() if readable(at.device) else None
        out = SampleOutput.empty(noise.seed, None)
        room = room_of(sampler.backend)
        draw, decode = room.draft_words, room.decoder()
        words = draw(logits, sampler.shard.start, noise, sample, domain)
        gathered = sampler.ranks.gather_integers(words).flatten(0, 1)
        decode(gathered, noise.seed, out, agreed._undrawn_rows)
        written = None if logits.is_inference() else logits._version
        return Draft(out.token_ids, logits, number, method, at.clone(), temperature, written)


def check_drafts(drafts: Sequence[Draft], batch: StepBatch, positions: Tensor) -> None:
    """Raise a ValueError unless temperatures and positions are those at which drafts were drawn.

    At another temperature the law of the drafts is not that of their logits. At other positions the
    target of coupled drafts draws with other noise, so that hardly a draft is accepted. By ratio,
    drafts of a position that does not move on draw one noise again and again: then the tokens of
    later verifications depend on the earlier ones, and do not follow the target's law.
    """
    if not readable(positions.device):
        return
    undrawn, ours = batch._undrawn_rows, batch.temperature
    bits = ours.view(torch.int32)  # by which a NaN, which is greedy, is equal to itself
    here = torch.ones_like(ours, dtype=torch.bool) if undrawn is None else ~undrawn.rows
    for draft in drafts:
        theirs, at = draft.temperature, draft.positions
        if theirs is not None and (differs := here & (theirs.view(torch.int32) != bits)).any():
            row = int(differs.nonzero()[0])
            raise ValueError(
                f"batch: row {row} has temperature {float(ours[row]):.9g}, and its draft "
                f"{draft.index} was drawn at {float(theirs[row]):.9g}; verify at the temperature "
                "of the drafts"
            )
        if (differs := here & (at != positions + draft.index)).any():
            row = int(differs.nonzero()[0])
            raise ValueError(
                f"positions: row {row} has {int(positions[row])}, and its draft {draft.index} was "
                f"drawn for position {int(at[row])}; give the position of the first draft here, "
                "and of each draft by itself in sample_draft"
            )


def check_request(sampler: LMHeadSampler, method: str, batch: object) -> None:
    """Check the arguments that a draft and its verification share."""
    check_choice("method", method, get_args(Method))
    if not isinstance(batch, StepBatch):
        raise TypeError(f"batch: expected a SamplingBatch, got {type(batch).__name__}")
    sampler.checks.hold_batch(batch)


def check_draft_logits(
    name: str, logits: Tensor, leading: Sequence[int | str], sampler: LMHeadSampler
) -> None:
    """Check logits whose last axis is this rank's shard.

    Args:
        leading: the sizes of the other axes; a letter stands for any size.
    """
    require_plain(name, logits)
    shard, device = sampler.shard, sampler.weight.device
    columns = f", the columns of {shard} of the drafter's logits"
    check_tensor(name, logits, (), (*leading, len(shard)), device, columns)
    sampler.checks.ready_made.refuse_probabilities(name, logits)
