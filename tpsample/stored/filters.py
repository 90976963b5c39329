"""Sampling from kept sets on vocabulary shards: exact, and no logit leaves its rank.

A row's token is the best score in its kept set. Three ways to it, chosen per row by what the host
knows of the request; all give the token of `tpsample.reference`:

rejection    The first token in descending score that is in the kept set. Whether a token is needs
             only its logit, and the number and the mass of the tokens before it. Exchange 1 gathers
             each rank's 8 best scores; exchange 2 sums, for the 8 best of all, number and mass over
             the shards. If none of the 8 is kept the row takes a second round.
             A sequential top_p after a top_k over 256 renormalises over tokens too many to send:
             between the two exchanges a radix search for the last of the k finds their mass.
top words    Each rank sends its first k tokens of the order; the first k of these are the first k
             of the vocabulary, with which every rank finishes alone. One exchange, for k <= 256:
             rows with top_k and sequential top_p, which renormalises over exactly these tokens,
             and the second round of rows with top_k alone.
threshold    Radix search for the last kept token (`threshold`), then the best score down
             to it. A fixed number of exchanges, whatever the logits: what no other way decides.

Which rows a second round is for, the host reads from the device, the same on every rank because
it follows from summed integers. A captured graph cannot look, so there every row goes by the
threshold alone: what decides any row in a fixed number of rounds needs no first round before it.

Scores restricted to any set are Gumbel-max over that set, so the first member is an exact draw from
the filtered softmax. FlashInfer's sorting-free rejection sampling draws anew instead; here one draw
of noise per token id serves, which makes the result independent of the number of rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample import word
from tpsample.exchange.integers import IntegerExchange
from tpsample.score import score_tokens
from tpsample.stored.kept_set import RowFilters, Way, below_top, candidates, mass_limit, masses
from tpsample.stored.rows import StoredRows, keep_best
from tpsample.stored.threshold import find_cut, find_top_k_cut

BEST_SCORES = 8
"""Candidates of the rejection. On real logits at T = 1 none of 8 was kept for fewer than 0.3 % of
rows with top_p, or with top_k = 50."""


def sample_filtered(
    rows: StoredRows,
    filters: RowFilters,
    integers: IntegerExchange,
    *,
    fixed_rounds: bool = False,
) -> Tensor:
    """The winning score words of filtered rows, int64 [F, num_samples], the same on every rank.

    Collective. A row with a NaN gives a NaN's word and one without an unmasked token gives 0, so
    `word.decode` yields token and status.

    Args:
        fixed_rounds: every row by the threshold; the host reads nothing from the device.
    """
    if fixed_rounds:
        return _by_threshold(rows, filters, integers)
    words = rows.logits.new_zeros(len(filters), len(rows.noise.streams), dtype=torch.int64)
    todo = filters.by_way(filters.first_way)

    for way in (Way.REJECTION, Way.REJECTION_IN_TOP_K):
        if not (index := todo[way]):
            continue
        part, part_filters = rows.select(index), filters.select(index)
        in_top_k = way is Way.REJECTION_IN_TOP_K
        words[index], decided = _by_rejection(part, part_filters, integers, in_top_k=in_top_k)
        for row, done in zip(index, decided.tolist(), strict=True):
            if not done:
                todo[filters.second_way[row]].append(row)
    if index := todo[Way.TOP_WORDS]:
        words[index] = _by_top_words(rows.select(index), filters.select(index), integers)
    if index := todo[Way.THRESHOLD]:
        words[index] = _by_threshold(rows.select(index), filters.select(index), integers)
    return words


def _by_rejection(
    rows: StoredRows, filters: RowFilters, integers: IntegerExchange, *, in_top_k: bool
) -> tuple[Tensor, Tensor]:
    """Words [F, num_samples], and bool [F]: whether they decide the row.

    Args:
        in_top_k: top_p is of the mass of what top_k leaves, not of what min_p leaves.
    """
    samples = len(rows.noise.streams)
    scores, orders = rows.best_scores(BEST_SCORES)
    own = torch.cat([rows.first_words(1), scores.flatten(1), orders.flatten(1)], dim=1)
    every = integers.gather(own)
    top_word = every[:, :, 0].amax(dim=0)
    best = every[:, :, 1:].unflatten(2, (2, samples, BEST_SCORES))  # [W, F, 2, S, 8]
    scores, orders = best.permute(2, 1, 3, 0, 4).flatten(3)  # [F, S, W · 8] each
    scores, orders = keep_best(scores, orders, BEST_SCORES)

    top = word.value_of(top_word)
    cut = find_top_k_cut(rows, filters, top, integers) if in_top_k else torch.zeros_like(top_word)
    marks = orders.flatten(1)
    # ties="keep": only greater logits count against k.
    ranked = torch.where(filters.keep_ties.unsqueeze(1), marks | word.TOKEN_MASK, marks)
    sums = integers.sum(rows.before(marks, ranked, top, filters.log_min_p, cut))
    mass, count, total = sums.split([marks.shape[1], marks.shape[1], 1], dim=1)

    below = below_top(word.value_of(marks), top.unsqueeze(1), rows.temperature.unsqueeze(1))
    member = candidates(marks, below, filters.log_min_p.unsqueeze(1))
    member &= count < filters.top_k.unsqueeze(1)
    member &= mass < mass_limit(total, filters.top_p.unsqueeze(1))
    words = (scores * member.unflatten(1, (samples, BEST_SCORES))).amax(dim=2)
    return _or_nan(words, top_word), (words > 0).all(dim=1) | ~_is_number(top_word)


def _by_top_words(rows: StoredRows, filters: RowFilters, integers: IntegerExchange) -> Tensor:
    """Words [F, num_samples] from the first k tokens of the order."""
    count = max(filters.host_top_k)
    every = integers.gather(rows.first_words(count))  # [W, F, count]
    words = every.transpose(0, 1).flatten(1).topk(count, dim=1).values
    logits = word.value_of(words)

    below = below_top(logits, logits[:, :1], rows.temperature.unsqueeze(1))
    kept = candidates(words, below, filters.log_min_p.unsqueeze(1))
    kept &= torch.arange(count, device=words.device) < filters.top_k.unsqueeze(1)
    mass = masses(below) * kept
    total = mass.sum(dim=1, keepdim=True)
    kept &= mass.cumsum(dim=1) - mass < mass_limit(total, filters.top_p.unsqueeze(1))

    ids = word.token_of(words)
    best = [
        (word.pack(score_tokens(logits, ids, rows.noise, sample), ids) * kept).amax(dim=1)
        for sample in range(len(rows.noise.streams))
    ]
    return _or_nan(torch.stack(best, dim=1), words[:, 0])


def _by_threshold(rows: StoredRows, filters: RowFilters, integers: IntegerExchange) -> Tensor:
    """Words [F, num_samples]: the best scores down to the last kept token."""
    top_word = integers.gather(rows.first_words(1)).amax(dim=0).squeeze(1)
    cut = find_cut(rows, filters, word.value_of(top_word), integers)
    best = integers.gather(rows.best_kept(cut.word)).amax(dim=0)
    return _or_nan(best, top_word)


def _is_number(top_word: Tensor) -> Tensor:
    """Whether the row's first order word is of a logit that can be drawn."""
    key = word.key_of(top_word)
    return (key > word.KEY_MINUS_INF) & (key != word.KEY_NAN)


def _or_nan(words: Tensor, top_word: Tensor) -> Tensor:
    """`words` [F, S]; a NaN's word in rows whose first order word is a NaN."""
    nan = word.key_of(top_word) == word.KEY_NAN
    return torch.where(nan.unsqueeze(1), word.KEY_NAN << word.TOKEN_BITS, words)
