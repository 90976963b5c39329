"""SampleOutput, which a step returns, with its logprobs and kept sets, and VerifyOutput."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpsample.core.checks import check_int, check_num_samples, describe
from tpsample.core.tensors import ordinary_tensors
from tpsample.core.word import NO_TOKEN, Status

_OK, _BAD_SLOT = int(Status.OK), int(Status.BAD_SLOT)


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of a step: of the tokens drawn, of each row's N most likely, of chosen ids.

    N is the largest number that a row of the batch asks for, and C the largest number of chosen
    ids. A place that a row did not ask for has id -1, value NaN and rank 0. So has every place of a
    row whose status is not OK. So has a row in a raw mode with a NaN that a mask removes, because
    its raw logits have no distribution.

    Attributes:
        token_ids: int64 [B, S + N + C], where S is 1, or num_samples if given.
        values: float64, the same shape, in the mode of the row's request (`logprobs_mode`). A
            logprob lies within 5e-7 of the exact one, because a sum of integer masses gives it
            (MASSES.md). So ranks and shards change no bit of it.
        ranks: int64, the same shape: how many of the row's logits are >= the token's own, so 1 for
            an untied best. In the processed modes they are counted in the kept set.
        entropies: float64 [B], in nats, of the softmax of the raw logits, or in the processed modes
            of what the filters left; NaN where there are no values.
        num_chosen: C.
    """

    token_ids: Tensor
    values: Tensor
    ranks: Tensor
    entropies: Tensor
    num_chosen: int = 0

    def top(self, count: int, *, num_samples: int = 1) -> tuple[Tensor, Tensor]:
        """Return ids and values of each row's `count` most likely tokens, [B, count] each.

        The first columns are of the tokens drawn, so ``values[:, :count]`` are not these.

        Args:
            num_samples: of the step.

        Raises:
            ValueError: more than N, or no number of tokens.
        """
        count, num_samples = check_int("count", count, 0, 2**31 - 1), check_num_samples(num_samples)
        likely = self.token_ids.shape[1] - num_samples - self.num_chosen
        if count > likely:
            raise ValueError(
                f"count: expected at most the {likely} likely tokens that requests asked for, got "
                f"{count}; ask for them with SamplingParams(logprobs={count})"
            )
        columns = slice(num_samples, num_samples + count)
        return self.token_ids[:, columns], self.values[:, columns]

    @staticmethod
    def none(num_rows: int, width: int, device: torch.device) -> Logprobs:
        """Return the logprobs of rows without a token."""
        ids = torch.full((num_rows, width), NO_TOKEN, dtype=torch.int64, device=device)
        values = torch.full_like(ids, torch.nan, dtype=torch.float64)
        entropies = torch.full((num_rows,), torch.nan, dtype=torch.float64, device=device)
        return Logprobs(ids, values, torch.zeros_like(ids), entropies)

    def put(self, index: Tensor | slice, rows: Logprobs) -> Logprobs:
        """Replace some rows, int64 or a slice, by others of the same width; return the whole."""
        for name in ("token_ids", "values", "ranks", "entropies"):
            getattr(self, name)[index] = getattr(rows, name)
        return self


@dataclass(slots=True)
class KeptSets:
    """The tokens that each row of a step could have drawn: what masks and filters left of it.

    Set i is ``token_ids[offsets[i] : offsets[i + 1]]``. It lists nothing if the row kept all V ids,
    kept more than `kept_cap`, has no token, or was not drawn. A greedy row keeps its argmax. A set
    may have ids whose logits are below fp32 once they are divided by T, which are never drawn; a
    row of such ids alone has no token.

    Attributes:
        offsets: int64 [R + 1], R = B, or B · (K + 1) for `verify`, whose row r · (K + 1) + i is
            position i of row r.
        token_ids: int64 [T], by logit descending, equal logits by id ascending. T is offsets[R], or
            R · min(cap, V) where the host may not wait for the device; the rest is -1.
        log_masses: float64 [T]: ln of the token's probability within its set; the rest is NaN.
        sizes: int64 [R], how many tokens the row kept, whether they are listed or not.
        whole: bool [R], whether the row kept all V ids.
        overflow: bool [R], whether they are more than the cap, and not all.
    """

    offsets: Tensor
    token_ids: Tensor
    log_masses: Tensor
    sizes: Tensor
    whole: Tensor
    overflow: Tensor


