"""VerifyOutput, which a verification returns, and the positions it reached."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.output import Logprobs


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
    """

    num_accepted: Tensor
    token_ids: Tensor
    status: Tensor
    seeds: Tensor
    logprobs: Logprobs | None = None

    @staticmethod
    def of(num_accepted: Tensor, token_ids: Tensor, status: Tensor, seeds: Tensor) -> VerifyOutput:
        """Cut every row off after the last position it reached.

        Args:
            num_accepted: int64 [B].
            token_ids, status: [B, K + 1], anything after the last position reached.
        """
        row_status = status.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        emitted = token_ids.where(reached(num_accepted, token_ids.shape[1]), word.NO_TOKEN)
        return VerifyOutput(num_accepted, emitted, row_status, seeds)

    def name_undrawn(self, rows: Tensor, status: Tensor) -> None:
        """Write -1 and a status where a row was not drawn; it has no drafts.

        Args:
            rows, status: bool and int32 [B], as in `SampleOutput.name_undrawn`.
        """
        self.status = torch.where(rows, status, self.status)
        self.token_ids[:, 0] = self.token_ids[:, 0].masked_fill(rows, word.NO_TOKEN)

    def name_failed(self, token_id: int) -> None:
        """Write a token where a row failed."""
        place = self.num_accepted.unsqueeze(1)
        last = self.token_ids.gather(1, place)
        self.token_ids.scatter_(1, place, last.masked_fill(last < 0, token_id))


def position_of_rows(positions: Tensor, num_positions: int) -> Tensor:
    """Return int64 [B · num_positions], the absolute position of each row to verify.

    Args:
        positions: int64 [B], those of each request's first.
    """
    index = torch.arange(num_positions, device=positions.device)
    return (positions.unsqueeze(1) + index).flatten()


def reached(num_accepted: Tensor, num_positions: int) -> Tensor:
    """Return bool [B, K + 1], the positions at which a row emits a token."""
    index = torch.arange(num_positions, device=num_accepted.device)
    return index <= num_accepted.unsqueeze(1)


def leading(accepted: Tensor) -> Tensor:
    """Return int64 [B], how many of bool [B, K + 1] are true before the first that is not."""
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def emit(drafts: Tensor, num_accepted: Tensor, token_ids: Tensor) -> Tensor:
    """Return int64 [B, K + 1]: the accepted drafts, the token [B] after them, then anything."""
    return drafts.scatter(1, num_accepted.unsqueeze(1), token_ids.unsqueeze(1))
