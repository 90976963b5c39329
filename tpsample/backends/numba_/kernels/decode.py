"""Words to tokens. Twin: `tpsample.backends.torch_.decode.decode_words`."""

from __future__ import annotations

from tpsample.backends.numba_.kernels.compiling import I64, jit
from tpsample.backends.numba_.kernels.numbers import key_of
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.core.word import KEY_MINUS_INF, KEY_NAN, LOST, NO_TOKEN, TOKEN_MASK, Status

OK, NAN, EMPTY = int(Status.OK), int(Status.NAN), int(Status.EMPTY)
PEER_LOST = int(Status.PEER_LOST)


@jit()
def token_of(word):
    """Return the token of a score word, -1 if there is none, and its status."""
    key = key_of(word)
    failed = NAN if key == KEY_NAN else EMPTY if key <= KEY_MINUS_INF else OK
    token_id = I64(TOKEN_MASK) - (word & I64(TOKEN_MASK))
    return token_id if failed == OK else I64(NO_TOKEN), failed


@jit(entry=True)
def decode(words, seeds, filtered, place, token_ids, status, out_seeds):
    """Write tokens, status and seeds of the largest words, and clear the words.

    Args:
        words: int64 [sources, samples · B], sample-major.
        filtered, place: `FilteredWords`; no rows and no places where there are none.
        token_ids: int64 [B, samples], -1 where there is none.
        status: int32 [B].
        seeds, out_seeds: int64 [B].
    """
    num_rows, samples = token_ids.shape
    for row in range(num_rows):
        worst, its_place = OK, I64(place[row]) if len(place) else I64(-1)
        for sample in range(samples):
            best = I64(0)
            for source in range(words.shape[0]):
                best = larger(best, words[source, sample * num_rows + row])
                words[source, sample * num_rows + row] = 0
            lost = best == I64(LOST)
            if not lost and 0 <= its_place < len(filtered):
                best = filtered[its_place, sample]
            token_ids[row, sample], failed = token_of(best)
            worst = larger(worst, PEER_LOST if lost else failed)
        status[row] = worst
        out_seeds[row] = seeds[row]
