"""The candidate word: integer order is (score descending, token id ascending)."""

import struct

import pytest
import torch

from tpsample.core import word
from tpsample.core.word import Status

INF = float("inf")
NAN = float("nan")


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def test_key_is_monotone_over_the_floats():
    """Every 4099th bit pattern and all neighbours of the special ones, sorted by value."""
    special = [b + d for b in (0, 0x00800000, 0x3F800000, 0x7F800000, 0x80000000, 0xFF800000)
               for d in (-2, -1, 0, 1, 2) if 0 <= b + d < 2**32]  # fmt: skip
    bits = torch.cat([torch.arange(0, 2**32, 4099), torch.tensor(special)])
    floats = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    floats = floats[~floats.isnan()]
    order = floats.argsort(stable=True)
    keys = word.key(floats[order])
    steps, rises = keys.diff(), floats[order].double().diff() > 0
    assert (steps[rises] > 0).all()
    assert (steps[~rises] == 0).all()


def test_the_best_score_wins_and_ties_go_to_the_lowest_id():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(-3, 4, (200, 50), generator=generator).float() * 0.25
    scores[scores == 0] *= torch.where(torch.rand(200, 50, generator=generator) < 0.5, -1, 1)[
        scores == 0
    ]
    ids, status = word.decode(word.pack(scores, torch.arange(50)).amax(dim=1))
    best = scores.amax(dim=1, keepdim=True)
    expected = torch.where(scores == best, torch.arange(50), 50).amin(dim=1)
    assert torch.equal(ids, expected)
    assert (status == Status.OK).all()


@pytest.mark.parametrize(
    ("scores", "token", "status"),
    [
        ([1.0, NAN, 2.0], -1, Status.NAN),
        ([1.0, -NAN, INF], -1, Status.NAN),
        ([-INF, -INF, -INF], -1, Status.EMPTY),
        ([-INF, -3.0e38, -INF], 1, Status.OK),
        ([5.0, INF, INF], 1, Status.OK),
        ([-0.0, 0.0, -1.0], 0, Status.OK),
    ],
    ids=["nan", "negative-nan", "all-masked", "one-left", "two-forced", "signed-zeros"],
)
def test_special_scores(scores, token, status):
    best = word.pack(torch.tensor(scores), torch.arange(3)).amax()
    token_ids, row_status = word.decode(best)
    assert (token_ids.item(), row_status.item()) == (token, status)


def test_words_are_non_negative_and_invert():
    scores = torch.tensor([-INF, -1.5, 0.0, 3.25, INF])
    for token_id in (0, 1, word.MAX_VOCAB_SIZE - 1):
        packed = word.pack(scores, torch.tensor(token_id))
        assert (packed >= 0).all() and (packed < 1 << word.EPOCH_SHIFT).all()
        ids, _ = word.decode(packed[1:])
        assert (ids == token_id).all()


def test_an_untouched_slot_is_empty():
    token_ids, status = word.decode(torch.zeros(3, dtype=torch.int64))
    assert (token_ids == -1).all() and (status == Status.EMPTY).all()


def test_example_of_the_docstring():
    assert word.pack(torch.tensor(0.0), torch.tensor(7)).item() == (0x80000000 << 20) | (2**20 - 8)
    assert word.key(torch.tensor([_float(0x3F800000)])).item() == 0xBF800000


def test_no_word_has_the_least_number():
    words = torch.tensor([0, word.NO_TOKEN & word.TOKEN_MASK, word.LOWEST_DRAWABLE])
    assert word.value_of(words).tolist() == [-INF, -INF, torch.finfo(torch.float32).min]
