"""Where kept sets end, and what they hold. Twin: `tpsample.backends.torch_.cuts`."""

from __future__ import annotations

import math

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, jit
from tpsample.backends.numba_.kernels.heap import push, sort
from tpsample.backends.numba_.kernels.inputs import BLOCK
from tpsample.backends.numba_.kernels.masses import mass_limit, mass_row, weigh_block
from tpsample.backends.numba_.kernels.noise import is_random, safe_temperature
from tpsample.backends.numba_.kernels.numbers import pack, value_of
from tpsample.backends.numba_.kernels.passes import last_cut, least_word, words_of_block
from tpsample.backends.numba_.kernels.primitives import larger, smaller
from tpsample.core import order
from tpsample.core.masses import TOP_MASS
from tpsample.core.order import ABOVE_ALL, BINS, DIGIT_BITS, DIGITS
from tpsample.core.word import EPOCH_SHIFT, KEY_NAN, LOWEST_DRAWABLE, TOKEN_BITS, TOKEN_MASK

KEY_DIGIT = 11
"""Bits of a key by which words are ordered at a time."""
BINS_PER_Y, LARGEST, LAST_BIN = F32(order.BINS_PER_Y), F32(order.LARGEST), F32(order.BINS - 1)


@jit()
def bins_of_block(logits, top, per_logit, bins):
    """Find the bins of the logits of neighbouring ids; -1 where a token is masked."""
    for j in range(len(logits)):
        steps = F32(F32(top - logits[j]) * per_logit) if logits[j] < top else F32(0)
        index = I32(steps if steps < LAST_BIN else LAST_BIN)
        bins[j] = index if logits[j] > F32(-np.inf) else I32(-1)


@jit()
def bins_per_logit(temperature):
    """Return how many bins one logit is wide at a temperature."""
    return smaller(F32(BINS_PER_Y / temperature), LARGEST)


@jit(in_parts=True, allocates=True)
def sums_of_bins(start, stop, part, arguments):
    """Count the tokens in the bins of each row; or weigh them, and those down to cuts.

    Args:
        cut: int64 [F], or no rows, to count tokens.
        out: int64 [F, BINS], with a cut [F, BINS + 1]; zeros.
    """
    stored, top, cut, out = arguments
    num_ids, weighs = stored.logits.shape[1], len(cut) > 0
    power, mass, bins = np.empty(BLOCK, F32), np.ones(BLOCK, I64), np.empty(BLOCK, I32)
    words = np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, mass_numbers = stored.logits[row], mass_row(top[row], stored.temperature[row])
        per_logit, total = bins_per_logit(stored.temperature[row]), I64(0)
        least = cut[row] if weighs else I64(LOWEST_DRAWABLE)
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            bins_of_block(part, top[row], per_logit, bins)
            if weighs:
                weigh_block(part, mass_numbers, power, mass)
            for j in range(len(part)):
                if bins[j] >= 0:
                    out[row, bins[j]] += mass[j]
            if least <= LOWEST_DRAWABLE:
                continue
            if words_of_block(part, stored.first_id + base, words) >= least:
                for j in range(len(part)):
                    total += mass[j] if words[j] >= least else I64(0)
        if weighs:
            out[row, BINS] = total if least > LOWEST_DRAWABLE else out[row, :BINS].sum()


@jit()
def bin_reached(bins, limit):
    """Return the first bin at which a sum reaches a limit >= 1, the sum before it, and the whole.

    A limit above the whole sum counts as the whole.

    Args:
        bins: int64 [BINS].
    """
    whole, upto, index = I64(0), I64(0), 0
    for j in range(len(bins)):
        whole += bins[j]
    while upto + bins[index] < smaller(limit, whole):
        upto += bins[index]
        index += 1
    return index, upto, whole


