"""The arithmetic on rows of logprobs: the words of all ranks, and the report of a row.

This is plain PyTorch, the definition; `tpsample.filters.logprobs` has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.masses import LN2, TOP_MASS
from tpsample.core.order import below_top
from tpsample.output import Logprobs
from tpsample.request.filters import LogprobRows


class ListedWords(NamedTuple):
    """The order words of R rows over all ranks whose logprobs are reported.

    Attributes:
        first: int64 [R, n], the first n of the order, descending.
        own: int64 [R, S + C], the words of the sampled and the chosen ids; 0 for no id.
        top: fp32 [R], the largest logits.
        temperature: fp32 [R], 1 in a raw mode.
        marks: int64 [R, S + C + 1], for each of `own`, and for the last of `first`, the lowest word
            with the same logit.
    """

    first: Tensor
    own: Tensor
    top: Tensor
    temperature: Tensor
    marks: Tensor


def first_of(gathered: Tensor, count: int) -> Tensor:
    """Return the first words over all ranks, int64 [R, count], of [W, R, count or more]."""
    if gathered.shape[0] == 1:
        return gathered[0, :, :count]
    return gathered[:, :, :count].transpose(0, 1).flatten(1).topk(count, dim=1).values


def listed_words(temperature: Tensor, logprob_rows: LogprobRows, gathered: Tensor) -> ListedWords:
    """Return the words of all ranks.

    Args:
        temperature: fp32 [R], 1 for greedy rows.
        gathered: int64 [W, R, n + S + C], each rank's first words and those of the given ids.
    """
    count = max(1, logprob_rows.top)
    first, own = first_of(gathered, count), gathered[:, :, count:].amax(dim=0)
    # Of the N best, what ties with the last of them is counted.
    marks = torch.cat([own, first[:, -1:]], dim=1) & ~word.TOKEN_MASK
    temperature = torch.where(logprob_rows.processed, temperature, 1.0)
    return ListedWords(first, own, word.value_of(first[:, 0]), temperature, marks)


def log_totals(total: Tensor) -> Tensor:
    """Return ln(Z), float64 [R], of int64 [R], Σ q."""
    return (total.double() / TOP_MASS).log()


def logprobs_of_words(
    vocab_size: int,
    logprob_rows: LogprobRows,
    sampled: Tensor,
    words: ListedWords,
    cut: Tensor | None,
    sums: Tensor,
) -> Logprobs:
    """Return the logprobs of rows.

    Args:
        sampled: int64 [R, S].
        cut: int64 [R], the lowest word of each kept set, 0 in a raw mode; None if no set ends.
        sums: int64 [R, 2 + S + C + 1] over all ranks: mass and moment down to the cut, and how many
            words reach each mark and the cut.
    """
    first, own, top, temperature, _ = words
    (total, moment), counts = sums[:, :2].unbind(dim=1), sums[:, 2:]
    log_total = log_totals(total)
    entropies = log_total + LN2 * (moment.double() / total.double())
    cut = (torch.zeros_like(total) if cut is None else cut).unsqueeze(1)
    # Ranks of the N best follow from their own order, except for ties with the last of them. The
    # kept set is a prefix, so no rank in it exceeds its size.
    keys = word.key_of(first)
    rank_in_first = torch.searchsorted(-keys, -keys, right=True)
    rank_in_first = rank_in_first.minimum((first >= cut).sum(dim=1, keepdim=True))
    rank_in_first = torch.where(keys == keys[:, -1:], counts[:, -1:], rank_in_first)

    drawn = sampled.shape[1]
    parts = own[:, :drawn], first[:, : logprob_rows.top], own[:, drawn:]
    shown = torch.cat(parts, dim=1)
    parts = counts[:, :drawn], rank_in_first[:, : logprob_rows.top], counts[:, drawn:-1]
    token_ranks = torch.cat(parts, dim=1)
    logits = word.value_of(shown)
    below = below_top(logits, top.unsqueeze(1), temperature.unsqueeze(1))
    values = torch.where(
        logprob_rows.as_logits.unsqueeze(1),
        logits.double() / temperature.unsqueeze(1),
        below - log_total.unsqueeze(1),
    )
    kept = shown >= cut
    token_ranks = torch.where(kept, token_ranks, vocab_size)

    wanted = torch.arange(logprob_rows.top, device=shown.device) < logprob_rows.top_of.unsqueeze(1)
    asked_for = torch.cat([sampled >= 0, wanted, logprob_rows.chosen >= 0], dim=1)
    has_values = word.decode(first[:, :1])[1] == word.Status.OK
    has_values &= (sampled >= 0).all(dim=1, keepdim=True)
    asked_for &= has_values
    return Logprobs(
        token_ids=word.token_of(shown).where(asked_for, word.NO_TOKEN),
        values=values.where(kept, -torch.inf).where(asked_for, torch.nan),
        ranks=token_ranks.where(asked_for, 0),
        entropies=entropies.where(has_values.squeeze(1), torch.nan),
    )
