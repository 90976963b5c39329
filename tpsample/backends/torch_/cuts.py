"""Where the kept sets of stored rows end, and their contents: the part of a search on each rank.

This is plain PyTorch, the definition. `tpsample.backends.triton_.cuts` has it as kernels, and
`tpsample.backends.numba_.cuts` has it for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.backends.torch_.logprobs import log_totals
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.masses import TOP_MASS
from tpsample.core.order import (
    ABOVE_ALL,
    BIN_MARGIN,
    BINS,
    BINS_PER_Y,
    COUNTED_BINS,
    DIGIT_BITS,
    DIGITS,
    Search,
    below_top,
    bins_of,
    mass_limit,
    order_words,
    tokens_per_mass,
)


class EmptyDigits(NamedTuple):
    """Memory of zeros for one round of a search.

    Attributes:
        bins: [F, 2^n], where weights of the digit are summed.
        search: for the search before it.
    """

    bins: Tensor
    search: Search


class LastDigits(NamedTuple):
    """The histograms of the last digits of searches, on each rank.

    Attributes:
        bins: [W, F, 2^DIGIT_BITS], in the order of the ranks' token ids.
        place: the index of this rank's histogram in `bins`.
        mass: whether bins are sums of masses, or else numbers of tokens.
    """

    bins: Tensor
    place: int
    mass: bool


class OtherEnds(NamedTuple):
    """Where the kept sets of F rows end by all rules but the one that is searched.

    Attributes:
        least: int64 [F], the largest cut of the other rules.
        share: float64 [F], the top_p of each row, if top_p is searched; 1 cuts nothing. None if
            top_k is searched.
        of_greedy: int64 [F], the cuts of greedy rows; None keeps all that a mask leaves.
    """

    least: Tensor
    share: Tensor | None
    of_greedy: Tensor | None


class SetSizes(NamedTuple):
    """How large the kept sets of F rows are, over all ranks.

    Attributes:
        sizes: int64 [F].
        whole: bool [F], whether a set has all ids, so that it is not listed.
        overflow: bool [F], whether a set has too many tokens to be listed.
        offsets: int64 [F + 1], where the listed sets begin in their concatenation.
        mass: int64 [F], the masses of the sets.
        cut: int64 [F], where the sets end; above all words where nothing is listed.
        needed: int64 [3], the most words that one rank has of a listed set, the most tokens of one,
            and the tokens of all of them.
    """

    sizes: Tensor
    whole: Tensor
    overflow: Tensor
    offsets: Tensor
    mass: Tensor
    cut: Tensor
    needed: Tensor


@dataclass(frozen=True)
class Cuts:
    """The passes over stored rows, and the arithmetic on rows, of a search for their cuts.

    Attributes:
        rows: the logits on this rank, which know the largest ones of all ranks.
    """

    rows: ShardLogits

    @cached_property
    def words_and_mass(self) -> tuple[Tensor, Tensor]:
        """Order words and masses, int64 [F, V_local] each; 0 where a token is masked."""
        words = torch.empty_like(self.rows.logits, dtype=torch.int64)
        mass = torch.empty_like(words)
        for first_id, logits in self.rows.tiles():
            start = first_id - self.rows.first_id
            tile = slice(start, start + logits.shape[1])
            unmasked = logits > -torch.inf
            words[:, tile] = order_words(logits, first_id) * unmasked
            mass[:, tile] = self.rows.masses(logits) * unmasked
        return words, mass

    def words_from(self, cut: Tensor, count: int) -> Tensor:
        """Return the order words of each row that are >= `cut` int64 [F], descending.

        Args:
            count: no row has more such words.

        Returns:
            int64 [F, count], 0 where a row has no more.
        """
        words = self.rows.first_words(count)
        return words * (words >= cut.unsqueeze(1))

    def list_end(
        self, bins: Tensor, total: Tensor, share: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Return the last order word of a list that has all that top_p keeps, and at least the
        first `number` words.

        A row without a number lists one word, a NaN's if it has a NaN. A greedy row has no bound,
        because it reports all tokens.

        Args:
            bins: int64 [F, BINS], the masses of bins, summed over the ranks.
            total, share: int64 and float64 [F], the whole masses and the shares of top_p.

        Returns:
            int64 [F], that word, and int64 [F], a bound of how many words there are; it is
            `ABOVE_ALL` where masses bound nothing.
        """
        rows = self.rows
        fewest, most = (tokens_per_mass(bins.device).unsqueeze(1) * bins).unbind()
        too_few = fewest.ceil().to(torch.int64).cumsum(dim=1) < number
        end = self.bin_of(bins, total, share).prefix.maximum(too_few.sum(dim=1))
        # The words lie in the bins up to this one and, as bins are rounded, in the next.
        inside = torch.arange(BINS, device=bins.device) <= end.unsqueeze(1) + 1
        room = (most.floor().to(torch.int64) * inside).sum(dim=1)
        bounded = (end + 1 < COUNTED_BINS) & rows.noise.random.squeeze(1)
        room = room.where(bounded, ABOVE_ALL)
        cut = rows.least_word((end + (1 + BIN_MARGIN)).double() / -BINS_PER_Y, rows.temperature)
        any_word = torch.where(rows.largest.isnan(), word.KEY_NAN << word.TOKEN_BITS, 1)
        is_number = rows.largest > -torch.inf
        return cut.where(is_number, any_word), room.where(is_number, 1)

    def empty_digits(self, rounds: int, *, mass: bool) -> Sequence[EmptyDigits | None]:
        """Return what `digits` of so many rounds writes into; None where it takes its own memory.

        Args:
            mass: as for `digits`.
        """
        return [None] * rounds

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
        """Return a search, and the histogram [F, 2^DIGIT_BITS] of a digit of the words that begin
        with its prefix.

        Digits are complemented: bin 0 holds the largest words. Masked tokens are in no bin.

        Args:
            before: the histograms of the digit before, summed over the ranks, which `next_digit`
                adds to the search; None for the first digit.
            shift: of the digit, in bits.
            share: as in `next_digit`.
            empty: of `empty_digits`, which is written; None takes memory.
            mass: whether bins are sums of masses, int64, or numbers of tokens, int32.
            least: int64 [F], words below are in no bin of the first digit; None takes all.

        Returns:
            Both are meaningless in rows that are done, where bins are 0.
        """
        search = search if before is None else self.next_digit(search, before, share)
        words, masses_ = self.words_and_mass
        weight = masses_ if mass else (words > 0).to(torch.int32)
        digit = ~(words >> shift) & (DIGITS - 1)
        inside = (words >> (shift + DIGIT_BITS)) == search.prefix.unsqueeze(1)
        if least is not None:
            inside &= words >= least.unsqueeze(1)
        bins = weight.new_zeros(len(words), DIGITS)
        return search, self.rows.of_undone(bins.scatter_add_(1, digit, weight * inside))

    def sums_of_bins(self, cut: Tensor | None) -> Tensor:
        """Return the numbers of tokens in the rows' bins, `tpsample.core.order.bins_of`, or their
        masses. Masked tokens are in none. In a row with a NaN it means nothing.

        Args:
            cut: int64 [F]; None counts the tokens.

        Returns:
            int32 [F, BINS]; with a cut int64 [F, BINS + 1], last the mass of the tokens down to it.
        """
        shape, dtype = (len(self.rows.logits), BINS), torch.int32
        if cut is not None:
            shape, dtype = (len(cut), BINS + 1), torch.int64
        sums = self.rows.logits.new_zeros(shape, dtype=dtype)
        for _, logits in self.rows.tiles():
            weight = (logits > -torch.inf).to(dtype)
            if cut is not None:
                weight *= self.rows.masses(logits)
            sums.scatter_add_(1, self._bins_of(logits), weight)
        if cut is not None:
            sums[:, BINS] = self.rows.mass_from(cut)
        return sums

    def words_of_bin(self, bins: Tensor, count: int) -> Tensor:
        """Return the order words of this rank that lie in a bin of each row.

        Args:
            bins: int64 [F].
            count: how many are listed.

        Returns:
            int64 [F, 1 + count]: how many there are, then the words in any order, 0 where there are
            no more. If there are more than `count`, any of them are listed.
        """
        listed = self.rows.logits.new_zeros(len(self.rows.logits), 1 + count, dtype=torch.int64)
        for first_id, logits in self.rows.tiles():
            inside = self._bins_of(logits) == bins.unsqueeze(1)
            inside &= logits > -torch.inf
            words = torch.cat([listed[:, 1:], order_words(logits, first_id) * inside], dim=1)
            listed[:, 0] += inside.sum(dim=1)
            listed[:, 1:] = words.topk(count, dim=1).values
        return listed

    def next_digit(
        self,
        search: Search,
        bins: Tensor,
        share: Tensor | None = None,
    ) -> Search:
        """Return the search with one digit more, in which the running sum reaches the limit.

        Args:
            bins: [F, 2^n], the `digits` of all ranks, summed; the digit has n bits.
            share: float64 [F]: limits are these shares of the sum over bins. None in later rounds.
        """
        digits, bins = bins.shape[1], bins.to(torch.int64)
        upto = search.reached.unsqueeze(1) + bins.cumsum(dim=1)
        limit = search.limit if share is None else mass_limit(upto[:, -1], share)
        limit = limit.minimum(upto[:, -1])
        index = (upto < limit.unsqueeze(1)).sum(dim=1, keepdim=True)
        return Search(
            prefix=search.prefix * digits + (digits - 1 - index.squeeze(1)),
            reached=(upto - bins).gather(1, index).squeeze(1),
            limit=limit,
        )

    def last_digit(
        self,
        search: Search,
        last: LastDigits,
        keep_ties: Tensor,
        ends: OtherEnds | None = None,
    ) -> Tensor:
        """Return where this rank's part of each search, or of each kept set, ends.

        With the last digit the prefix is the key of a logit. Among tokens with this logit the least
        ids are kept, so that ranks contribute in the order of their ids.

        Args:
            search: the search before its last digit.
            last: the last digits of all ranks.
            keep_ties: int64 [F], whether all tokens of that logit are kept.
            ends: where kept sets end by other rules; None for the searches alone.

        Returns:
            int64 [F]; a token of this rank is kept iff its order word is >= it. The largest of
            these words over all ranks is where the set of the whole vocabulary ends.
        """
        search = self.next_digit(search, last.bins.sum(dim=0))  # by keys of logits
        digit = (~search.prefix & (DIGITS - 1)).unsqueeze(1).expand(len(last.bins), -1, 1)
        weights = last.bins.to(torch.int64).gather(2, digit).squeeze(2)
        logit = word.value_of(search.prefix << word.TOKEN_BITS).unsqueeze(1)
        each = self.rows.masses(logit).squeeze(1).clamp(min=1) if last.mass else 1
        left = search.limit - search.reached - weights[: last.place].sum(dim=0)
        left = left.clamp(min=0)
        some = (left + each <= weights[last.place]) & (keep_ties == 0)
        number = (-(-left // each)).where(some, 0)
        token = self.nth_equal(logit, number).where(some, word.TOKEN_MASK)
        cut = (search.prefix << word.TOKEN_BITS) + (word.TOKEN_MASK - token)
        if ends is None:
            return cut
        least, share, of_greedy = ends
        largest = least.maximum(cut)
        largest = largest if share is None else torch.where(share < 1, largest, least)
        return self.rows.last_cut(largest, of_greedy=of_greedy)

    def nth_equal(self, logit: Tensor, number: Tensor) -> Tensor:
        """Return the id of the n-th token of this rank with a logit.

        Args:
            logit: fp32 [F, 1].
            number: int64 [F], n; no row has fewer such tokens.

        Returns:
            int64 [F], the id before the first of this rank where n < 1.
        """
        token = torch.full_like(number, self.rows.first_id - 1)
        before = torch.zeros_like(number).unsqueeze(1)  # tokens with the logit in earlier tiles
        for first_id, logits in self.rows.tiles():
            equal = logits == logit
            index = before + equal.cumsum(dim=1)
            ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
            ids = ids.where(equal & (index <= number.unsqueeze(1)), -1)
            token, before = token.maximum(ids.amax(dim=1)), index[:, -1:]
        return token

    def best_of_last_digit(
        self,
        search: Search,
        last: LastDigits,
        keep_ties: Tensor,
        ends: OtherEnds,
        *,
        weighs: bool,
    ) -> Tensor:
        """Return the best score words of kept sets, or `ShardLogits.best_and_mass` of them, and in
        one column more where this rank's part of them ends.

        Args:
            search, last, keep_ties, ends: as in `last_digit`.
            weighs: which of the two is returned.
        """
        cut = self.last_digit(search, last, keep_ties, ends)
        best = self.rows.best_and_mass(cut) if weighs else self.rows.best_kept(cut)
        return torch.cat([best, self.rows.of_undone(cut.unsqueeze(1))], dim=1)

    def set_sizes(self, gathered: Tensor, cut: Tensor, cap: int, drawn: Tensor) -> SetSizes:
        """Return how large the kept sets of all rows are, and which of them are listed.

        Args:
            gathered: int64 [W, F, 2], mass and number of the kept tokens of each rank.
            cut: int64 [F], where the sets end.
            cap: most tokens of a set that is listed.
            drawn: bool [F], the rows that have a set.
        """
        masses, counts = gathered.unbind(dim=2)
        # Of a row that is not random the first token is kept, if there is one.
        random = self.rows.noise.random.squeeze(1)
        mass, sizes = masses.sum(dim=0).where(random, TOP_MASS), counts.sum(dim=0)
        sizes = sizes.where(random, (cut < ABOVE_ALL).to(sizes.dtype)) * drawn
        whole = sizes == self.rows.vocab_size
        listed = (sizes <= cap) & ~whole
        kept = sizes * listed
        needed = (counts * (kept > 0)).max(), kept.max(), kept.sum()
        return SetSizes(
            sizes=sizes,
            whole=whole,
            overflow=~(listed | whole),
            offsets=F.pad(kept.cumsum(dim=0), (1, 0)),
            mass=mass,
            cut=cut.where(kept > 0, ABOVE_ALL),
            needed=torch.stack(needed),
        )

    def bin_of(self, bins: Tensor, limit: Tensor, share: Tensor | None = None) -> Search:
        """Return the bin of each row, as `prefix`, in which the sum over bins reaches a limit.

        A limit above the row's whole weight needs no search, and the row gets `BINS`. So does a
        limit equal to the number of all tokens. A limit equal to the whole mass is searched,
        because tokens without mass may follow.

        Args:
            bins: [F, BINS], the numbers or the masses of bins, summed over the ranks.
            limit: int64 [F] >= 1; or, with `share`, the mass to take that share of.
            share: float64 [F], those shares; None where there are limits.
        """
        limit = limit if share is None else mass_limit(limit, share)
        nothing = torch.zeros_like(limit)
        search = self.next_digit(Search(nothing, nothing, limit), bins)
        whole = bins.sum(dim=1)
        reached = limit < whole if share is None else limit.clamp(min=1) <= whole
        prefix = (BINS - 1 - search.prefix).where(reached, BINS)
        return search._replace(prefix=prefix)

    def words_in_bin(
        self, bins: Tensor, limit: Tensor, share: Tensor | None = None, *, mass: bool
    ) -> Tensor:
        """Return an upper bound of how many words all ranks have in `bin_of` each row.

        Args:
            mass: whether `bins` are masses, or numbers.

        Returns:
            int64 [F]; 0 if masses bound nothing, which is so from `COUNTED_BINS` on.
        """
        index = self.bin_of(bins, limit, share).prefix
        place = index.clamp(max=BINS - 1)
        words = bins.gather(1, place.unsqueeze(1)).squeeze(1).to(torch.int64)
        if mass:
            words = (tokens_per_mass(bins.device)[1, place] * words).floor().to(torch.int64)
        return words.where(index < BINS, 0)

    def search_bins(
        self, bins: Tensor, limit: Tensor, count: int, share: Tensor | None = None
    ) -> tuple[Search, Tensor]:
        """Return the search in `bin_of` each row, and the `words_of_bin` of this rank.

        Args:
            count: how many words are listed.
        """
        search = self.bin_of(bins, limit, share)
        return search, self.words_of_bin(search.prefix, count)

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
        """Return where the sum over the words of a bin reaches its limit.

        Args:
            search: of `search_bins`; its prefix may mean nothing.
            listed: int64 [W, F, 1 + n], the `words_of_bin` of all ranks.
            keep_ties: int64 [F], whether the last word of the same logit is meant.
            mass: whether a token's weight is its mass, or one.
            least, of_greedy: as in `last_cut`, if that is wanted of these words.

        Returns:
            int64 [F], that word, or the least one in a row without words; and bool [F], whether
            some were not listed, so that the word means nothing.
        """
        words = listed[:, :, 1:].transpose(0, 1).flatten(1).sort(dim=1, descending=True).values
        cut = self.reached_at(search, words, mass=mass).clamp(min=word.LOWEST_DRAWABLE)
        left = (listed[:, :, 0] >= listed.shape[2]).any(dim=0) & (self.rows.largest > -torch.inf)
        cut = torch.where(keep_ties > 0, cut & ~word.TOKEN_MASK, cut)  # the last of its logit
        if least is not None:
            cut = self.rows.last_cut(least.maximum(cut), of_greedy=of_greedy)
        return cut, left

    def reached_at(self, search: Search, words: Tensor, *, mass: bool) -> Tensor:
        """Return int64 [F], the first of descending words [F, n] at which a sum reaches its limit.

        It begins with `search.reached`. If it never reaches the limit, the last word is returned.
        """
        there = words > 0
        weight = self.rows.masses(word.value_of(words)) * there if mass else there
        upto = search.reached.unsqueeze(1) + weight.cumsum(dim=1)
        column = (upto < search.limit.unsqueeze(1)).sum(dim=1, keepdim=True)
        return words.gather(1, column.clamp_(max=words.shape[1] - 1)).squeeze(1)

    def listed_sets(self, words: Tensor, sets: SetSizes, total: int) -> tuple[Tensor, Tensor]:
        """Return the concatenated kept sets of the rows: their ids and log masses.

        Args:
            words: int64 [F, n], the order words of each set, descending, then others or 0.
            total: room for tokens of all sets. Behind the last are -1 and NaN.

        Returns:
            int64 [total], and float64 [total], (x - max x) / T - ln(Σ q / 2^40).
        """
        top, temperature = self.rows.largest.unsqueeze(1), self.rows.temperature.unsqueeze(1)
        log_masses = below_top(word.value_of(words), top, temperature)
        log_masses = log_masses - log_totals(sets.mass).unsqueeze(1)
        index = sets.offsets[:-1, None] + torch.arange(words.shape[1], device=words.device)
        kept = (words > 0) & (words >= sets.cut.unsqueeze(1))
        index = index.where(kept, total).flatten()  # behind the last set where there is none
        ids = words.new_full((total + 1,), word.NO_TOKEN)
        padded = log_masses.new_full((total + 1,), torch.nan)
        ids.scatter_(0, index, word.token_of(words).flatten())
        return ids[:-1], padded.scatter_(0, index, log_masses.flatten())[:-1]

    def _bins_of(self, logits: Tensor) -> Tensor:
        """Return the bins of logits [F, n], int64; see `tpsample.core.order.bins_of`."""
        return bins_of(logits, self.rows.largest, self.rows.temperature)
