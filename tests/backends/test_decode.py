"""Words to tokens by each backend: rows that are not drawn, filtered rows, and lost ones."""

from __future__ import annotations

import pytest
import torch

from tpsample import SampleOutput, Status
from tpsample.backends import room_of
from tpsample.core import word
from tpsample.core.order import order_words
from tpsample.request.plan import FilteredWords, Undrawn

BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton", "numba"])
SAMPLES = pytest.mark.parametrize("num_samples", [None, 3])


@SAMPLES
@BACKENDS
def test_rows_that_are_not_drawn_get_no_token(num_samples, backend):
    rows, samples = torch.arange(70), num_samples or 1
    undrawn = Undrawn(rows % 3 == 0, rows % 6 == 0)
    logits = torch.randn(2, samples * 70, generator=torch.Generator().manual_seed(1))
    logits[:, 3:5] = torch.nan  # one row is drawn, one is not
    words = order_words(logits, 5)
    drawn, skipped = (SampleOutput.empty(rows, num_samples) for _ in range(2))
    room_of(backend).decoder()(words.clone(), rows, drawn)
    drawn.fill_skipped(*undrawn)
    room_of(backend).decoder()(words, rows, skipped, undrawn)
    for name in ("token_ids", "status", "seeds"):
        assert getattr(drawn, name).equal(getattr(skipped, name)), name
    assert skipped.status[:8].tolist() == [4, 0, 0, 0, 1, 0, 4, 0]
    assert (skipped.token_ids.view(70, -1)[:, 0] < 0).equal(undrawn.rows | (rows == 4))


@SAMPLES
@BACKENDS
def test_filtered_rows_get_the_tokens_of_their_own_words(num_samples, backend):
    """Of 70 rows, more than a program of a kernel has, three are filtered. One of them is lost and
    one is not drawn. Places behind the last filtered row are those of rows that store other
    logits."""
    rows, samples = torch.arange(70), num_samples or 1
    place = torch.full((70,), -1, dtype=torch.int32)
    place[[66, 2, 40, 3]], place[1::11] = torch.arange(4, dtype=torch.int32), 5
    words = word.pack(torch.tensor(1.0), rows).repeat(2, samples)
    words[0, 40], words[1, 50] = word.LOST, word.LOST
    own = word.pack(torch.tensor(-2.0), 100 + torch.arange(4).unsqueeze(1)).repeat(1, samples)
    own[3, -1] = word.KEY_NAN << word.TOKEN_BITS
    undrawn = Undrawn(rows == 2, rows == 2)
    out = SampleOutput.empty(rows, num_samples)
    room_of(backend).decoder()(words, rows, out, undrawn, FilteredWords(own, place))
    tokens = out.token_ids.view(70, -1)
    expected = rows.unsqueeze(1).repeat(1, samples)
    expected[66], expected[2], expected[3], expected[3, -1] = 100, -1, 103, -1
    expected[40], expected[[40, 50], 0] = 102, -1
    assert tokens.equal(expected) and not words.any()
    failed = {2: Status.BAD_SLOT, 3: Status.NAN, 40: Status.PEER_LOST, 50: Status.PEER_LOST}
    assert out.status.tolist() == [failed.get(row, 0) for row in range(70)]
