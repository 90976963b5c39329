"""The passes over stored logits, by which each rank reads its own part of some rows.

This is plain PyTorch, the definition of the passes. `tpsample.backends.triton_.passes` has them as
kernels, which read the logits once. `tpsample.backends.numba_.passes` has them for a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from tpsample.backends.torch_.logprobs import (
    ListedWords,
    first_of,
    listed_words,
    logprobs_of_words,
)
from tpsample.core import word
from tpsample.core.masses import masses, masses_and_moments
from tpsample.core.order import (
    ABOVE_ALL,
    least_word,
    mass_limit,
    order_words,
)
from tpsample.core.row_noise import RowNoise, has_all
from tpsample.core.score import score_tile, score_tokens
from tpsample.core.spread import spread_sums
from tpsample.output import Logprobs
from tpsample.request.filters import LogprobRows, Thresholds
from tpsample.request.plan import BatchView
from tpsample.request.row_filter import BEST_SCORES
from tpsample.request.step import Found, TileWords, raw_and_processed

if TYPE_CHECKING:
    from typing_extensions import Self

GROUP = 64
"""Size of a group of neighbouring ids. A pass reads the largest logit of a group first."""


def tile_elements(device: torch.device) -> int:
    """Return how many logits a pass takes at a time.

    On a CPU the float64 temporaries then stay in a core's cache; on a GPU few launches do much.
    """
    return 2**18 if device.type == "cpu" else 2**23


class Verdict(NamedTuple):
    """The first of the best scores of F rows that are in their kept sets.

    Attributes:
        words: int64 [F, num_samples].
        decided: bool [F], whether they decide the row.
        top: fp32 [F], the largest logits.
    """

    words: Tensor
    decided: Tensor
    top: Tensor


class SetOfFirst(NamedTuple):
    """The kept sets of F rows, and the tokens that are drawn from them, all among first tokens.

    Attributes:
        words: int64 [F, num_samples], the best score words of the kept.
        cut: int64 [F], where the sets end, as in `last_cut`. The set of a greedy row is its first
            token.
        held: int64 [F, 2], mass and number of the kept.
        top: fp32 [F], the largest logits.
        drawn: int64 [F, num_samples], the order words of the best tokens; 0 of a row without one.
    """

    words: Tensor
    cut: Tensor
    held: Tensor
    top: Tensor
    drawn: Tensor


@dataclass(eq=False)  # frozen, each field would take three times as long
class ShardLogits:
    """Rows whose fp32 logits over its shard this rank keeps for a step, and the passes over them.

    Attributes:
        logits: fp32 [F, V_local], processed: after penalties and constraints.
        raw: fp32 [F, V_local], the logits before penalties and constraints.
        first_id: global id of the first column.
        vocab_size: V, over all ranks.
        temperature: fp32 [F], 1 for greedy rows; see `temperature_of`.
        noise: what the scores of these rows need.
        top: fp32 [F], the largest logits over all ranks, or None while they are not known. Masses
            are relative to it.
        done: bool [F], rows whose token is known. The passes of a draw skip them, so their results
            are 0. None skips no row.
        found: words and bounds that the local step has found; None if it looks for none.
        tile_words: the words of the tiles in which a kernel made the logits, or None.
    """

    logits: Tensor
    raw: Tensor
    first_id: int
    vocab_size: int
    temperature: Tensor
    noise: RowNoise
    top: Tensor | None = None
    done: Tensor | None = None
    found: Found | None = None
    tile_words: TileWords | None = None

    backend: ClassVar[str] = "torch"
    mass_error: ClassVar[float] = 0.0
    """How far the masses of `before` may be off, as a share of the total."""

    @classmethod
    def of(
        cls,
        stored: Tensor,
        batch: BatchView,
        noise: RowNoise,
        *,
        first_id: int = 0,
        found: Found | None = None,
        tile_words: TileWords | None = None,
    ) -> Self:
        """Take the stored rows of a batch.

        Args:
            stored: the memory of `tpsample.request.step.Step.logits`.
            noise: of all rows of the batch.
            found: what the step found, with a `store` that is bound to the step.
            tile_words: the words of the kernel's tiles.
        """
        count, raw, processed = len(batch.plan.stored_list), stored, stored
        if stored.shape[0] > count:  # with controls
            raw, processed = raw_and_processed(stored, count)
        if not batch.plan.stores_in_order:
            assert batch.plan.stored_index is not None
            noise = noise.select(batch.plan.stored_index)
        return cls(
            logits=processed,
            raw=raw,
            first_id=first_id,
            vocab_size=batch.plan.vocab_size,
            temperature=cls.temperature_of(noise),
            noise=noise,
            found=found,
            tile_words=tile_words,
        )

    @staticmethod
    def temperature_of(noise: RowNoise) -> Tensor:
        """Return the temperatures that the passes read, fp32 [F]."""
        return noise.safe_temperature

    def shown(self, processed: Tensor) -> Self:
        """Return the rows, with raw logits where `processed` is False."""
        if self.logits is self.raw:
            return self
        mode = processed.unsqueeze(1)
        shown = torch.where(mode, self.logits, self.raw)
        return replace(self, logits=shown, found=None, tile_words=None)

    def select(self, index: slice | Tensor) -> Self:
        """Return some of the rows; a slice copies nothing, and one of all rows returns `self`."""
        if has_all(index, self.logits.shape[0]):
            return self
        logits = self.logits[index]
        return replace(
            self,
            logits=logits,
            raw=logits if self.raw is self.logits else self.raw[index],
            temperature=self.temperature[index],
            noise=self.noise.select(index),
            top=None if self.top is None else self.top[index],
            done=None if self.done is None else self.done[index],
            found=None if self.found is None else self.found.select(index),
            tile_words=None if self.tile_words is None else self.tile_words.select(index),
        )

    @property
    def rough(self) -> Found | None:
        """The bounds of rows that store upper bounds of logits; None if all logits are exact."""
        return None if self.found is None or self.found.store is None else self.found

    def as_exact(self) -> Self:
        """Return the rows, which the caller knows to store exact logits."""
        if self.rough is None:
            return self
        return replace(self, found=self.rough._replace(store=None))

    def exact(self) -> Self:
        """Replace upper bounds by exact logits, and return the rows."""
        if self.rough is not None:
            index = self.rough.error_bound.nonzero().squeeze(1)
            processed = self.logits[:0] if self.raw is self.logits else self.logits
            assert self.rough.store is not None
            self.rough.store(self.rough.rows[index], index, self.raw, processed)
        return self.as_exact()

    def without(self, done: Tensor) -> Self:
        """Return the rows with more of them done, bool [F]. Nothing is copied."""
        return replace(self, done=done if self.done is None else self.done | done)

    def of_undone(self, values: Tensor) -> Tensor:
        """Return the results of a pass, [F, …], with 0 in rows that are done."""
        if self.done is None:
            return values
        return values.masked_fill(self.done.view(-1, *[1] * (values.dim() - 1)), 0)

    @property
    def largest(self) -> Tensor:
        """fp32 [F], `top`, which must be known."""
        assert self.top is not None
        return self.top

    def top_of(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first order words over all ranks, int64 [F], and their logits, fp32 [F].

        Args:
            gathered: int64 [W, F, 1 or more]; the words of each rank begin with its first one.
        """
        words = gathered[:, :, 0].amax(dim=0)
        return words, word.value_of(words)

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the global id of the first column, and fp32 [F, n], of each tile of the shard."""
        width = max(64, tile_elements(self.logits.device) // max(1, self.logits.shape[0]))
        for start in range(0, self.logits.shape[1], width):
            yield self.first_id + start, self.logits[:, start : start + width]

    def masses(self, logits: Tensor, top: Tensor | None = None) -> Tensor:
        """Return the masses of logits [F, n]; see `tpsample.core.masses`."""
        top = self.top if top is None else top
        assert top is not None
        return masses(logits, top.unsqueeze(1), self.temperature.unsqueeze(1))

    def first_words(self, count: int) -> Tensor:
        """Return the first `count` order words of each row, descending, int64 [F, count].

        They are 0 where the shard has fewer tokens. They lie in the `count` groups whose largest
        logits come first: before the first token of any other group there are `count` tokens. Among
        equal logits the lower id comes first.
        """
        (rows, width), groups = self.logits.shape, self.logits.shape[1] // GROUP
        if 2 * count * GROUP > width:
            first = self.logits.new_zeros(rows, count, dtype=torch.int64)
            for first_id, logits in self.tiles():
                words = torch.cat([first, order_words(logits, first_id)], dim=1)
                first = words.topk(count, dim=1).values
            return self.of_undone(first)
        grouped = self.logits[:, : groups * GROUP].unflatten(1, (groups, GROUP))
        group = word.token_of(order_words(grouped.amax(dim=2)).topk(count, dim=1).values)
        inside = torch.arange(GROUP, device=group.device)
        rest = torch.arange(groups * GROUP, width, device=group.device).expand(rows, -1)
        columns = torch.cat([(group.unsqueeze(2) * GROUP + inside).flatten(1), rest], dim=1)
        words = word.pack(self.logits.gather(1, columns), self.first_id + columns)
        return self.of_undone(words.topk(count, dim=1).values)

    def first_of(self, gathered: Tensor, count: int) -> Tensor:
        """Return the first words over all ranks, int64 [F, count], of [W, F, count or more]."""
        return first_of(gathered, count)

    def words_of(self, token_ids: Tensor) -> Tensor:
        """Return order words of global ids int64 [F, C]; 0 for those of other ranks and for -1."""
        local = token_ids - self.first_id
        mine = (local >= 0) & (local < self.logits.shape[1]) & (token_ids >= 0)
        if not self.logits.shape[1]:
            return torch.zeros_like(token_ids)
        logits = self.logits.gather(1, local.where(mine, 0))
        return word.pack(logits, token_ids) * mine

    def own_words(self, count: int, token_ids: Tensor, first: Tensor | None = None) -> Tensor:
        """Return n `first_words` [F, n], and then `words_of` ids [F, C], int64 [F, n + C].

        Args:
            first: int64 [F, n or more], first words, if they are known.
        """
        first = self.first_words(count) if first is None else first[:, :count]
        return torch.cat([first, self.words_of(token_ids)], dim=1)

    @property
    def num_best(self) -> int:
        """How many best scores of a row a rank sends for the rejection (`tpsample.filters.sample`);
        the same on every rank."""
        return BEST_SCORES if self.rough is None else self.rough.best.shape[-1]

    def best_scores(self, count: int) -> Tensor:
        """Return a rank's candidates of the rejection: int64 [F, 1 + 2 · num_samples · count].

        The first order word is followed by the `count` best score words of each sample, descending.
        The order words of the same tokens follow in the same order. Where the shard has fewer
        tokens there are zeros.
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
        sent = torch.cat([self.first_words(1), scores.flatten(1), orders.flatten(1)], dim=1)
        return self.of_undone(sent)

    def merged(self, gathered: Tensor, count: int) -> Tensor:
        """Return the best scores of all ranks as if one rank had them all, int64 [F, …].

        Args:
            gathered: int64 [W, F, 1 + 2 · num_samples · count], the ranks' `best_scores`.
        """
        if len(gathered) == 1:
            return gathered[0]
        best = gathered[:, :, 1:].unflatten(2, (2, self.noise.num_samples, count))
        scores, orders = best.permute(2, 1, 3, 0, 4).flatten(3)  # [F, S, W · count] each
        scores, orders = _keep_best(scores, orders, count)
        first = gathered[:, :, :1].amax(dim=0)
        return torch.cat([first, scores.flatten(1), orders.flatten(1)], dim=1)

    def before(self, best: Tensor, thresholds: Thresholds, count: int) -> Tensor:
        """Sum the tokens of this rank that come before each of the best scores of all ranks.

        Args:
            best: int64 [F, 1 + 2 · num_samples · count], `merged`.
            thresholds: of these rows.

        Returns:
            int64 [F, 2 C + 1], C = num_samples · count: C masses, C numbers of tokens, and the
            mass from `least_of_total` on. The sums of a best score that decides nothing (`_orders`)
            are 0. Masses may be off by `mass_error` of the total.
        """
        top = word.value_of(best[:, 0])
        marks = self._marks(best, thresholds, count)
        c, least = marks.shape[1], thresholds.least_of_total.unsqueeze(1)
        sums = marks.new_zeros(len(marks), 2 * c + 1)
        for first_id, logits in self.tiles():
            words, mass = order_words(logits, first_id), self.masses(logits, top)
            for i in range(c):
                before = words > marks[:, i, None]
                sums[:, i] += (mass * before).sum(dim=1)
                sums[:, c + i] += before.sum(dim=1)
            sums[:, -1] += (mass * (words >= least)).sum(dim=1)
        return self.of_undone(sums)

    def first_kept(self, best: Tensor, sums: Tensor, thresholds: Thresholds, count: int) -> Verdict:
        """Find the first of the best scores that is in the kept set.

        Args:
            best, thresholds, count: as in `before`.
            sums: what `before` returns, summed over the ranks.
        """
        top_word, marks = best[:, 0], self._orders(best, count)
        scores = best[:, 1 : 1 + marks.shape[1]].unflatten(1, (-1, count))
        mass, number, total = sums.split([marks.shape[1], marks.shape[1], 1], dim=1)
        most, share = thresholds.most.unsqueeze(1), thresholds.share.unsqueeze(1)
        of_total = (total.double() * self.mass_error).ceil().to(torch.int64)
        error = of_total * (mass > 0)  # nothing is before the first token
        possible = (marks >= thresholds.least.unsqueeze(1)) & (number < most)
        sure = possible & (mass + error < mass_limit(total - of_total, share))
        possible &= mass - error < mass_limit(total + of_total, share)
        sure_words, words = (
            (scores * kept.unflatten(1, scores.shape[1:])).amax(dim=2) for kept in (sure, possible)
        )
        top, key = word.value_of(top_word), word.key_of(top_word)
        is_number = (key > word.KEY_MINUS_INF) & (key != word.KEY_NAN)
        decided = ((words > 0) & (words == sure_words)).all(dim=1) | ~is_number
        return Verdict(or_nan(words, top), decided, top)

    def best_of_first(self, first: Tensor, thresholds: Thresholds) -> Tensor:
        """Return the best score words [F, num_samples] among the first tokens that are kept.

        Args:
            first: int64 [F, n], the first n order words over all ranks, n at least each `most`.
            thresholds: of these rows. No row keeps ties, and each total that is not given is of
                `most` tokens at the most.
        """
        logits, ids = word.value_of(first), word.token_of(first)
        kept, samples = self._kept_of_first(first, thresholds)[0], range(self.noise.num_samples)
        scores = [word.pack(score_tokens(logits, ids, self.noise, s), ids) for s in samples]
        best = torch.stack([(score_words * kept).amax(dim=1) for score_words in scores], dim=1)
        return or_nan(best, word.value_of(first[:, 0]))

    def set_of_first(self, first: Tensor, thresholds: Thresholds) -> SetOfFirst:
        """Return `best_of_first`, and the kept sets of these rows among their first tokens."""
        kept, mass = self._kept_of_first(first, thresholds)
        last = first.where(kept, ABOVE_ALL).amin(dim=1)  # above all in a row without a token
        held = torch.stack([(mass * kept).sum(dim=1), kept.sum(dim=1)], dim=1)
        top = word.value_of(first[:, 0])
        cut = replace(self, top=top).last_cut(last, of_greedy=first[:, 0])
        words = self.best_of_first(first, thresholds)
        ids, drawn = word.token_of(first).unsqueeze(1), word.decode(words)[0].unsqueeze(2)
        orders = (first.unsqueeze(1) * (ids == drawn)).amax(dim=2)
        return SetOfFirst(words, cut, held, top, orders)

    def _kept_of_first(self, first: Tensor, thresholds: Thresholds) -> tuple[Tensor, Tensor]:
        """Return which first tokens are kept, bool [F, n], and their masses, int64."""
        top = word.value_of(first[:, 0])
        within = torch.arange(first.shape[1], device=first.device) < thresholds.most.unsqueeze(1)
        in_total = within & (first >= thresholds.least_of_total.unsqueeze(1))
        mass = self.masses(word.value_of(first), top)
        total = (mass * in_total).sum(dim=1)
        if thresholds.total is not None:
            total = thresholds.total.where(thresholds.total >= 0, total)
        total = total.unsqueeze(1)
        kept = within & (first >= thresholds.least.unsqueeze(1)) & ~top.isnan().unsqueeze(1)
        kept &= mass.cumsum(dim=1) - mass < mass_limit(total, thresholds.share.unsqueeze(1))
        return kept, mass

    def least_word(self, y: Tensor, temperature: Tensor) -> Tensor:
        """Return int64 [F], the least order word of a logit >= max x + temperature · y.

        `tpsample.core.order.least_word` is its definition.
        """
        return least_word(self.largest, temperature, y)

    def last_cut(self, least: Tensor, *, of_greedy: Tensor | None = None) -> Tensor:
        """Return where kept sets end, int64 [F]: above all words in a row without a number.

        Args:
            least: int64 [F], the largest cut of all rules.
            of_greedy: int64 [F], the cuts of greedy rows; None keeps all that a mask leaves.
        """
        # A row that was made greedy by its temperature alone has no filters.
        other = word.LOWEST_DRAWABLE if of_greedy is None else of_greedy
        cut = torch.where(self.noise.random.squeeze(1), least, other)
        return torch.where(self.largest > -torch.inf, cut, ABOVE_ALL)

    def best_kept(self, cut: Tensor) -> Tensor:
        """Return the best score words, int64 [F, num_samples], of tokens down to a cut.

        Without a token the word is 0, and in a row whose largest logit is a NaN that of a NaN.

        Args:
            cut: int64 [F]; tokens count whose order word is >= it.
        """
        best = cut.new_zeros(cut.shape[0], self.noise.num_samples)
        for first_id, logits in self.tiles():
            kept = order_words(logits, first_id) >= cut.unsqueeze(1)
            for sample in range(best.shape[1]):
                scores = order_words(score_tile(logits, first_id, self.noise, sample), first_id)
                best[:, sample] = best[:, sample].maximum((scores * kept).amax(dim=1))
        return self.of_undone(or_nan(best, self.largest))

    def best_and_mass(self, cut: Tensor) -> Tensor:
        """Return int64 [F, num_samples + 2]: `best_kept`, then mass and number of the tokens."""
        return torch.cat([self.best_kept(cut), self.of_undone(self.held_from(cut))], dim=1)

    def mass_from(self, cut: Tensor) -> Tensor:
        """Return the mass of the tokens of each row down to a cut, Σ q, int64 [F].

        Where no logit is a number, or all are masked, it means nothing.

        Args:
            cut: int64 [F]; tokens count whose order word is >= it.
        """
        mass = torch.zeros_like(cut)
        for first_id, logits in self.tiles():
            kept = order_words(logits, first_id) >= cut.unsqueeze(1)
            mass += (self.masses(logits) * kept).sum(dim=1)
        return mass

    def held_from(self, cut: Tensor) -> Tensor:
        """Return the mass of the tokens down to a cut and their number, int64 [F, 2]."""
        return torch.stack([self.mass_from(cut), self.count_from(cut.unsqueeze(1))[:, 0]], dim=1)

    def totals(self, cut: Tensor) -> Tensor:
        """Return the mass of the words >= cut int64 [F]: int64 [F, 1]. Where upper bounds of logits
        are stored, return a lower and an upper bound of the mass, [F, 2]."""
        return self.mass_from(cut).unsqueeze(1)

    def least_of_mass(self, limit: Tensor) -> Tensor:
        """Return int64 [F], the least order word of this rank whose token has a mass >= a limit.

        Masked tokens do not count. Without any other it is above every order word.
        """
        least = torch.full_like(limit, ABOVE_ALL)
        for first_id, logits in self.tiles():
            reaches = (self.masses(logits) >= limit.unsqueeze(1)) & (logits > -torch.inf)
            words = order_words(logits, first_id).where(reaches, ABOVE_ALL)
            least = least.minimum(words.amin(dim=1))
        return least

    def spread(self) -> Tensor:
        """Return int64 [F, 4], the sums of `tpsample.core.spread` over this rank's logits."""
        sums = self.logits.new_zeros(len(self.logits), 4, dtype=torch.int64)
        for _, logits in self.tiles():
            sums += spread_sums(logits, self.largest)
        return sums

    def weigh(self, cut: Tensor | None, marks: Tensor | None = None) -> Tensor:
        """Return int64 [F, 2 + C]: Σ q and Σ m of the tokens down to a cut, from which the entropy
        follows, and `count_from` of marks [F, C].

        Args:
            cut: int64 [F]; None takes all tokens.
            marks: None for none.
        """
        arguments = self.largest.unsqueeze(1), self.temperature.unsqueeze(1)
        sums = self.logits.new_zeros(len(self.logits), 2, dtype=torch.int64)
        cut = torch.zeros_like(sums[:, 0]) if cut is None else cut
        for first_id, logits in self.tiles():
            kept = order_words(logits, first_id) >= cut.unsqueeze(1)
            pair = masses_and_moments(logits, *arguments)
            sums += torch.stack([(weights * kept).sum(dim=1) for weights in pair], dim=1)
        return sums if marks is None else torch.cat([sums, self.count_from(marks)], dim=1)

    def count_from(self, marks: Tensor) -> Tensor:
        """Return int64 [F, C], how many order words of this rank are >= each of `marks` [F, C]."""
        counts = torch.zeros_like(marks)
        for first_id, logits in self.tiles():
            words = order_words(logits, first_id)
            for c in range(marks.shape[1]):
                counts[:, c] += (words >= marks[:, c, None]).sum(dim=1)
        return counts

    def listed_words(self, logprob_rows: LogprobRows, gathered: Tensor) -> ListedWords:
        """Return the words over all ranks whose logprobs are reported."""
        return listed_words(self.temperature, logprob_rows, gathered)

    def weighed_words(
        self, logprob_rows: LogprobRows, first: Tensor, drawn: Tensor, cut: Tensor
    ) -> tuple[ListedWords, Tensor]:
        """Return `listed_words`, and the sums for `logprobs_of_words`, of rows whose first words
        contain their kept sets. All ask for processed logprobs, and none for chosen ids.

        Args:
            first: int64 [R, n], the first words over all ranks.
            drawn: int64 [R, S], the order words of the drawn tokens; 0 for none.
            cut: int64 [R], where the sets end.
        """
        words = self.listed_words(
            logprob_rows, torch.cat([first[:, : max(1, logprob_rows.top)], drawn], 1)[None]
        )
        kept = first >= cut.unsqueeze(1)
        rows = replace(
            self,
            logits=word.value_of(first).where(kept, -torch.inf),
            first_id=0,
            temperature=words.temperature,
            top=words.top,
            found=None,
        )
        moments = rows.weigh(torch.full_like(cut, word.LOWEST_DRAWABLE))
        reached = kept.unsqueeze(2) & (first.unsqueeze(2) >= words.marks.unsqueeze(1))
        return words, torch.cat([moments, reached.sum(dim=1)], dim=1)

    def logprobs_of_words(
        self,
        logprob_rows: LogprobRows,
        sampled: Tensor,
        words: ListedWords,
        cut: Tensor | None,
        sums: Tensor,
    ) -> Logprobs:
        """Return the logprobs of all rows; see `tpsample.backends.torch_.logprobs`."""
        return logprobs_of_words(self.vocab_size, logprob_rows, sampled, words, cut, sums)

    def _marks(self, best: Tensor, thresholds: Thresholds, count: int) -> Tensor:
        """Return int64 [F, C]: a token comes before a mark if its order word is greater.

        The mark of a token that decides nothing is above all words, so that nothing is weighed.
        """
        orders = self._orders(best, count)
        marks = orders.masked_fill(orders == 0, ABOVE_ALL)
        # ties="keep": only greater logits come before.
        return torch.where(thresholds.keep_ties.unsqueeze(1) > 0, marks | word.TOKEN_MASK, marks)

    def _orders(self, best: Tensor, count: int) -> Tensor:
        """Return the order words of `merged` best scores, int64 [F, num_samples · count].

        A token that decides nothing has 0: another one has a better score and comes before it in
        the order, so every set that keeps the token also keeps the other one.
        """
        orders = best[:, 1 + self.noise.num_samples * count :].unflatten(1, (-1, count))
        return (orders * (orders >= orders.cummax(dim=2).values)).flatten(1)


def or_nan(words: Tensor, top: Tensor) -> Tensor:
    """Return `words` [F, S], with a NaN's word in rows whose largest logit, fp32 [F], is a NaN."""
    return torch.where(top.isnan().unsqueeze(1), word.KEY_NAN << word.TOKEN_BITS, words)


def _keep_best(scores: Tensor, orders: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest score words of the last axis, and their tokens' order words."""
    scores, best = scores.topk(count, dim=-1)
    return scores, orders.gather(-1, best)