@jit(entry=True)
def list_ends(bins, total, share, per_mass, number, top, temperature, cut, room):
    """Find where lists end, and bounds of their words; twin: `Cuts.list_end`.

    Args:
        bins: int64 [F, BINS], masses.
        total, share: int64 and float64 [F].
        per_mass: fp32 [2, BINS], of `tpsample.core.order.tokens_per_mass`.
        number: least words of a list.
        top, temperature: fp32 [F], the latter of the requests.
        cut, room: int64 [F], out.
    """
    for row in range(len(bins)):
        if not top[row] > F32(-np.inf):
            is_nan = top[row] != top[row]
            cut[row], room[row] = (I64(KEY_NAN) << I64(TOKEN_BITS)) if is_nan else I64(1), 1
            continue
        masses, listed, few, limit = bins[row], I64(0), I64(0), mass_limit(total[row], share[row])
        for j in range(BINS):
            listed += I64(math.ceil(F32(masses[j]) * per_mass[0, j]))
            few += listed < number
        last, _, whole = bin_reached(masses, limit)
        end = larger(last if larger(limit, I64(1)) <= whole else BINS, few)
        words = I64(0)
        for j in range(smaller(end + 2, BINS)):
            words += I64(math.floor(F32(masses[j]) * per_mass[1, j]))
        is_bounded = end + 1 < order.COUNTED_BINS and is_random(temperature[row])
        room[row] = words if is_bounded else ABOVE_ALL
        y = F64(end + (1 + order.BIN_MARGIN)) / -order.BINS_PER_Y
        cut[row] = least_word(top[row], safe_temperature(temperature[row]), y)


@jit()
def search_of(bins, limit, share, row):
    """Return the numbers of `Cuts.bin_of`, in the order of `Search`.

    Args:
        bins: int64 [F, BINS], of all ranks.
        limit: int64 [F] >= 1; or, with shares, the mass to take that share of.
        share: float64 [F], or no rows.
    """
    wanted = mass_limit(limit[row], share[row]) if len(share) else limit[row]
    index, before, whole = bin_reached(bins[row], wanted)
    reached = larger(wanted, I64(1)) <= whole if len(share) else wanted < whole
    return index if reached else BINS, before, smaller(wanted, whole)


@jit(entry=True)
def words_in_bin(bins, limit, share, per_mass, words):
    """Bound how many words are in a bin of each row; twin: `Cuts.words_in_bin`.

    Args:
        bins, limit, share: of `search_of`.
        per_mass: fp32 [2, BINS], of `tpsample.core.order.tokens_per_mass`; no rows for numbers.
        words: int64 [F], out.
    """
    for row in range(len(words)):
        index, _, _ = search_of(bins, limit, share, row)
        number = bins[row, index] if index < BINS else I64(0)
        if len(per_mass) and index < BINS:
            number = I64(math.floor(F32(number) * per_mass[1, index]))
        words[row] = number


@jit(in_parts=True, allocates=True)
def search_bins(start, stop, part, arguments):
    """Find the bin of each row in which a sum reaches its limit, and list its order words.

    Args:
        sums, limit, share: of `search_of`.
        search: int64 [3, F], out: the fields of the `Search` that `Cuts.bin_of` returns.
        out: int64 [F, 1 + count], zeros: how many words there are, and some of them.
    """
    stored, top, sums, limit, share, search, out = arguments
    num_ids, room, bins = stored.logits.shape[1], out.shape[1], np.empty(BLOCK, I32)
    for row in stored.rows[start:stop]:
        index, before, wanted = search_of(sums, limit, share, row)
        search[0, row], search[1, row], search[2, row] = index, before, wanted
        logits, number = stored.logits[row], I64(0)
        per_logit = bins_per_logit(stored.temperature[row])
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            bins_of_block(part, top[row], per_logit, bins)
            for j in range(len(part)):
                if bins[j] == index:
                    number += 1
                    if number < room:
                        out[row, number] = pack(part[j], stored.first_id + base + j)
        out[row, 0] = number


@jit()
def reached_at(words, weighs, mass_numbers, reached, limit, room):
    """Return the first of descending words at which a sum reaches its limit, or the last word.

    Args:
        words: int64 [n]; behind the last are zeros.
        weighs: whether a token counts with its mass, or as one.
        room: what `weigh_block` reads and writes, [n] each.
    """
    logits, power, mass = room
    for j in range(len(words)):
        logits[j], mass[j] = value_of(words[j]), 1
    if weighs:
        weigh_block(logits, mass_numbers, power, mass)
    upto, column = reached, -1
    while column < len(words) - 1 and (column < 0 or upto < limit):
        column += 1
        upto += mass[column] if words[column] > 0 else I64(0)
    return words[column]