@dataclass(slots=True)
class SampleOutput:
    """The tokens of one step, the same on every rank. Later changes of the batch do not change it.

    Attributes:
        token_ids: int64 [B], or [B, num_samples] if num_samples was given: global ids below
            vocab_size. They are the sampler's `on_failed` (-1) where the status is not OK, and in
            the padding of a selection of slots, whose status is OK.
        status: int32 [B], values of `tpsample.Status`, the worst over a row's samples.
        seeds: int64 [B], a copy of each seed, drawn or given; those from 2^63 on are negative.
        logprobs: `Logprobs`; None if no row of the batch asks for any.
        kept: `KeptSets`; None if the batch has no `kept_cap` or no row.
    """

    token_ids: Tensor
    status: Tensor
    seeds: Tensor
    logprobs: Logprobs | None = None
    kept: KeptSets | None = None

    if not TYPE_CHECKING:  # a type checker knows the attributes, and tells of others

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that names what there is."""
            names = ", ".join(field.name for field in fields(self))
            raise AttributeError(f"SampleOutput has no {describe(name)}; it has {names}")

    def fill_skipped(self, rows: Tensor, bad: Tensor) -> None:
        """Write -1 and a status where a row was not drawn.

        Args:
            rows: bool [B], whether a row was not.
            bad: bool [B], whether its status is BAD_SLOT; else it is OK.
        """
        self.status.masked_fill_(rows, _OK).masked_fill_(bad, _BAD_SLOT)
        rows = rows if self.token_ids.ndim == 1 else rows.unsqueeze(1)
        self.token_ids.masked_fill_(rows, NO_TOKEN)

    def fill_failed(self, token_id: int) -> None:
        """Write a token where there is none."""
        self.token_ids.masked_fill_(self.token_ids < 0, token_id)

    @staticmethod
    @ordinary_tensors
    def empty(seeds: Tensor, num_samples: int | None) -> SampleOutput:
        """Return an uninitialised output with one row per seed."""
        num_rows, device = seeds.shape[0], seeds.device
        shape = (num_rows,) if num_samples is None else (num_rows, num_samples)
        return SampleOutput(
            token_ids=torch.empty(shape, dtype=torch.int64, device=device),
            status=torch.empty(num_rows, dtype=torch.int32, device=device),
            seeds=torch.empty(num_rows, dtype=torch.int64, device=device),
        )


@dataclass(slots=True)
class VerifyOutput:
    """The tokens of one verification, the same on every rank.

    Attributes:
        num_accepted: int64 [B], how many drafts became tokens; the row emits one token more.
        token_ids: int64 [B, K + 1]: the accepted drafts, the token after them, then -1.
        status: int32 [B], the `tpsample.Status` of the last position that the row reached. Unless
            it is OK, the token there is the sampler's `on_failed`; those before it are good. A row
            of padding has that token too, and the status OK.
        seeds: int64 [B], as in `SampleOutput`.
        logprobs: of every emitted token, as in `SampleOutput` for B · (K + 1) rows, where row
            r · (K + 1) + i is position i of row r; None if no row of the batch asks for any.
        kept: `KeptSets` of the same rows, those of positions that emitted no token without any;
            None if the batch has no `kept_cap` or no row.
    """

    num_accepted: Tensor
    token_ids: Tensor
    status: Tensor
    seeds: Tensor
    logprobs: Logprobs | None = None
    kept: KeptSets | None = None

    @staticmethod
    def of(num_accepted: Tensor, token_ids: Tensor, status: Tensor, seeds: Tensor) -> VerifyOutput:
        """Cut every row off after the last position it reached.

        Args:
            num_accepted: int64 [B].
            token_ids, status: [B, K + 1], anything after the last position reached.
        """
        row_status = status.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        emitted = token_ids.where(reached(num_accepted, token_ids.shape[1]), NO_TOKEN)
        return VerifyOutput(num_accepted, emitted, row_status, seeds)

    def fill_skipped(self, rows: Tensor, bad: Tensor) -> None:
        """Write -1 and a status where a row was not drawn; it has no drafts.

        Args:
            rows, bad: bool [B] each, as in `SampleOutput.fill_skipped`.
        """
        self.status.masked_fill_(rows, _OK).masked_fill_(bad, _BAD_SLOT)
        self.token_ids[:, 0] = self.token_ids[:, 0].masked_fill(rows, NO_TOKEN)

    def fill_failed(self, token_id: int) -> None:
        """Write a token where a row failed."""
        index = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        last = index == self.num_accepted.unsqueeze(1)
        self.token_ids.masked_fill_(last & (self.token_ids < 0), token_id)


def reached(num_accepted: Tensor, num_positions: int) -> Tensor:
    """Return bool [B, K + 1], the positions at which a row emits a token."""
    index = torch.arange(num_positions, device=num_accepted.device)
    return index <= num_accepted.unsqueeze(1)
