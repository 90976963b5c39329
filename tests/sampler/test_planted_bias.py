"""Tests of the tests: each planted defect makes the check that guards against it fail."""

import pytest
import torch

from tests.support import biases
from tests.support.agreement import (
    PLANTED_TAILS,
    draws_follow_softmax,
    padding_is_never_seen,
    planted_tail_wins,
    shards_agree,
)
from tests.support.cases import Case


def planted_tails():
    for golden in PLANTED_TAILS:
        planted_tail_wins(golden)


def shards():
    shards_agree(Case.make(1003, 8))


def padding():
    padding_is_never_seen(Case.make(203, 8))


def distribution():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3))
    draws_follow_softmax(logits, 20_000, world_size=2)


CAUGHT_BY = [
    (biases.noise_ends_at_16_6, planted_tails),
    (biases.noise_by_local_id, shards),
    (biases.noise_shared_by_two_ranks, shards),
    (biases.noise_shared_by_two_ranks, distribution),
    (biases.padding_leaks, padding),
    (biases.shard_off_by_one, shards),
]


@pytest.mark.parametrize("check", [planted_tails, shards, padding, distribution])
def test_the_clean_code_passes(check):
    check()


@pytest.mark.parametrize(("plant", "check"), CAUGHT_BY, ids=lambda function: function.__name__)
def test_a_planted_defect_is_caught(plant, check, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("golden", PLANTED_TAILS, ids=lambda g: f"{g[0]} rounds, id {g[2]}")
def test_every_planted_tail_alone_catches_capped_noise(golden, monkeypatch):
    planted_tail_wins(golden)
    biases.noise_ends_at_16_6(monkeypatch)
    with pytest.raises(AssertionError):
        planted_tail_wins(golden)
