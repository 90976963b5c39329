"""VerifyOutput: what a verification returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.output import Logprobs


@dataclass
class VerifyOutput:
    """The tokens of one verification, the same on every rank.

    Attributes:
        num_accepted: int64 [B], how many drafts became tokens; the row emits one token more.
        token_ids: int64 [B, K + 1]: the accepted drafts, the token behind them, then -1.
        status: int32 [B], `tpsample.Status` of the last position the row reached. If it is not OK,
            the token there is -1 and those before it are good.
        seeds: int64 [B], as in `SampleOutput`.
        logprobs: of every emitted token, rows [B · (K + 1)] as in `SampleOutput`, row r · (K + 1) +
            i for position i of row r; None if no row of the batch asks for any.
    """

    num_accepted: Tensor
    token_ids: Tensor
    status: Tensor
    seeds: Tensor
    logprobs: Logprobs | None = None

    @staticmethod
    def of(num_accepted: Tensor, token_ids: Tensor, status: Tensor, seeds: Tensor) -> VerifyOutput:
        """Cut the positions of every row off behind the last it reached.

        Args:
            num_accepted: int64 [B].
            token_ids, status: [B, K + 1], anything behind the last position reached.
        """
        place = num_accepted.unsqueeze(1)
        index = reached(num_accepted, token_ids.shape[1])
        row_status = status.gather(1, place).squeeze(1)
        return VerifyOutput(num_accepted, token_ids.where(index, word.NO_TOKEN), row_status, seeds)


def reached(num_accepted: Tensor, num_positions: int) -> Tensor:
    """bool [B, K + 1]: the positions a row emits a token at."""
    index = torch.arange(num_positions, device=num_accepted.device)
    return index <= num_accepted.unsqueeze(1)


def leading(accepted: Tensor) -> Tensor:
    """int64 [B], how many of bool [B, K + 1] are true before the first that is not."""
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def emit(drafts: Tensor, num_accepted: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [B, K + 1]: the accepted drafts, the token [B] behind them, then anything."""
    return drafts.scatter(1, num_accepted.unsqueeze(1), token_ids.unsqueeze(1))
