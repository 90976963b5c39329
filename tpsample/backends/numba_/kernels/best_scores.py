"""The best scores of filtered rows, and what they decide.

Twins: `best_scores` and `first_kept` of `tpsample.backends.torch_.passes`.
"""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, I64, jit
from tpsample.backends.numba_.kernels.heap import push, sort
from tpsample.backends.numba_.kernels.masses import mass_limit, mass_row, power_of, rounded
from tpsample.backends.numba_.kernels.numbers import key_of, pack, value_of
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.core.word import KEY_MINUS_INF, KEY_NAN, TOKEN_BITS, TOKEN_MASK


@jit()
def mark_of(orders, first, c):
    """Return an order word of best scores, 0 if one with a better score comes before it.

    Args:
        orders: int64, the order words of a row.
        first: the index of the best score of the sample that index c is of.
    """
    for better in range(first, c):
        if orders[better] > orders[c]:
            return I64(0)
    return orders[c]


@jit(entry=True)
def known_best(first, best, error_bound, logits, first_id, count, out):
    """Find what a rank sends for the rejection, of rows that store upper ends; return their number.

    Args:
        first: int64 [threads, F, n], the first order words, in any order.
        best: int64 [threads, F, samples, m], the best score words, in any order.
        error_bound: fp32 [F]; a row in which it is 0 stores its logits, and is left out.
        logits: fp32 [F, V_local], of the ids from first_id on; those of the best words themselves.
        out: int64 [F, 1 + 2 · samples · count], zeros; see `ShardLogits.best_scores`.
    """
    threads, _, samples, num_words = best.shape
    known = 0
    for i in range(len(error_bound)):
        if error_bound[i] == F32(0):
            continue
        known += 1
        top = I64(0)
        for thread in range(threads):
            for word in first[thread, i]:
                top = larger(top, word)
        if top == 0 and error_bound[i] < F32(np.inf):  # all are masked
            for v in range(logits.shape[1]):
                top = larger(top, pack(logits[i, v], first_id + v))
        out[i, 0] = top
        for sample in range(samples):
            begin = 1 + sample * count
            scores = out[i, begin : begin + count]
            for thread in range(threads):
                for j in range(num_words):
                    push(scores, count, best[thread, i, sample, j])
            sort(scores)
            orders = out[i, begin + samples * count : begin + (samples + 1) * count]
            for c in range(count):
                if scores[c]:
                    token_id = I64(TOKEN_MASK) - (scores[c] & I64(TOKEN_MASK))
                    orders[c] = pack(logits[i, token_id - first_id], token_id)
    return known


@jit(entry=True)
def first_kept(best, sums, count, temperature, limits, bounded, words, decided, top):
    """Find the first of the best scores of each row that is in its kept set.

    Args:
        best: int64 [F, 1 + 2 C], those of all ranks, `count` for each sample.
        top: fp32 [F], out: the largest logits.
        sums: int64 [F, 2 C + 1], those of `ShardLogits.before`; with `bounded` [F, 2 (C + 1)] or
            [F, 4 (C + 1)], those of `ends.bound_best` of the best scores and of the total.
        temperature: fp32 [F].
        limits: most, share and least of `tpsample.request.filters.Thresholds`, [F] each.
        words: int64 [F, samples].
        decided: bool [F], whether the words are those that the filters keep.
    """
    most, shares, leasts = limits
    num_marks, samples = (best.shape[1] - 1) // 2, words.shape[1]
    counts = sums.shape[1] > 2 * (num_marks + 1)
    for i in range(len(best)):
        orders, of_row, key = best[i, 1 + num_marks :], sums[i], key_of(best[i, 0])
        top[i] = value_of(best[i, 0])
        mass_numbers = mass_row(top[i], temperature[i])
        at_least = of_row[num_marks] if bounded else of_row[2 * num_marks]
        at_most = of_row[2 * num_marks + 1] if bounded else at_least
        low, high = mass_limit(at_least, shares[i]), mass_limit(at_most, shares[i])
        decided[i] = True
        for sample in range(samples):
            sure_word, word, first = I64(0), I64(0), sample * count
            for c in range(first, first + count):
                mark = mark_of(orders, first, c)
                if mark < leasts[i] or mark == 0:
                    continue
                before, number = of_row[c], of_row[num_marks + c]
                sure = possible = before < low and number < most[i]
                if bounded:
                    # The upper bound counts a mark as before itself.
                    power, _, _ = power_of(value_of(mark), mass_numbers)
                    sure = of_row[num_marks + 1 + c] - rounded(power) < low
                    possible = before < high
                    if counts:
                        possible &= of_row[2 * (num_marks + 1) + c] < most[i]
                        sure &= of_row[3 * (num_marks + 1) + c] <= most[i]
                score = best[i, 1 + c]
                sure_word = larger(sure_word, score if sure else I64(0))
                word = larger(word, score if possible else I64(0))
            decided[i] &= word > 0 and word == sure_word
            words[i, sample] = word
        decided[i] |= key <= KEY_MINUS_INF or key == KEY_NAN
        if top[i] != top[i]:
            words[i] = I64(KEY_NAN) << I64(TOKEN_BITS)
