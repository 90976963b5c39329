"""The passes over stored logits as Triton launches, a program for some blocks of a row.

A launch reads the logits once, where its twin in `tpsample.backends.torch_.passes` makes tens of
tensors of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.backends.torch_ import logprobs as plain
from tpsample.backends.torch_.logprobs import ListedWords, log_totals
from tpsample.backends.torch_.passes import (
    GROUP,
    SetOfFirst,
    ShardLogits,
    Verdict,
)
from tpsample.backends.triton_.kernels.best_scores import (
    before_kernel,
    best_scores_kernel,
    first_kept_kernel,
    merge_best_kernel,
)
from tpsample.backends.triton_.kernels.cuts import last_cut_kernel
from tpsample.backends.triton_.kernels.logprobs import (
    few_words_kernel,
    listed_words_kernel,
    own_words_kernel,
    told_logprobs_kernel,
    weighed_words_kernel,
)
from tpsample.backends.triton_.kernels.order import group_first_kernel, group_words_kernel
from tpsample.backends.triton_.kernels.sums import (
    best_kept_kernel,
    least_of_mass_kernel,
    least_word_kernel,
    mass_kernel,
    spread_kernel,
    top_kernel,
    top_words_kernel,
)
from tpsample.backends.triton_.largest import MOST, Start, first_of, largest
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.backends.triton_.tile_table import Gpu, next_power_of_2
from tpsample.core.machine import interpreted
from tpsample.core.masses import ABOUT_ERROR
from tpsample.core.order import ABOVE_ALL, DIGIT_BITS
from tpsample.core.row_noise import RowNoise, safe_temperature
from tpsample.output import Logprobs
from tpsample.request.filters import LogprobRows, Thresholds
from tpsample.request.row_filter import FEW_LOGPROBS, MAX_TOP_WORDS, MAX_WEIGHED_WORDS

BLOCK = 1024 if interpreted() else 2048
NUM_WARPS = 8
"""Logits of a block, and warps of a program: 8 logits a thread, so that 64-bit numbers find
registers."""
PROGRAMS_PER_SM, MOST_BLOCKS = 5, 8
"""A launch has about so many programs per SM, and a program takes at most so many blocks. Each
program computes the numbers of its row and adds up its threads, so fewer programs do less."""
MOST_GROUPS = 4096
"""Groups among which a kernel finds the best ones itself, where it takes few of them."""
MOST_LOGPROBS = 256
"""Most words of a row that a program reports. Plain PyTorch reports more, such as a vocabulary."""


class TritonShardLogits(ShardLogits):
    """`ShardLogits` on a GPU, or in the interpreter."""

    backend = "triton"
    mass_error = ABOUT_ERROR

    @staticmethod
    def temperature_of(noise: RowNoise) -> Tensor:
        return noise.temperature  # each kernel makes it safe for itself

    def count_of(self, size: int) -> int:
        """Return how many blocks or groups of a size the shard has; the first one begins where the
        group of four ids of its first id does. An empty shard has none: nothing writes there."""
        width = self.logits.shape[1]
        return -(-(self.first_id % 4 + width) // size) if width else 0

    def blocks_each(self, rows: int) -> int:
        """Return how many blocks a program takes where each of these rows has programs."""
        blocks = rows * self.count_of(BLOCK)
        return max(1, min(MOST_BLOCKS, blocks // programs_at_once(self.logits.device)))

    @cached_property
    def programs(self) -> tuple[int, int]:
        """How many programs a row has, and how many blocks each of them takes."""
        blocks_each = self.blocks_each(self.logits.shape[0])
        return -(-self.count_of(BLOCK) // blocks_each), blocks_each

    def launch_programs(self, kernel: Any, **arguments: Any) -> None:
        """Launch some programs per row, which take several blocks each; none of an empty shard."""
        programs, blocks_each = self.programs
        arguments |= {"blocks_each": blocks_each}
        self._launch(kernel, programs, arguments)

    def launch(self, kernel: Any, **arguments: Any) -> None:
        """Launch one program per row and block; none of an empty shard."""
        self._launch(kernel, self.count_of(BLOCK), arguments)

    def _launch(self, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        """Launch so many programs per row, if there are any."""
        if programs:
            arguments |= self.shard_arguments
            arguments |= _BLOCKS
            launch_kernel(kernel, (self.logits.shape[0], programs), arguments)

    @cached_property
    def shard_arguments(self) -> dict[str, Any]:
        """The arguments by which a kernel finds the logits."""
        return {
            "logits_ptr": self.logits,
            "stride_logits": self.logits.stride(0),
            "vocab_start": self.first_id,
            "lead": self.first_id % 4,
            "width": self.logits.shape[1],
        }

    def noise_arguments(self) -> dict[str, Any]:
        """Return the arguments by which a kernel scores."""
        return {
            "seed_ptr": self.noise.seed,
            "position_ptr": self.noise.positions,
            "temperature_ptr": self.noise.temperature,
            "num_samples": self.noise.num_samples,
        }

    def first_words(self, count: int) -> Tensor:
        rows = self.logits.shape[0]
        if not self.logits.shape[1]:
            return self.logits.new_zeros(rows, count, dtype=torch.int64)
        first, size = self._first_of_groups()
        if count == 1:
            return first.amax(dim=1, keepdim=True)
        if count > MOST:  # one program does not put so many in order, so all groups are taken
            start = Start(first.new_ones(rows), first.new_zeros(rows, dtype=torch.int32))
            words = self._words_of_groups(first, size, start, torch.zeros)
            words = F.pad(words, (0, max(0, count - words.shape[1])))
            return words.topk(count, dim=1).values
        start = Start(first.new_empty(rows), first.new_empty(rows, dtype=torch.int32))
        chosen = largest(first, count, start=start, ordered=False)
        words = self._words_of_groups(chosen, size, start, torch.empty)
        return largest(words, count, start.number)

    def _first_of_groups(self) -> tuple[Tensor, int]:
        """Return the first order word of each group of ids, and how many ids a group has. The words
        are int64 [F, groups], 0 in rows that are done. The tiles of the local step are groups, if
        their words are known."""
        if self.tile_words is not None:
            return self.of_undone(self.tile_words.first), self.tile_words.size
        groups = self.count_of(GROUP)
        first = self.logits.new_empty(self.logits.shape[0], groups, dtype=torch.int64)
        self.launch(group_first_kernel, words_ptr=first, groups=groups, GROUP=GROUP)
        return self.of_undone(first), GROUP

    def _words_of_groups(
        self, chosen: Tensor, size: int, start: Start, made: Callable[..., Tensor]
    ) -> Tensor:
        """Return the order words of groups down to a least one, [F, groups · size], in any order.

        Args:
            chosen: int64 [F, groups], a word of each group, or 0.
            size: of a group.
            made: makes the memory; the first `start.number` words of a row are written.
        """
        rows, groups = chosen.shape
        words = made(rows, groups * size, dtype=torch.int64, device=chosen.device)
        launch_kernel(
            group_words_kernel,
            (groups, rows),
            **self.shard_arguments,
            first_ptr=chosen,
            least_ptr=start.least,
            words_ptr=words,
            number_ptr=start.number,
            GROUP=size,
        )
        return words

    def first_of(self, gathered: Tensor, count: int) -> Tensor:
        return first_of(gathered, count)

    def best_scores(self, count: int) -> Tensor:
        if not self.logits.shape[1]:
            return super().best_scores(count)
        assert self.tile_words is not None  # every step that samples writes them
        first, best, size = self.tile_words
        first, best = self.of_undone(first), self.of_undone(best)
        rows, samples, groups = best.shape
        if groups > MOST_GROUPS:
            best = largest(best.view(rows * samples, groups), count, ordered=False)
            groups = count
        scores = best.new_empty(rows, 1 + 2 * samples * count)
        launch_kernel(
            best_scores_kernel,
            (samples, rows),
            **self.shard_arguments,
            **self.noise_arguments(),
            group_ptr=best,
            first_ptr=first,
            best_scores_ptr=scores,
            num_groups=groups,
            blocks=first.shape[1],
            COUNT=count,
            GROUP=size,
            GROUPS=next_power_of_2(groups),
            BLOCKS=next_power_of_2(max(1, first.shape[1])),
        )
        return scores

    def merged(self, gathered: Tensor, count: int) -> Tensor:
        sources, rows, width = gathered.shape
        if sources == 1:
            return gathered.squeeze(0).contiguous()
        best = gathered.new_empty(rows, width)
        launch_kernel(
            merge_best_kernel,
            (rows,),
            gathered_ptr=gathered.contiguous(),
            best_scores_ptr=best,
            num_rows=rows,
            num_samples=self.noise.num_samples,
            num_sources=sources,
            COUNT=count,
            WORDS=next_power_of_2(sources * count),
        )
        return best

    def before(self, best: Tensor, thresholds: Thresholds, count: int) -> Tensor:
        sums = best.new_zeros(best.shape)
        self.launch_programs(
            before_kernel,
            temperature_ptr=self.temperature,
            least_of_total_ptr=thresholds.least_of_total,
            keep_ties_ptr=thresholds.keep_ties,
            row_done_ptr=self.done,
            best_scores_ptr=best,
            sums_ptr=sums,
            num_samples=self.noise.num_samples,
            counts=int(thresholds.counts),
            COUNT=count,
        )
        return sums

    def first_kept(self, best: Tensor, sums: Tensor, thresholds: Thresholds, count: int) -> Verdict:
        words = best.new_empty(best.shape[0], self.noise.num_samples)
        decided = best.new_empty(best.shape[0], dtype=torch.bool)
        top = self.temperature.new_empty(best.shape[0])
        launch_kernel(
            first_kept_kernel,
            (best.shape[0],),
            most_ptr=thresholds.most,
            share_ptr=thresholds.share,
            least_ptr=thresholds.least,
            best_scores_ptr=best,
            sums_ptr=sums.contiguous(),
            words_ptr=words,
            decided_ptr=decided,
            top_ptr=top,
            num_samples=self.noise.num_samples,
            COUNT=count,
        )
        return Verdict(words, decided, top)

    def best_of_first(self, first: Tensor, thresholds: Thresholds) -> Tensor:
        words = first.new_empty(first.shape[0], self.noise.num_samples)
        self._draw_of_first(first, thresholds, words)
        return words

    def set_of_first(self, first: Tensor, thresholds: Thresholds) -> SetOfFirst:
        words, drawn = first.new_empty(2, first.shape[0], self.noise.num_samples).unbind()
        cut, held = first.new_empty(first.shape[0]), first.new_empty(first.shape[0], 2)
        kept_set = SetOfFirst(words, cut, held, self.temperature.new_empty(first.shape[0]), drawn)
        self._draw_of_first(first, thresholds, *kept_set)
        return kept_set

    def _draw_of_first(
        self, first: Tensor, thresholds: Thresholds, words: Tensor, *of_sets: Tensor | None
    ) -> None:
        """Write `best_of_first`, and where there is memory for it the rest of `set_of_first`."""
        count = first.shape[1]
        cut, held, top, drawn = of_sets or (None, None, None, None)
        launch_kernel(
            top_words_kernel,
            (first.shape[0],),
            first_ptr=first.contiguous(),
            **self.noise_arguments(),
            most_ptr=thresholds.most,
            share_ptr=thresholds.share,
            least_ptr=thresholds.least,
            least_of_total_ptr=thresholds.least_of_total,
            total_ptr=None if thresholds.total is None else thresholds.total.contiguous(),
            words_ptr=words,
            cut_ptr=cut,
            held_ptr=held,
            top_ptr=top,
            drawn_ptr=drawn,
            count=count,
            BLOCK=MAX_TOP_WORDS if count <= MAX_TOP_WORDS else MAX_WEIGHED_WORDS,
        )

    def least_word(self, y: Tensor, temperature: Tensor) -> Tensor:
        words = torch.empty_like(self.largest, dtype=torch.int64)
        launch_kernel(
            least_word_kernel,
            (words.shape[0],),
            temperature_ptr=temperature,
            top_ptr=self.largest.contiguous(),
            y_ptr=y,
            words_ptr=words,
        )
        return words

    def top_of(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        sources, rows, _ = gathered.shape
        words, top = gathered.new_empty(rows), self.temperature.new_empty(rows)
        launch_kernel(
            top_kernel,
            (rows,),
            gathered_ptr=gathered,
            stride_source=gathered.stride(0),
            stride_row=gathered.stride(1),
            words_ptr=words,
            top_ptr=top,
            num_sources=sources,
        )
        return words, top

    def last_cut(self, least: Tensor, *, of_greedy: Tensor | None = None) -> Tensor:
        least = least.contiguous()
        cut = torch.empty_like(least)
        launch_kernel(
            last_cut_kernel,
            (cut.shape[0],),
            least_ptr=least,
            of_greedy_ptr=least if of_greedy is None else of_greedy.contiguous(),
            keeps_greedy=int(of_greedy is None),
            temperature_ptr=self.noise.temperature,
            top_ptr=self.top,
            cut_ptr=cut,
        )
        return cut

    def best_kept(self, cut: Tensor) -> Tensor:
        return self.launch_best_kept(cut, _no_search(cut), weighs=False)

    def best_and_mass(self, cut: Tensor) -> Tensor:
        return self.launch_best_kept(cut, _no_search(cut), weighs=True)

    def launch_best_kept(
        self, cut: Tensor | None, search: dict[str, Any], *, weighs: bool
    ) -> Tensor:
        """Return `best_kept` or, if it `weighs`, `best_and_mass`.

        Without a cut the kernel searches it, and writes it into one more column.

        Args:
            search: the arguments of the kernel for its search.
        """
        columns, searches = self.noise.num_samples + 2 * weighs, int(cut is None)
        rows = self.logits.shape[0]
        best = self.logits.new_zeros(rows, columns + searches, dtype=torch.int64)
        cut = best[:, columns] if cut is None else cut
        self.launch_programs(
            best_kept_kernel,
            **self.noise_arguments(),
            top_ptr=self.top,
            row_done_ptr=self.done,
            searches=searches,
            **search,
            cut_ptr=cut,
            stride_cut=cut.stride(0),
            best_kept_ptr=best,
            WEIGHS=weighs,
            DIGIT_BITS=DIGIT_BITS,
        )
        return best

    def mass_from(self, cut: Tensor) -> Tensor:
        return self.weigh(cut, moments=False)[:, 0]

    def held_from(self, cut: Tensor) -> Tensor:
        return self.weigh(cut, cut.unsqueeze(1), moments=False)

    def weigh(
        self, cut: Tensor | None, marks: Tensor | None = None, *, moments: bool = True
    ) -> Tensor:
        rows = self.logits.shape[0]
        if marks is None:
            marks = self.logits.new_empty(rows, 0, dtype=torch.int64)
        sums = marks.new_zeros(rows, 1 + moments + marks.shape[1])
        self.launch_programs(
            mass_kernel,
            temperature_ptr=self.temperature,
            top_ptr=self.top,
            cut_ptr=cut,
            marks_ptr=marks.contiguous(),
            sums_ptr=sums,
            num_marks=marks.shape[1],
            MOMENTS=moments,
        )
        return sums

    def least_of_mass(self, limit: Tensor) -> Tensor:
        least = torch.full_like(limit, ABOVE_ALL)
        self.launch(
            least_of_mass_kernel,
            temperature_ptr=self.temperature,
            top_ptr=self.top,
            limit_ptr=limit,
            words_ptr=least,
        )
        return least

    def spread(self) -> Tensor:
        sums = self.logits.new_zeros(self.logits.shape[0], 4, dtype=torch.int64)
        self.launch(spread_kernel, top_ptr=self.top, sums_ptr=sums)
        return sums

    def own_words(self, count: int, token_ids: Tensor, first: Tensor | None = None) -> Tensor:
        num_rows, num_ids = token_ids.shape
        if not self.logits.shape[1] or max(count, num_ids) > MOST_LOGPROBS:
            return super().own_words(count, token_ids, first)
        words = token_ids.new_empty(num_rows, count + num_ids)
        arguments = self.shard_arguments | {
            "ids_ptr": token_ids.contiguous(),
            "words_ptr": words,
            "count": count,
            "num_ids": num_ids,
        }
        if first is None and count <= FEW_LOGPROBS:
            groups, size = self._first_of_groups()
            num_groups = groups.shape[1]
            if num_groups <= MOST_GROUPS:
                launch_kernel(
                    few_words_kernel,
                    (num_rows,),
                    **arguments,
                    first_ptr=groups.contiguous(),
                    num_groups=num_groups,
                    MOST=FEW_LOGPROBS,
                    GROUP=size,
                    GROUPS=next_power_of_2(num_groups),
                    num_warps=8,
                )
                return words
        first = self.first_words(count) if first is None else first[:, :count]
        launch_kernel(
            own_words_kernel,
            (num_rows,),
            **arguments,
            first_ptr=first,
            stride_first=first.stride(0),
            BLOCK=block_for(max(count, num_ids)),
            num_warps=1,
        )
        return words

    def listed_words(self, logprob_rows: LogprobRows, gathered: Tensor) -> ListedWords:
        count, (num_sources, num_rows, width) = max(1, logprob_rows.top), gathered.shape
        if width >= MOST_LOGPROBS:
            return plain.listed_words(safe_temperature(self.temperature)[0], logprob_rows, gathered)
        gathered, num_own = gathered.contiguous(), width - count
        first = first_of(gathered, count)
        top, shown_temperature = self.temperature.new_empty(2, num_rows).unbind()
        own, marks = first.new_empty(num_rows, num_own), first.new_empty(num_rows, num_own + 1)
        launch_kernel(
            listed_words_kernel,
            (num_rows,),
            gathered_ptr=gathered,
            first_ptr=first,
            stride_first=first.stride(0),
            temperature_ptr=self.temperature,
            processed_ptr=logprob_rows.processed.contiguous(),
            own_ptr=own,
            top_ptr=top,
            shown_temperature_ptr=shown_temperature,
            marks_ptr=marks,
            num_sources=num_sources,
            count=count,
            num_own=num_own,
            BLOCK=block_for(num_own + 1),
            num_warps=1,
        )
        return ListedWords(first, own, top, shown_temperature, marks)

    def weighed_words(
        self, logprob_rows: LogprobRows, first: Tensor, drawn: Tensor, cut: Tensor
    ) -> tuple[ListedWords, Tensor]:
        count, (num_rows, num_drawn) = max(1, logprob_rows.top), drawn.shape
        if count + num_drawn >= MOST_LOGPROBS:
            return super().weighed_words(logprob_rows, first, drawn, cut)
        top, shown_temperature = self.temperature.new_empty(2, num_rows).unbind()
        sums = first.new_empty(num_rows, 3 + num_drawn)
        launch_kernel(
            weighed_words_kernel,
            (num_rows,),
            first_ptr=first,
            drawn_ptr=drawn,
            cut_ptr=cut,
            temperature_ptr=self.temperature,
            top_ptr=top,
            shown_temperature_ptr=shown_temperature,
            sums_ptr=sums,
            num_words=first.shape[1],
            count=count,
            num_drawn=num_drawn,
            BLOCK=MAX_WEIGHED_WORDS,
        )
        return ListedWords(first[:, :count], drawn, top, shown_temperature, sums[:, 2:]), sums

    def logprobs_of_words(
        self,
        logprob_rows: LogprobRows,
        sampled: Tensor,
        words: ListedWords,
        cut: Tensor | None,
        sums: Tensor,
    ) -> Logprobs:
        first = words.first
        if first.shape[1] + words.own.shape[1] >= MOST_LOGPROBS:
            return super().logprobs_of_words(logprob_rows, sampled, words, cut, sums)
        (num_rows, num_drawn), num_chosen = sampled.shape, logprob_rows.chosen.shape[1]
        width = num_drawn + logprob_rows.top + num_chosen
        log_total = log_totals(sums[:, 0])  # torch's logarithms are those of the definition
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
            num_drawn=num_drawn,
            num_top=logprob_rows.top,
            num_chosen=num_chosen,
            vocab_size=self.vocab_size,
            BLOCK=block_for(width),
            num_warps=1,
        )
        return Logprobs(token_ids, values, ranks, entropies)


def block_for(count: int) -> int:
    """Return the size of a block for so many words; there are two, because each is a kernel."""
    return FEW_LOGPROBS if count <= FEW_LOGPROBS else MOST_LOGPROBS


_BLOCKS = {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
_OF_SEARCH = "bins_ptr", "prefix_ptr", "reached_ptr", "limit_ptr", "keep_ties_ptr"
_OF_ENDS = "least_ptr", "of_greedy_ptr"


def _no_search(cut: Tensor) -> dict[str, Any]:
    """Return the arguments of a launch without a search, whose rows know where their sets end.

    The kernel is that of a search, too, so it is given tensors. It does not read them.
    """
    tensors = dict.fromkeys((*_OF_SEARCH, *_OF_ENDS), cut)
    numbers = ("shares", "keeps_greedy", "num_rows", "num_sources", "place")
    return {**tensors, "share_ptr": cut.view(torch.float64), **dict.fromkeys(numbers, 0)}


@cache
def programs_at_once(device: torch.device) -> int:
    """Return how many programs a launch needs to keep a GPU busy; in the interpreter few."""
    if device.type != "cuda":
        return PROGRAMS_PER_SM
    return PROGRAMS_PER_SM * Gpu.of(device).num_sms