@jit(entry=True)
def cuts_of_bins(listed, search, keep_ties, weighs, rows, ends, cut, left):
    """Find where sums over the words of bins reach their limits; twin: `Cuts.cut_of`.

    Args:
        listed: int64 [W, F, 1 + n], of `search_bins`.
        search: its `reached` and `limit`, int64 [F] each.
        keep_ties: int64 [F]; weighs: whether a token counts with its mass, or as one.
        rows: fp32 [F] each: largest logits, temperatures for masses, and those of the requests.
        ends: int64 [F] or no rows: the largest cuts of other rules, and the cuts of greedy rows.
        cut: int64 [F], out; left: bool [F], out, whether words are missing.
    """
    (reached, limit), (top, temperature, given), (least, of_greedy) = search, rows, ends
    num_ranks, num_rows, width = listed.shape
    count = num_ranks * (width - 1)
    words = np.empty(count, I64)
    room = np.empty(count, F32), np.empty(count, F32), np.empty(count, I64)
    for row in range(num_rows):
        words[:], left[row] = 0, False
        for rank in range(num_ranks):
            left[row] |= listed[rank, row, 0] >= width
            for j in range(1, smaller(listed[rank, row, 0] + 1, width)):
                push(words, count, listed[rank, row, j])
        sort(words)
        left[row] &= top[row] > F32(-np.inf)
        found = reached_at(
            words, weighs, mass_row(top[row], temperature[row]), reached[row], limit[row], room
        )
        found = larger(found, I64(LOWEST_DRAWABLE))
        found = found & ~I64(TOKEN_MASK) if keep_ties[row] > 0 else found
        if len(least):
            other = of_greedy[row] if len(of_greedy) else I64(LOWEST_DRAWABLE)
            found = last_cut(top[row], given[row], larger(least[row], found), other)
        cut[row] = found


@jit(entry=True)
def set_sizes(
    gathered, end, temperature, drawn, cap, vocab_size, sizes, whole, overflow, offsets, mass, cut,
    needed,
):  # fmt: skip
    """Find how large kept sets are, and which are listed; twin: `Cuts.set_sizes`.

    Args:
        gathered: int64 [W, F, 2]; end: int64 [F]; drawn: bool [F].
        temperature: fp32 [F], of the requests.
        sizes, whole, overflow, offsets, mass, cut, needed: out, as in `SetSizes`; `needed` are
            zeros.
    """
    offsets[0] = 0
    for row in range(len(end)):
        total, size, longest = I64(0), I64(0), I64(0)
        for rank in range(len(gathered)):
            total += gathered[rank, row, 0]
            size += gathered[rank, row, 1]
            longest = larger(longest, gathered[rank, row, 1])
        if not is_random(temperature[row]):  # the first token is kept, if there is one
            total, size = I64(TOP_MASS), I64(end[row] < ABOVE_ALL)
        size = size if drawn[row] else I64(0)
        whole[row], overflow[row] = size == vocab_size, size != vocab_size and size > cap
        kept = I64(0) if whole[row] or overflow[row] else size
        sizes[row], mass[row], offsets[row + 1] = size, total, offsets[row] + kept
        cut[row] = end[row] if kept > 0 else ABOVE_ALL
        if kept > 0:
            needed[0], needed[1] = larger(needed[0], longest), larger(needed[1], kept)
    needed[2] = offsets[len(end)]


@jit()
def values_of_prefix(prefix, shift):
    """Return the least and the largest fp32 number of words that begin with a prefix."""
    if shift >= EPOCH_SHIFT:
        return F32(-np.inf), F32(np.inf)
    return value_of(prefix << I64(shift)), value_of(((prefix + I64(1)) << I64(shift)) - I64(1))


@jit(in_parts=True, allocates=True)
def digits(start, stop, part, arguments):
    """Make the histogram of a digit; twin: `tpsample.backends.torch_.cuts.Cuts.digits`.

    Args:
        least: int64 [F], words below are in no bin.
        weighs: whether a token counts with its mass, or as one.
        bins: int64 [F, DIGITS], zeros.
    """
    stored, top, prefix, least, shift, weighs, bins = arguments
    num_ids = stored.logits.shape[1]
    power, mass, words = np.empty(BLOCK, F32), np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    mass[:] = 1
    for row in stored.rows[start:stop]:
        logits, mass_numbers = stored.logits[row], mass_row(top[row], stored.temperature[row])
        lowest, highest = values_of_prefix(prefix[row], shift + DIGIT_BITS)
        for base in range(0, num_ids, BLOCK):
            part, near, num_counted = logits[base : base + BLOCK], I32(0), 0
            for j in range(len(part)):  # a NaN is near every number
                near += I32(not (part[j] < lowest or part[j] > highest))
            if not near:
                continue
            words_of_block(part, stored.first_id + base, words)
            for j in range(len(part)):
                counts = part[j] > F32(-np.inf)
                counts &= words[j] >> I64(shift + DIGIT_BITS) == prefix[row]
                counts &= words[j] >= least[row]
                words[j] = words[j] if counts else I64(0)
                num_counted += counts
            if not num_counted:
                continue
            if weighs:
                weigh_block(part, mass_numbers, power, mass)
            for j in range(len(part)):
                if words[j] > 0:
                    bins[row, ~(words[j] >> I64(shift)) & I64(DIGITS - 1)] += mass[j]


