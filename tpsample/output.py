"""SampleOutput: what a step returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Logprobs:
    """Logprobs of a step: the tokens drawn, then each row's N most likely, then its chosen ids.

    N is the largest asked for in the batch; a place that a row did not ask for, and every place of
    a row whose status is not OK, has id -1, value NaN and rank 0.

    Attributes:
        token_ids: int64 [B, S + N + C]; S = 1, or num_samples if given.
        values: float64, the same shape; in the mode of the row's request.
        ranks: int64, the same shape: how many of the row's logits are >= the token's own, counted
            in the kept set for the processed modes; 1 for an untied best.
        entropies: float64 [B], in nats, of the distribution that the row's mode is about: softmax
            of the raw logits, or of what the filters left; NaN where there are no values.
    """

    token_ids: Tensor
    values: Tensor
    ranks: Tensor
    entropies: Tensor

    def of_rows(self, row_index: Tensor, num_rows: int) -> Logprobs:
        """The same for a batch of `num_rows` rows of which these are `rows`."""
        shape = (num_rows, self.token_ids.shape[1])
        whole = Logprobs(
            self.token_ids.new_full(shape, -1),
            self.values.new_full(shape, torch.nan),
            self.ranks.new_zeros(shape),
            self.entropies.new_full((num_rows,), torch.nan),
        )
        whole.token_ids[row_index] = self.token_ids
        whole.values[row_index] = self.values
        whole.ranks[row_index] = self.ranks
        whole.entropies[row_index] = self.entropies
        return whole


@dataclass
class KeptSets:
    """What the filters of a step left to be drawn, one set per filtered row, in CSR form.

    Set i is ``token_ids[offsets[i] : offsets[i + 1]]``. It is empty if it overflows, and if the
    row has no token.

    Attributes:
        rows: int64 [F], the filtered rows, as indices in the batch.
        offsets: int64 [F + 1].
        token_ids: int64 [offsets[F]], logit descending, equal ones by id.
        log_masses: float64, the same shape: ln of the token's probability within its set.
        sizes: int64 [F], how many tokens the row kept, whether they fit or not.
        overflow: bool [F], more than the cap.
    """

    rows: Tensor
    offsets: Tensor
    token_ids: Tensor
    log_masses: Tensor
    sizes: Tensor
    overflow: Tensor


@dataclass
class SampleOutput:
    """Tokens of one step, the same on every rank. Nothing that happens to the batch later changes
    them.

    Attributes:
        token_ids: int64 [B], or [B, num_samples] if num_samples was given; -1 where status is
            not OK, else a global id below vocab_size.
        status: int32 [B], values of `tpsample.Status`; the worst over a row's samples.
        seeds: int64 [B], a copy of each row's seed, drawn or given (bits above 2^63 show as sign).
        logprobs: `Logprobs`, None if no row of the batch asks for any.
        kept: `KeptSets`, None if the batch has no `kept_cap` or no filtered row.
    """

    token_ids: Tensor
    status: Tensor
    seeds: Tensor
    logprobs: Logprobs | None = None
    kept: KeptSets | None = None

    @property
    def num_samples(self) -> int:
        """Draws per row."""
        return 1 if self.token_ids.ndim == 1 else self.token_ids.shape[1]

    @staticmethod
    @torch.inference_mode(False)
    def empty(seeds: Tensor, num_samples: int | None) -> SampleOutput:
        """Uninitialised output for one row per seed."""
        rows, device = seeds.shape[0], seeds.device
        shape = (rows,) if num_samples is None else (rows, num_samples)
        return SampleOutput(
            token_ids=torch.empty(shape, dtype=torch.int64, device=device),
            status=torch.empty(rows, dtype=torch.int32, device=device),
            seeds=torch.empty(rows, dtype=torch.int64, device=device),
        )
