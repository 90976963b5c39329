"""Words to tokens. Twin: `tpsample.exchange.decode.decode_words`."""

from __future__ import annotations

from tpsample.core.word import NO_TOKEN, Status
from tpsample.native.compiling import jit
from tpsample.native.numbers import I64, KEY_MINUS_INF, KEY_NAN, TOKEN_BITS, TOKEN_MASK

OK, NAN, EMPTY = int(Status.OK), int(Status.NAN), int(Status.EMPTY)


@jit(entry=True)
def decode(words, seeds, token_ids, status, out_seeds):  # type: ignore[no-untyped-def]
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
                best = max(best, words[source, sample * num_rows + row])
                words[source, sample * num_rows + row] = 0
            key = (best >> I64(TOKEN_BITS)) & I64(0xFFFFFFFF)
            failed = NAN if key == KEY_NAN else EMPTY if key <= KEY_MINUS_INF else OK
            token = I64(TOKEN_MASK) - (best & I64(TOKEN_MASK))
            token_ids[row, sample] = token if failed == OK else NO_TOKEN
            worst = max(worst, failed)
        status[row] = worst
        out_seeds[row] = seeds[row]