@jit(in_parts=True)
def nth_equal(start, stop, part, arguments):
    """Find the id of the n-th token with a logit, as `tpsample.backends.torch_.cuts` has it."""
    stored, logit, number, out = arguments
    for row in stored.rows[start:stop]:
        logits, left, column = stored.logits[row], number[row], -1
        while left > 0 and column + 1 < len(logits):
            column += 1
            left -= I64(logits[column] == logit[row])
        out[row] = stored.first_id + column


@jit()
def key_digit(word, shift):
    """Return a digit of a word, inverted, so that the largest comes first."""
    return ~(word >> I64(shift)) & I64((1 << KEY_DIGIT) - 1)


@jit(allocates=True)
def order_by_key(words, spare, starts):
    """Order words whose ids ascend: the largest first, so by keys alone.

    A stable radix sort from the last digit of the keys to the first, as fast for flat rows as for
    any. A digit that all words share moves none.

    Args:
        spare: int64, room for as many words.
        starts: int64 [2^KEY_DIGIT], where the words of a digit go.
    """
    count, first = len(words), True
    for shift in range(TOKEN_BITS, EPOCH_SHIFT, KEY_DIGIT):
        starts[:] = 0
        for j in range(count):
            starts[key_digit(words[j] if first else spare[j], shift)] += 1
        before, shared = I64(0), False
        for digit in range(len(starts)):
            number = starts[digit]
            shared |= number == count
            starts[digit], before = before, before + number
        if shared:
            continue
        for j in range(count):
            word = words[j] if first else spare[j]
            index = starts[key_digit(word, shift)]
            starts[key_digit(word, shift)] = index + 1
            if first:
                spare[index] = word
            else:
                words[index] = word
        first = not first
    if not first:
        words[:] = spare[:count]


@jit(in_parts=True, allocates=True)
def words_from(start, stop, part, arguments):
    """Find the order words of rows that reach cuts, int64 [F], descending.

    Args:
        out: int64 [F, count], zeros; as many words of a row as there is room for.
    """
    stored, cut, out = arguments
    num_ids, room, words = stored.logits.shape[1], out.shape[1], np.empty(BLOCK, I64)
    spare, starts = np.empty(room, I64), np.empty(1 << KEY_DIGIT, I64)
    for row in stored.rows[start:stop]:
        logits, least, number = stored.logits[row], cut[row], I64(0)
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            if words_of_block(part, stored.first_id + base, words) < least:
                continue
            for j in range(len(part)):
                if words[j] >= least and number < room:
                    out[row, number] = words[j]
                    number += 1
        order_by_key(out[row, :number], spare, starts)


@jit(in_parts=True)
def listed_sets(start, stop, part, arguments):
    """List the ids and log masses of kept sets, int64 and float64 [total].

    Args:
        words: int64 [F, n], descending, then others or 0.
        cut: int64 [F], where the sets end.
        log_totals: float64 [F], ln(Σ q / 2^40).
        offsets: int64 [F + 1], where the sets begin.
    """
    words, cut, temperature, top, log_totals, offsets, ids, log_masses = arguments
    for row in range(start, stop):
        largest, row_temperature, first = F64(top[row]), F64(temperature[row]), offsets[row]
        for j in range(words.shape[1]):
            if words[row, j] == 0 or words[row, j] < cut[row]:
                break
            logit = F64(value_of(words[row, j]))
            below = F64(0) if logit == largest else (logit - largest) / row_temperature
            ids[first + j] = I64(TOKEN_MASK) - (words[row, j] & I64(TOKEN_MASK))
            log_masses[first + j] = below - log_totals[row]
