"""The fp32 logits of some rows over this rank's shard, and what one pass over them gives.

Only these rows are stored, [F, V_local]; they never travel. Here in plain PyTorch, the definition
of the passes; `tpsample.logits.shard_logits_triton` has the same as kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.order import below_top, candidates, mass_limit, masses, min_p_cut, order_words
from tpsample.core.row_noise import RowNoise, safe_temperature
from tpsample.core.score import score_tile, score_tokens
from tpsample.logits.candidates import Candidates, StoredCandidates
from tpsample.output import SampleOutput
from tpsample.request.filters import RowFilters, lists_all
from tpsample.request.plan import BatchView

if TYPE_CHECKING:
    from typing_extensions import Self

GROUP = 64
"""Neighbouring ids whose largest logit is looked at before they are."""


def tile_elements(device: torch.device) -> int:
    """Logits per pass of the arithmetic: on a CPU its float64 temporaries then stay in a core's
    cache, on a GPU few launches do much each."""
    return 2**18 if device.type == "cpu" else 2**23


@dataclass(frozen=True)
class ShardLogits:
    """Rows whose logits this rank keeps for a step.

    Attributes:
        logits: fp32 [F, V_local], processed: after penalties and constraints.
        raw: the same before them.
        first_id: global id of the first column.
        vocab_size: V, over all ranks.
        temperature: fp32 [F], 1 for greedy rows.
        noise: what the scores of these rows need.
    """

    logits: Tensor
    raw: Tensor
    first_id: int
    vocab_size: int
    temperature: Tensor
    noise: RowNoise

    @classmethod
    def of(
        cls,
        stored: Tensor,
        batch: BatchView,
        noise: RowNoise,
        *,
        first_id: int = 0,
    ) -> Self:
        """The stored rows of a batch.

        Args:
            stored: fp32 [F, V_local], the raw logits of the stored rows; with request controls
                [2 F, V_local], the processed ones behind them.
            noise: of all rows of the batch.
        """
        count = len(batch.plan.stored_list)
        raw, processed = stored[:count], stored[count:]
        all_rows = lists_all(batch.plan.stored_list, batch.rows)
        index = slice(None) if all_rows else batch.plan.stored_index
        assert index is not None
        return cls(
            logits=processed if len(processed) else raw,
            raw=raw,
            first_id=first_id,
            vocab_size=batch.vocab_size,
            temperature=safe_temperature(batch.temperature[index])[0],
            noise=noise.select(index),
        )

    def shown(self, processed: Tensor) -> Self:
        """The rows with raw logits in place of the processed ones where `processed` is False."""
        if self.logits is self.raw:
            return self
        mode = processed.unsqueeze(1)
        return replace(self, logits=torch.where(mode, self.logits, self.raw))

    def select(self, index: list[int] | slice | Tensor) -> Self:
        """Some of the rows. Nothing is copied if a list has all in order."""
        if isinstance(index, list) and lists_all(index, self.logits.shape[0]):
            return self
        logits = self.logits[index]
        return replace(
            self,
            logits=logits,
            raw=logits if self.raw is self.logits else self.raw[index],
            temperature=self.temperature[index],
            noise=self.noise.select(index),
        )

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """(global id of the first column, fp32 [F, n]) of each tile of the shard."""
        width = max(64, tile_elements(self.logits.device) // max(1, self.logits.shape[0]))
        for start in range(0, self.logits.shape[1], width):
            yield self.first_id + start, self.logits[:, start : start + width]

    def first_words(self, count: int) -> Tensor:
        """The first `count` order words of each row, descending, int64 [F, count]; 0 where the
        shard has fewer tokens.

        They lie in the `count` groups of ids whose largest logits come first, of equal ones those
        of lower ids: every other group has `count` tokens before its own first.
        """
        rows, width = self.logits.shape
        groups = width // GROUP
        if 2 * count * GROUP > width:
            first = self.logits.new_zeros(rows, count, dtype=torch.int64)
            for first_id, logits in self.tiles():
                words = torch.cat([first, order_words(logits, first_id)], dim=1)
                first = words.topk(count, dim=1).values
            return first
        grouped = self.logits[:, : groups * GROUP].unflatten(1, (groups, GROUP))
        group = word.token_of(order_words(grouped.amax(dim=2)).topk(count, dim=1).values)
        inside = torch.arange(GROUP, device=group.device)
        rest = torch.arange(groups * GROUP, width, device=group.device).expand(rows, -1)
        columns = torch.cat([(group.unsqueeze(2) * GROUP + inside).flatten(1), rest], dim=1)
        words = word.pack(self.logits.gather(1, columns), self.first_id + columns)
        return words.topk(count, dim=1).values

    def words_of(self, token_ids: Tensor) -> Tensor:
        """Order words of global ids int64 [F, C]; 0 for those of other ranks and for -1."""
        local = token_ids - self.first_id
        mine = (local >= 0) & (local < self.logits.shape[1]) & (token_ids >= 0)
        if not self.logits.shape[1]:
            return torch.zeros_like(token_ids)
        logits = self.logits.gather(1, local.where(mine, 0))
        return word.pack(logits, token_ids) * mine

    def leading(self, count: int) -> Tensor:
        """What a rank sends for the rejection: int64 [F, 1 + 2 · num_samples · count].

        The first order word; per sample the `count` best scores as words of the score, descending;
        in the same order the order words of their tokens. 0 where the shard has fewer tokens.
        """
        rows, samples = self.logits.shape[0], self.noise.num_samples
        scores = self.logits.new_zeros(rows, samples, count, dtype=torch.int64)
        orders = torch.zeros_like(scores)
        for first_id, logits in self.tiles():
            tile_orders = order_words(logits, first_id).unsqueeze(1).expand(-1, samples, -1)
            tile_scores = torch.stack(
                [
                    order_words(score_tile(logits, first_id, self.noise, sample), first_id)
                    for sample in range(samples)
                ],
                dim=1,
            )
            tile_scores, best = tile_scores.topk(min(count, logits.shape[1]), dim=2)
            scores, orders = _keep_best(
                torch.cat([scores, tile_scores], dim=2),
                torch.cat([orders, tile_orders.gather(2, best)], dim=2),
                count,
            )
        return torch.cat([self.first_words(1), scores.flatten(1), orders.flatten(1)], dim=1)

    def before(
        self, gathered: Tensor, filters: RowFilters, count: int, cut: Tensor | None = None
    ) -> Tensor:
        """What stands on this rank before each of the best scores of all ranks.

        Args:
            gathered: int64 [W, F, 1 + 2 · num_samples · count], the ranks' `leading`.
            filters: of these rows.
            cut: int64 [F], the last word of top_k where top_p renormalises after it.

        Returns:
            int64 [F, 2 C + 1], C = num_samples · count: C masses, C numbers of tokens, and the
            total of which top_p is a share.
        """
        top = word.value_of(gathered[:, :, 0].amax(dim=0))
        marks = self._merged(gathered, count)[1].flatten(1)
        # ties="keep": only greater logits come before.
        marks = torch.where(filters.keep_ties.unsqueeze(1), marks | word.TOKEN_MASK, marks)
        c = marks.shape[1]
        sums = marks.new_zeros(len(marks), 2 * c + 1)
        for first_id, logits in self.tiles():
            words, below = order_words(logits, first_id), self._below(logits, top)
            mass = masses(below)
            for i in range(c):
                before = words > marks[:, i, None]
                sums[:, i] += (mass * before).sum(dim=1)
                sums[:, c + i] += before.sum(dim=1)
            in_total = candidates(words, below, filters.total_log_min_p.unsqueeze(1))
            if cut is not None:
                in_total &= words >= cut.unsqueeze(1)
            sums[:, -1] += (mass * in_total).sum(dim=1)
        return sums

    def first_kept(
        self, gathered: Tensor, sums: Tensor, filters: RowFilters, count: int
    ) -> tuple[Tensor, Tensor]:
        """The first of the best scores that is in the kept set.

        Args:
            gathered, filters, count: as in `before`.
            sums: what that returns, summed over the ranks.

        Returns:
            Words [F, num_samples], and bool [F]: whether they decide the row.
        """
        scores, orders = self._merged(gathered, count)
        top_word, marks = gathered[:, :, 0].amax(dim=0), orders.flatten(1)
        mass, number, total = sums.split([marks.shape[1], marks.shape[1], 1], dim=1)
        below = self._below(word.value_of(marks), word.value_of(top_word))
        member = candidates(marks, below, filters.log_min_p.unsqueeze(1))
        member &= number < filters.top_k.unsqueeze(1)
        member &= mass < mass_limit(total, filters.top_p.unsqueeze(1))
        words = (scores * member.unflatten(1, scores.shape[1:])).amax(dim=2)
        key = word.key_of(top_word)
        is_number = (key > word.KEY_MINUS_INF) & (key != word.KEY_NAN)
        return or_nan(words, top_word), (words > 0).all(dim=1) | ~is_number

    def best_of_first(self, first: Tensor, filters: RowFilters) -> Tensor:
        """Best score words [F, num_samples] of the kept among the first tokens of the order.

        Args:
            first: int64 [F, n], the first n order words over all ranks, n at least each top_k.
            filters: of these rows: none with ties="keep", top_p only after top_k.
        """
        count, logits = first.shape[1], word.value_of(first)
        below = self._below(logits, logits[:, 0])
        in_top_k = torch.arange(count, device=first.device) < filters.top_k.unsqueeze(1)
        in_total = in_top_k & candidates(first, below, filters.total_log_min_p.unsqueeze(1))
        mass = masses(below)
        total = (mass * in_total).sum(dim=1, keepdim=True)
        kept = in_top_k & candidates(first, below, filters.log_min_p.unsqueeze(1))
        kept &= mass.cumsum(dim=1) - mass < mass_limit(total, filters.top_p.unsqueeze(1))

        ids = word.token_of(first)
        best = [
            (word.pack(score_tokens(logits, ids, self.noise, sample), ids) * kept).amax(dim=1)
            for sample in range(self.noise.num_samples)
        ]
        return or_nan(torch.stack(best, dim=1), first[:, 0])

    def write_tokens(self, words: Tensor, index: Tensor, out: SampleOutput) -> None:
        """Write tokens and status of score words [F, num_samples]; a lost row stays lost.

        Args:
            index: int64 [F], the rows' places in the batch.
        """
        lost = out.status[index] == word.Status.PEER_LOST
        token_ids, status = word.decode(words)
        token_ids = token_ids.masked_fill(lost.unsqueeze(1), word.NO_TOKEN)
        out.token_ids[index] = token_ids.view(len(index), *out.token_ids.shape[1:])
        out.status[index] = status.amax(dim=1).masked_fill(lost, int(word.Status.PEER_LOST))

    def min_p_cut(self, top: Tensor, log_min_p: Tensor) -> Tensor:
        """int64 [F], the lowest order word that min_p keeps; `kept_set.min_p_cut`."""
        return min_p_cut(top, self.temperature, log_min_p)

    def candidates(self, top: Tensor) -> Candidates:
        """What is not masked, to be weighed more than once.

        Args:
            top: fp32 [F], the rows' largest logits over all ranks.
        """
        words = torch.empty_like(self.logits, dtype=torch.int64)
        mass = torch.empty_like(words)
        for first_id, logits in self.tiles():
            start = first_id - self.first_id
            tile = slice(start, start + logits.shape[1])
            tile_words, below = order_words(logits, first_id), self._below(logits, top)
            unmasked = logits > -torch.inf
            words[:, tile] = tile_words * unmasked
            mass[:, tile] = masses(below) * unmasked
        return StoredCandidates(words, mass)

    def best_kept(self, cut: Tensor) -> Tensor:
        """Best score word per row and sample, int64 [F, num_samples], of tokens whose order word
        is >= cut, int64 [F]; 0 if there is none."""
        best = cut.new_zeros(cut.shape[0], self.noise.num_samples)
        for first_id, logits in self.tiles():
            kept = order_words(logits, first_id) >= cut.unsqueeze(1)
            for sample in range(best.shape[1]):
                scores = order_words(score_tile(logits, first_id, self.noise, sample), first_id)
                best[:, sample] = best[:, sample].maximum((scores * kept).amax(dim=1))
        return best

    def mass_from(self, cut: Tensor, top: Tensor) -> Tensor:
        """int64 [F, 2] of this rank's tokens whose order word is >= cut, int64 [F]: Σ q, and
        Σ rint(-q y), from which the entropy follows."""
        sums = cut.new_zeros(len(cut), 2)
        for first_id, logits in self.tiles():
            kept = order_words(logits, first_id) >= cut.unsqueeze(1)
            below = self._below(logits, top)
            mass = masses(below) * kept
            # -q y is at most 2^40 / e; where there is no mass, y may be infinite.
            moment = torch.where(mass > 0, -mass.double() * below, 0.0).round_().to(torch.int64)
            sums += torch.stack([mass.sum(dim=1), moment.sum(dim=1)], dim=1)
        return sums

    def count_from(self, marks: Tensor) -> Tensor:
        """int64 [F, C], how many of this rank's order words are >= each of `marks` [F, C]."""
        counts = torch.zeros_like(marks)
        for first_id, logits in self.tiles():
            words = order_words(logits, first_id)
            for c in range(marks.shape[1]):
                counts[:, c] += (words >= marks[:, c, None]).sum(dim=1)
        return counts

    def _merged(self, gathered: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The best score words of all ranks, [F, num_samples, count], and their order words."""
        best = gathered[:, :, 1:].unflatten(2, (2, self.noise.num_samples, count))
        scores, orders = best.permute(2, 1, 3, 0, 4).flatten(3)  # [F, S, W · count] each
        return _keep_best(scores, orders, count)

    def _below(self, logits: Tensor, top: Tensor) -> Tensor:
        return below_top(logits, top.unsqueeze(1), self.temperature.unsqueeze(1))


def or_nan(words: Tensor, top_word: Tensor) -> Tensor:
    """`words` [F, S]; a NaN's word in rows whose first order word is a NaN."""
    nan = word.key_of(top_word) == word.KEY_NAN
    return torch.where(nan.unsqueeze(1), word.KEY_NAN << word.TOKEN_BITS, words)


def _keep_best(scores: Tensor, orders: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest score words along the last axis, with the order words of the same
    tokens."""
    scores, best = scores.topk(count, dim=-1)
    return scores, orders.gather(-1, best)
