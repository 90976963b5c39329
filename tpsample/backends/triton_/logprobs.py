"""Logprobs as Triton launches, a program per row. Twin: `tpsample.backends.torch_.logprobs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpsample.backends.torch_.logprobs import ListedWords, log_totals
from tpsample.backends.triton_.kernels.logprobs import (
    few_words_kernel,
    listed_words_kernel,
    own_words_kernel,
    told_logprobs_kernel,
    weighed_words_kernel,
)
from tpsample.backends.triton_.largest import first_of
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.backends.triton_.tile_table import next_power_of_2
from tpsample.output import Logprobs
from tpsample.request.filters import LogprobRows
from tpsample.request.row_filter import FEW_LOGPROBS, MAX_WEIGHED_WORDS

MOST = 256
"""Words that a program takes at a time. All ids of a vocabulary are told of by plain PyTorch."""


def block_for(count: int) -> int:
    """Return the size of a block for so many numbers; few sizes, because each is a kernel."""
    return FEW_LOGPROBS if count <= FEW_LOGPROBS else MOST


def own_words(shard: dict[str, Any], first: Tensor, token_ids: Tensor) -> Tensor:
    """Return the first words, int64 [R, n], and those of global ids [R, C], at most MOST of each.

    Args:
        shard: the arguments by which a kernel finds the logits.
    """
    (num_rows, count), num_ids = first.shape, token_ids.shape[1]
    words = first.new_empty(num_rows, count + num_ids)
    launch_kernel(
        own_words_kernel,
        (num_rows,),
        **shard,
        first_ptr=first,
        stride_first=first.stride(0),
        ids_ptr=token_ids.contiguous(),
        words_ptr=words,
        count=count,
        num_ids=num_ids,
        BLOCK=block_for(max(count, num_ids)),
        num_warps=1,
    )
    return words


def few_words(
    shard: dict[str, Any], groups: Tensor, size: int, count: int, token_ids: Tensor
) -> Tensor:
    """Return what `own_words` does, with at most FEW_LOGPROBS first words, which it finds itself.

    Args:
        groups: int64 [R, n], the first word of each group of ids; 0 for none.
        size: of a group.
    """
    (num_rows, num_groups), num_ids = groups.shape, token_ids.shape[1]
    words = groups.new_empty(num_rows, count + num_ids)
    launch_kernel(
        few_words_kernel,
        (num_rows,),
        **shard,
        first_ptr=groups.contiguous(),
        ids_ptr=token_ids.contiguous(),
        words_ptr=words,
        count=count,
        num_ids=num_ids,
        num_groups=num_groups,
        MOST=FEW_LOGPROBS,
        GROUP=size,
        GROUPS=next_power_of_2(num_groups),
        num_warps=8,
    )
    return words


def listed_words(temperature: Tensor, logprob_rows: LogprobRows, gathered: Tensor) -> ListedWords:
    """Return the words of all ranks."""
    count, (_, num_rows, width) = max(1, logprob_rows.top), gathered.shape
    gathered, num_own = gathered.contiguous(), width - count
    first = first_of(gathered, count)
    top, shown_temperature = temperature.new_empty(2, num_rows).unbind()
    own, marks = first.new_empty(num_rows, num_own), first.new_empty(num_rows, num_own + 1)
    launch_kernel(
        listed_words_kernel,
        (num_rows,),
        gathered_ptr=gathered,
        first_ptr=first,
        stride_first=first.stride(0),
        temperature_ptr=temperature,
        processed_ptr=logprob_rows.processed.contiguous(),
        own_ptr=own,
        top_ptr=top,
        shown_temperature_ptr=shown_temperature,
        marks_ptr=marks,
        num_sources=gathered.shape[0],
        count=count,
        num_own=num_own,
        BLOCK=block_for(num_own + 1),
        num_warps=1,
    )
    return ListedWords(first, own, top, shown_temperature, marks)


def weighed_words(
    temperature: Tensor, logprob_rows: LogprobRows, first: Tensor, drawn: Tensor, cut: Tensor
) -> tuple[ListedWords, Tensor]:
    """Return `listed_words` and the sums of rows whose first words hold their kept sets."""
    count, (num_rows, num_words), num_drawn = max(1, logprob_rows.top), first.shape, drawn.shape[1]
    top, shown_temperature = temperature.new_empty(2, num_rows).unbind()
    sums = first.new_empty(num_rows, 3 + num_drawn)
    launch_kernel(
        weighed_words_kernel,
        (num_rows,),
        first_ptr=first,
        drawn_ptr=drawn,
        cut_ptr=cut,
        temperature_ptr=temperature,
        top_ptr=top,
        shown_temperature_ptr=shown_temperature,
        sums_ptr=sums,
        num_words=num_words,
        count=count,
        num_drawn=num_drawn,
        BLOCK=MAX_WEIGHED_WORDS,
    )
    return ListedWords(first[:, :count], drawn, top, shown_temperature, sums[:, 2:]), sums


def logprobs_of_words(
    vocab_size: int,
    logprob_rows: LogprobRows,
    sampled: Tensor,
    words: ListedWords,
    cut: Tensor | None,
    sums: Tensor,
) -> Logprobs:
    """Return the logprobs of rows. Logarithms are torch's, so that they are the definition's."""
    first, (num_rows, drawn), chosen = words.first, sampled.shape, logprob_rows.chosen.shape[1]
    log_total = log_totals(sums[:, 0])
    width = drawn + logprob_rows.top + chosen
    token_ids, ranks = first.new_empty(2, num_rows, width).unbind()
    values, entropies = log_total.new_empty(num_rows, width), torch.empty_like(log_total)
    launch_kernel(
        told_logprobs_kernel,
        (num_rows,),
        first_ptr=first,
        stride_first=first.stride(0),
        own_ptr=words.own,
        top_ptr=words.top,
        temperature_ptr=words.temperature,
        sampled_ptr=sampled.contiguous(),
        chosen_ptr=logprob_rows.chosen.contiguous(),
        cut_ptr=cut,
        sums_ptr=sums.contiguous(),
        log_total_ptr=log_total,
        as_logits_ptr=logprob_rows.as_logits.contiguous(),
        top_of_ptr=logprob_rows.top_of.contiguous(),
        token_ptr=token_ids,
        value_ptr=values,
        rank_ptr=ranks,
        entropy_ptr=entropies,
        count=first.shape[1],
        num_drawn=drawn,
        num_top=logprob_rows.top,
        num_chosen=chosen,
        vocab_size=vocab_size,
        BLOCK=block_for(width),
        num_warps=1,
    )
    return Logprobs(token_ids, values, ranks, entropies)
