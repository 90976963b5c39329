"""Words to tokens. Twin: `tpsample.backends.torch_.decode.decode_words`."""

from __future__ import annotations

from tpsample.backends.numba_.kernels.compiling import I64, jit
from tpsample.backends.numba_.kernels.numbers import key_of
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.core.word import KEY_MINUS_INF, KEY_NAN, NO_TOKEN, TOKEN_MASK, Status

OK, NAN, EMPTY = int(Status.OK), int(Status.NAN), int(Status.EMPTY)


@jit()
def token_of(word):
    """Return the token of a score word, -1 if there is none, and its status."""
    key = key_of(word)
    failed = NAN if key == KEY_NAN else EMPTY if key <= KEY_MINUS_INF else OK
    token_id = I64(TOKEN_MASK) - (word & I64(TOKEN_MASK))
    return token_id if failed == OK else I64(NO_TOKEN), failed


@jit(entry=True)
def decode(words, seeds, token_ids, status, out_seeds):
    """Write tokens, status and seeds of the largest words, and clear the words.

    Args:
        words: int64 [sources, samples · B], sample-major.
        token_ids: int64 [B, samples], -1 where there is none.
        status: int32 [B].
        seeds, out_seeds: int64 [B].
    """
    num_rows, samples = token_ids.shape
    for row in range(num_rows):
        worst = OK
        for sample in range(samples):
            best = I64(0)
            for source in range(words.shape[0]):
                best = larger(best, words[source, sample * num_rows + row])
                words[source, sample * num_rows + row] = 0
            token_ids[row, sample], failed = token_of(best)
            worst = larger(worst, failed)
        status[row] = worst
        out_seeds[row] = seeds[row]


@jit(entry=True)
def write_tokens(words, index, token_ids, status):
    """Write tokens and status of score words, but not of a row that is lost or not drawn.

    Args:
        words: int64 [F, samples].
        index: int64 [F], rows of the others.
        token_ids, status: as `decode` takes them.
    """
    for i in range(len(index)):
        row, worst = index[i], OK
        if token_ids[row, 0] == NO_TOKEN and status[row] != NAN and status[row] != EMPTY:
            continue
        for sample in range(words.shape[1]):
            token_ids[row, sample], failed = token_of(words[i, sample])
            worst = larger(worst, failed)
        status[row] = worst
