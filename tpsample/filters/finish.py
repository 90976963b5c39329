"""Finishes rows whose logits the ranks stored: filters, logprobs, logprobs of prompts."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsample.backends import room_of
from tpsample.backends.backend import Backend
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.tensors import ordinary_tensors
from tpsample.core.vocab_shard import VocabShard
from tpsample.filters.by_cuts import own_first_words, sample_by_cuts
from tpsample.filters.kept_sets import Cut
from tpsample.filters.logprobs import (
    find_logprobs,
    logprobs_of_sets,
    own_words,
    words_of_drawn,
    words_of_first,
)
from tpsample.filters.sample import own_candidates, sample_filtered
from tpsample.output import Logprobs
from tpsample.ranks.ranks import Ranks
from tpsample.request.batch import SamplingBatch
from tpsample.request.filters import LogprobRows, RowFilters, lists_all
from tpsample.request.params import SamplingParams
from tpsample.request.plan import BatchPlan, BatchView, FilteredWords
from tpsample.request.step import Step
from tpsample.settings import Settings


def shard_logits(step: Step, shard: VocabShard, backend: str) -> ShardLogits:
    """Return the logits that a step stored on this rank, with the passes of its backend."""
    assert step.logits is not None
    found = step.found
    if found is not None and found.store is not None:
        found = found._replace(store=partial(found.store, step))
    return room_of(backend).passes.of(
        step.logits,
        step.batch,
        step.noise,
        first_id=shard.start,
        found=found,
        tile_words=step.tile_words,
    )


def candidates_of(rows: ShardLogits, step: Step, words: Tensor) -> list[Tensor]:
    """Return the integers that this rank sends with its words, for filters and logprobs.

    Args:
        words: int64 [num_samples · B], the rank's best words.
    """
    plan, candidates = step.batch.plan, []
    if plan.filters is not None:
        filtered = rows.select(plan.filtered_places)
        if plan.by_cuts:
            candidates.append(own_first_words(filtered, plan.filters))
        else:
            candidates += own_candidates(filtered, plan.filters, may_read=step.batch.may_read)
    if plan.logprobs is not None and plan.logprobs.unfiltered:
        best = words.view(-1, step.batch.rows).T[plan.logprobs.row_index]
        candidates.append(
            own_words(_rows_in_mode(rows, plan.logprobs), plan.logprobs, word.decode(best)[0])
        )
    return candidates


class Filtered(NamedTuple):
    """The results for the filtered rows of a step, before its tokens are written.

    Attributes:
        words: the score words of the rows; None if no row has filters.
        cut: where the kept sets of the rows end, if that was searched.
        of_logprobs: the `own_words` of all ranks, if they came with the words of the step. Each
            rank then sent its own best tokens in place of the drawn ones.
        first: first words of the rows that ask for logprobs, if these were found.
    """

    words: FilteredWords | None = None
    cut: Cut | None = None
    of_logprobs: Tensor | None = None
    first: Tensor | None = None


def draw_filtered(
    rows: ShardLogits, step: Step, ranks: Ranks, gathered: list[Tensor] | None = None
) -> Filtered:
    """Draw the tokens of filtered rows. Collective.

    Args:
        rows: the logits of the rows that `step.batch.plan` stores.
        gathered: the `candidates_of` all ranks, if they came with the words.
    """
    plan, reads = step.batch.plan, step.batch.may_read
    filters, logprob_rows, of_logprobs = plan.filters, plan.logprobs, None
    if gathered is not None and logprob_rows is not None and logprob_rows.unfiltered:
        *gathered, of_logprobs = gathered
    if filters is None:
        return Filtered(of_logprobs=of_logprobs)
    arguments, cut, first = (rows.select(plan.filtered_places), filters, ranks), None, None
    if plan.by_cuts:
        own, sets = None if gathered is None else gathered[0], plan.kept_cap is not None
        number = 1 if logprob_rows is None else max(1, logprob_rows.top)
        drawn, cut = sample_by_cuts(
            *arguments, sets=sets, number=number, may_read=reads, gathered=own
        )
    else:
        own_first = None
        if logprob_rows is not None and _may_share_first_words(rows, filters, reads, gathered):
            first = rows.first_words(max(filters.demand.first, logprob_rows.top))
            own_first, first = first[plan.filtered_places], first[logprob_rows.places]
        drawn = sample_filtered(*arguments, may_read=reads, gathered=gathered, first=own_first)
    assert plan.filtered_place is not None
    return Filtered(FilteredWords(drawn, plan.filtered_place), cut, of_logprobs, first)


def logprobs_of(
    rows: ShardLogits,
    batch: BatchView,
    ranks: Ranks,
    token_ids: Tensor,
    filtered: Filtered,
) -> Logprobs:
    """Return the logprobs of the rows that ask for them. Collective.

    Args:
        rows: the logits of the rows that `batch.plan` stores.
        token_ids: int64 [B] or [B, num_samples], the tokens drawn; -1 in a row without.
        filtered: what is known of the filtered rows.
    """
    logprob_rows, cut, gathered = batch.plan.logprobs, filtered.cut, filtered.of_logprobs
    assert logprob_rows is not None
    all_rows = lists_all(logprob_rows.row_list, batch.rows)
    drawn = token_ids if all_rows else token_ids[logprob_rows.row_index]
    sampled = drawn.view(len(logprob_rows.row_list), -1)
    # A row that asks for nothing is reported as one without a token.
    if logprob_rows.asks is not None:
        sampled = sampled.where(logprob_rows.asks.unsqueeze(1), word.NO_TOKEN)
    shown = _rows_in_mode(rows, logprob_rows)
    among = cut if cut is not None and _first_words_suffice(cut, batch.plan) else None
    of_sets = logprob_rows.asks is None and all(logprob_rows.processed_list)
    if among is not None and among.none_greedy and of_sets:
        logprobs = logprobs_of_sets(shown, logprob_rows, sampled, among)
    else:
        if gathered is not None:
            gathered = words_of_drawn(gathered, logprob_rows, sampled)
        elif among is not None and rows.logits is rows.raw:
            gathered = words_of_first(among, logprob_rows)
        ends = None if cut is None or logprob_rows.filters is None else cut.words_of_logprobs
        arguments = shown, logprob_rows, sampled, ranks
        known: dict[str, Any] = {"ends": ends, "gathered": gathered, "first": filtered.first}
        logprobs = find_logprobs(*arguments, may_read=batch.may_read, **known)
    if not all_rows:
        none = Logprobs.none(batch.rows, logprobs.token_ids.shape[1], token_ids.device)
        logprobs = none.put(logprob_rows.row_index, logprobs)
    logprobs.num_chosen = logprob_rows.chosen.shape[1]
    return logprobs


def _may_share_first_words(
    rows: ShardLogits, filters: RowFilters, reads: bool, gathered: list[Tensor] | None
) -> bool:
    """Return whether one pass may find the first words of both filters and logprobs.

    It saves launches in fixed rounds. Where the host reads, filters select their own rows.
    """
    if reads or gathered is not None or True not in filters.by_first_words:
        return False
    return rows.logits is rows.raw and rows.rough is None


def _first_words_suffice(cut: Cut, plan: BatchPlan) -> bool:
    """Return whether logprobs need only the first words of the cut, of exactly its rows."""
    logprob_rows, filters, first = plan.logprobs, plan.filters, cut.first
    assert logprob_rows is not None and filters is not None
    if first is None or cut.drawn is None or logprob_rows.chosen.shape[1]:
        return False
    return logprob_rows.row_list == filters.row_list and logprob_rows.top <= first.shape[1]


def _rows_in_mode(rows: ShardLogits, logprob_rows: LogprobRows) -> ShardLogits:
    """Return the rows that ask for logprobs, with raw or processed logits as their modes say."""
    return rows.select(logprob_rows.places).shown(logprob_rows.processed).as_exact()


@lru_cache(16)
@ordinary_tensors
def _asking(rows: int, top: int, vocab_size: int, device: torch.device) -> BatchView:
    """Return a view of rows that ask for raw logprobs. It is shared, so nobody writes to it.

    The rows draw nothing, so neither seeds nor positions matter.
    """
    asking = SamplingParams(temperature=0.0, seed=0, logprobs=top)
    batch = SamplingBatch.from_params([asking] * rows, vocab_size=vocab_size, device=device)
    return batch._view_of(rows)


def prompt_logprobs(
    local: Backend, hidden_states: Tensor, token_ids: Tensor, top: int, settings: Settings
) -> Logprobs:
    """Return raw logprobs of the tokens of a prompt, `max_rows` at a time. Collective.

        value[l] = x_l[t_l] - max x_l - ln(Σ e^(x_l - max x_l)),   t_l the token that came after l

    The local step stores the logits of a chunk, [max_rows, V_local] on a rank, and samples nothing.

    Args:
        local: the local step.
        hidden_states: [L, D].
        token_ids: int64 [L], each in [0, V).
        top: N, how many of the most likely tokens to report beside the one that came.

    Returns:
        [L, 1 + N], equal on every rank.
    """
    chunk, no_words = settings.max_rows, token_ids.new_empty(0)
    logprobs = Logprobs.none(len(token_ids), 1 + top, token_ids.device)
    for start in range(0, len(token_ids), chunk):
        part = slice(start, start + chunk)
        came = token_ids[part]
        batch = _asking(len(came), top, settings.vocab_size, token_ids.device)
        assert batch.plan.logprobs is not None
        step = local.prepare(hidden_states[part], batch, batch.seed, num_samples=0)
        local.best_words(step, no_words)
        rows = shard_logits(step, settings.shard, settings.backend)
        sampled = came.unsqueeze(1)
        arguments = rows, batch.plan.logprobs, sampled, settings.ranks
        logprobs.put(part, find_logprobs(*arguments, may_read=False))  # these rows have no filters
    return logprobs
