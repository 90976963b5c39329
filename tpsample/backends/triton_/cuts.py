"""Where the kept sets of stored rows end, as Triton launches; see `tpsample.backends.torch_.cuts`.

For a radix search kernels make words and masses again from the logits, because reading two words of
64 bits per token would take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tpsample.backends.torch_.cuts import Cuts, EmptyDigits, LastDigits, OtherEnds, SetSizes
from tpsample.backends.torch_.logprobs import log_totals
from tpsample.backends.triton_.kernels.bins import (
    bin_kernel,
    cut_kernel,
    list_end_kernel,
    words_kernel,
)
from tpsample.backends.triton_.kernels.cuts import listed_sets_kernel, set_sizes_kernel
from tpsample.backends.triton_.kernels.digits import digit_kernel, last_digit_kernel
from tpsample.backends.triton_.largest import in_order
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.backends.triton_.passes import BLOCK, TritonShardLogits
from tpsample.backends.triton_.tile_table import next_power_of_2
from tpsample.core.order import BINS, DIGIT_BITS, DIGITS, Search, tokens_per_mass
from tpsample.core.word import NO_TOKEN

SET_BLOCK = 256
"""Listed tokens of a program."""


@dataclass(frozen=True)
class TritonCuts(Cuts):
    """`Cuts` on a GPU, or in the interpreter."""

    rows: TritonShardLogits

    def empty_digits(self, rounds: int, *, mass: bool) -> Sequence[EmptyDigits]:
        rows, dtype = self.rows.logits.shape[0], torch.int64 if mass else torch.int32
        count, words = rounds * rows, 3 * torch.int64.itemsize // dtype.itemsize
        # One launch fills the memory of all rounds.
        memory = self.rows.logits.new_zeros(count * (DIGITS + words), dtype=dtype)
        bins, searches = memory.split_with_sizes([count * DIGITS, count * words])
        numbers = searches.view(torch.int64).view(3 * rounds, rows).unbind()
        return [
            EmptyDigits(round_bins, Search(*numbers[3 * index : 3 * index + 3]))
            for index, round_bins in enumerate(bins.view(rounds, rows, DIGITS).unbind())
        ]

    def digits(
        self,
        search: Search,
        before: Tensor | None,
        shift: int,
        share: Tensor | None = None,
        empty: EmptyDigits | None = None,
        *,
        mass: bool,
        least: Tensor | None = None,
    ) -> tuple[Search, Tensor]:
        if not self.rows.logits.shape[1]:
            return super().digits(search, before, shift, share, empty, mass=mass, least=least)
        bins, found = self.empty_digits(1, mass=mass)[0] if empty is None else empty
        # Where masses have no shares, other numbers are not read, so that both are one kernel.
        shares = search.limit.view(torch.float64) if share is None else share
        self.rows.launch_programs(
            digit_kernel,
            temperature_ptr=self.rows.temperature,
            top_ptr=self.rows.top,
            row_done_ptr=self.rows.done,
            before_ptr=bins if before is None else before.contiguous(),
            prefix_ptr=search.prefix,
            reached_ptr=search.reached,
            limit_ptr=search.limit.contiguous(),
            share_ptr=shares if mass else None,
            shares=int(share is not None),
            has_digit=int(before is not None),
            least_ptr=search.prefix if least is None else least.contiguous(),
            bins_ptr=bins,
            next_prefix_ptr=found.prefix,
            next_reached_ptr=found.reached,
            next_limit_ptr=found.limit,
            shift=shift,
            MASS=mass,
            DIGIT_BITS=DIGIT_BITS,
        )
        return (search if before is None else found), bins

    def sums_of_bins(self, cut: Tensor | None) -> Tensor:
        rows, counted = self.rows.logits.shape[0], cut is None
        dtype = torch.int32 if counted else torch.int64
        bins = self.rows.logits.new_zeros(rows, BINS + (not counted), dtype=dtype)
        self.rows.launch(
            bin_kernel,
            temperature_ptr=self.rows.temperature,
            top_ptr=self.rows.top,
            cut_ptr=cut,
            bins_ptr=bins,
        )
        return bins

    def words_from(self, cut: Tensor, count: int) -> Tensor:
        return in_order(self._listed(count, cut_ptr=cut)[:, 1:])

    def list_end(
        self, bins: Tensor, total: Tensor, share: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        cut, room = total.new_empty(2, total.shape[0]).unbind()
        launch_kernel(
            list_end_kernel,
            (total.shape[0],),
            bins_ptr=bins,
            stride_bins=bins.stride(0),
            total_ptr=total,
            stride_total=total.stride(0),
            share_ptr=share,
            temperature_ptr=self.rows.temperature,
            top_ptr=self.rows.top,
            per_mass_ptr=tokens_per_mass(bins.device),
            cut_ptr=cut,
            room_ptr=room,
            number=number,
            BINS=BINS,
        )
        return cut, room

    def search_bins(
        self, bins: Tensor, limit: Tensor, count: int, share: Tensor | None = None
    ) -> tuple[Search, Tensor]:
        if not self.rows.logits.shape[1]:
            return super().search_bins(bins, limit, count, share)
        search = Search(*limit.new_empty(3, bins.shape[0]).unbind())
        words = self._listed(
            count,
            bins_ptr=bins,
            stride_bins=bins.stride(0),
            limit_ptr=limit,
            stride_limit=limit.stride(0),
            share_ptr=share,
            reached_ptr=search.reached,
            next_limit_ptr=search.limit,
        )
        return search, words

    def _listed(self, count: int, **which: Any) -> Tensor:
        """Return how many words reach a cut or lie in a bin, and then as many as there is room."""
        words = self.rows.logits.new_zeros(self.rows.logits.shape[0], 1 + count, dtype=torch.int64)
        self.rows.launch_programs(
            words_kernel,
            temperature_ptr=self.rows.temperature,
            top_ptr=self.rows.top,
            **(_NO_BIN | which),
            words_ptr=words,
            count=count,
            BINS=BINS,
        )
        return words

    def cut_of(
        self,
        search: Search,
        listed: Tensor,
        keep_ties: Tensor,
        *,
        mass: bool,
        least: Tensor | None = None,
        of_greedy: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        sources, rows, width = listed.shape
        cut = listed.new_empty(rows)
        left = cut.new_empty(rows, dtype=torch.bool)
        launch_kernel(
            cut_kernel,
            (rows,),
            listed_ptr=listed.contiguous(),
            temperature_ptr=self.rows.temperature,
            top_ptr=self.rows.largest,
            keep_ties_ptr=keep_ties,
            reached_ptr=search.reached,
            limit_ptr=search.limit,
            # Where there is none, any other is not read, so that all of these are one kernel.
            least_ptr=search.limit if least is None else least,
            is_last=int(least is not None),
            of_greedy_ptr=search.limit if of_greedy is None else of_greedy,
            keeps_greedy=int(of_greedy is None),
            cut_ptr=cut,
            left_ptr=left,
            room=width - 1,
            num_rows=rows,
            num_sources=sources,
            MASS=mass,
            SOURCES=next_power_of_2(sources),
            BLOCK=next_power_of_2(sources * (width - 1)),
        )
        return cut, left

    def last_digit(
        self,
        search: Search,
        last: LastDigits,
        keep_ties: Tensor,
        ends: OtherEnds | None = None,
    ) -> Tensor:
        cut = torch.empty_like(search.prefix)
        launch_kernel(
            last_digit_kernel,
            (cut.shape[0],),
            **self.rows.shard_arguments,
            **_last_search(search, last, keep_ties, ends),
            temperature_ptr=self.rows.noise.temperature,
            top_ptr=self.rows.largest,
            is_last=int(ends is not None),
            cut_ptr=cut,
            MASS=last.mass,
            DIGIT_BITS=DIGIT_BITS,
            BLOCK=BLOCK,
        )
        return cut

    def best_of_last_digit(
        self,
        search: Search,
        last: LastDigits,
        keep_ties: Tensor,
        ends: OtherEnds,
        *,
        weighs: bool,
    ) -> Tensor:
        # Numbers are of another type, hence they would be a kernel more to compile.
        if not (self.rows.logits.shape[1] and last.mass):
            return super().best_of_last_digit(search, last, keep_ties, ends, weighs=weighs)
        return self.rows.launch_best_kept(
            None, _last_search(search, last, keep_ties, ends), weighs=weighs
        )

    def set_sizes(self, gathered: Tensor, cut: Tensor, cap: int, drawn: Tensor) -> SetSizes:
        rows = cut.shape[0]
        sizes, mass, listed_cut, offsets = (cut.new_empty(rows + i // 3) for i in range(4))
        whole, overflow = cut.new_empty(2, rows, dtype=torch.bool).unbind()
        needed = cut.new_ones(3)  # what the host reads where launches only compile
        launch_kernel(
            set_sizes_kernel,
            (1,),
            gathered_ptr=gathered,
            stride_source=gathered.stride(0),
            stride_row=gathered.stride(1),
            stride_number=gathered.stride(2),
            temperature_ptr=self.rows.noise.temperature,
            cut_ptr=cut,
            drawn_ptr=drawn,
            size_ptr=sizes,
            whole_ptr=whole,
            overflow_ptr=overflow,
            offset_ptr=offsets,
            mass_ptr=mass,
            listed_cut_ptr=listed_cut,
            needed_ptr=needed,
            num_rows=rows,
            num_sources=gathered.shape[0],
            cap=cap,
            vocab_size=self.rows.vocab_size,
            BLOCK=SET_BLOCK,
        )
        return SetSizes(sizes, whole, overflow, offsets, mass, listed_cut, needed)

    def listed_sets(self, words: Tensor, sets: SetSizes, total: int) -> tuple[Tensor, Tensor]:
        rows, count = words.shape
        ids = words.new_full((total,), NO_TOKEN)
        log_masses = torch.full_like(ids, torch.nan, dtype=torch.float64)
        if total:
            launch_kernel(
                listed_sets_kernel,
                (triton.cdiv(count, SET_BLOCK), rows),
                words_ptr=words,
                stride_words=words.stride(0),
                cut_ptr=sets.cut,
                temperature_ptr=self.rows.temperature,
                top_ptr=self.rows.top,
                log_total_ptr=log_totals(sets.mass),
                offset_ptr=sets.offsets,
                token_ptr=ids,
                log_mass_ptr=log_masses,
                count=count,
                BLOCK=SET_BLOCK,
            )
        return ids, log_masses


_POINTERS = "cut_ptr", "bins_ptr", "limit_ptr", "share_ptr", "reached_ptr", "next_limit_ptr"
_NO_BIN: dict[str, Any] = {**dict.fromkeys(_POINTERS), "stride_bins": 0, "stride_limit": 0}
"""Arguments of a list that neither ends at a cut nor has a bin."""


def _last_search(
    search: Search, last: LastDigits, keep_ties: Tensor, ends: OtherEnds | None
) -> dict[str, Any]:
    """Return the arguments by which a kernel finds where a search ends."""
    least, share, of_greedy = ends or (None, None, None)
    # Where there is none, any other is not read, so that all of these are one kernel.
    return {
        "bins_ptr": last.bins.contiguous(),
        "prefix_ptr": search.prefix,
        "reached_ptr": search.reached,
        "limit_ptr": search.limit.contiguous(),
        "keep_ties_ptr": keep_ties,
        "least_ptr": search.limit if least is None else least.contiguous(),
        "share_ptr": search.limit.view(torch.float64) if share is None else share,
        "of_greedy_ptr": search.limit if of_greedy is None else of_greedy.contiguous(),
        "shares": int(share is not None),
        "keeps_greedy": int(of_greedy is None),
        "num_rows": last.bins.shape[1],
        "num_sources": last.bins.shape[0],
        "place": last.place,
    }
