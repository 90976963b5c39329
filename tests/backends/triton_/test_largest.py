"""The largest words of each row: the same as `torch.topk` gives."""

from __future__ import annotations

import pytest
import torch

from tpsample.backends.triton_ import largest as tested
from tpsample.backends.triton_.largest import FEW, MOST, Start, first_of, in_order, largest


def _words(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Return words of 52 bits, close to each other in some rows, with zeros between them."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([2**52, 2**20, width])[torch.arange(rows) % 3].unsqueeze(1)
    words = torch.stack([torch.randperm(width, generator=generator) for _ in range(rows)])
    words = words * (spread // width) + torch.randint(width, (rows, 1), generator=generator)
    words[:, 3::7] = 0
    return words


def _expected(words: torch.Tensor, count: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(words, (0, count))
    return padded.topk(count, dim=1).values


@pytest.mark.parametrize("width", [1, 5, 1000, 2 * tested.BLOCK + 77])
@pytest.mark.parametrize("count", [1, 2, 8, 255, FEW, FEW + 1, MOST])
def test_they_are_those_of_topk(width: int, count: int) -> None:
    words = _words(4, width)
    words[3] = 0  # a row without words
    assert torch.equal(largest(words, count), _expected(words, count))


def test_words_behind_a_number_do_not_count() -> None:
    words = _words(3, 900, seed=1)
    number = torch.tensor([0, 17, 5000], dtype=torch.int32)
    found = largest(words, 20, number)
    inside = torch.arange(900) < number.unsqueeze(1)
    assert torch.equal(found, _expected(words * inside, 20))


@pytest.mark.parametrize("width", [3000, 5000])
@pytest.mark.parametrize("count", [3, 17, 300])
def test_a_first_selection_is_in_any_order_and_names_its_least(count: int, width: int) -> None:
    words = _words(3, width, seed=4)
    words[1, 2:] = 0
    start = Start(torch.empty(3, dtype=torch.int64), torch.ones(3, dtype=torch.int32))
    found = largest(words, count, start=start, ordered=False)
    assert torch.equal(found.sort(dim=1, descending=True).values, _expected(words, count))
    not_less = (words >= start.least.unsqueeze(1)).sum(dim=1)
    assert not_less.tolist() == [count, (words[1] > 0).sum(), count]
    assert start.least[1] == 1 and start.number.tolist() == [0, 0, 0]


@pytest.mark.parametrize("width", [6, MOST, MOST + 5])
def test_words_are_put_in_order(width: int) -> None:
    words = _words(2, width, seed=2)
    assert torch.equal(in_order(words), words.sort(dim=1, descending=True).values)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("count", [4, 40])
def test_first_words_of_all_ranks_are_merged(world_size: int, count: int) -> None:
    words = _words(2, world_size * 40, seed=3).view(2, world_size, 40).transpose(0, 1)
    words = words.sort(dim=2, descending=True).values
    merged = words[:, :, :count].transpose(0, 1).flatten(1)
    assert torch.equal(first_of(words, count), _expected(merged, count))


def test_no_rows() -> None:
    assert largest(torch.zeros(0, 5, dtype=torch.int64), 3).shape == (0, 3)
