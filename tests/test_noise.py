"""The noise: known answers, accuracy against float64, and the far tail."""

import math
import re

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support import noise_checker
from tpsample import noise, seed_of

# Random123 distribution, kat_vectors: (counter, key, result).
RANDOM123 = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def _hex(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123)
def test_philox_known_answers(counter, key, expected):
    assert noise.philox4x32(_hex(counter), _hex(key)) == _hex(expected)
    assert noise_checker.philox(_hex(counter), _hex(key)) == list(_hex(expected))


def test_signed_and_unsigned_seeds_are_the_same_64_bits():
    ids = torch.arange(8)
    assert torch.equal(noise.words(-1, 3, ids), noise.words(2**64 - 1, 3, ids))


def test_arguments_broadcast():
    seed, position, ids = torch.tensor([[3], [4]]), torch.tensor([[9], [8]]), torch.arange(10)
    table = noise.words(seed, position, ids)
    assert table.shape == (2, 10)
    assert torch.equal(table[1], noise.words(4, 8, ids))


AN_INT = "expected an int or a tensor of int64, got"
NO_NUMBERS = {
    "seed": [(1.5, f"{AN_INT} a float; pass int(seed)"), (True, f"{AN_INT} a bool; pass int"),
             ("1", f"{AN_INT} a str; pass int(seed)"), (None, f"{AN_INT} a NoneType"),
             (torch.ones(2), f"{AN_INT} torch.float32 (2,); pass seed.long()"),
             (2**64 + 1, "expected -2^63 <= seed < 2^64, got 18446744073709551617; "),
             (-(2**63) - 1, "expected -2^63 <= seed"), (10**5000, "expected -2^63 <= seed < 2^64, "
              "got an int of 16610 bits; numbers beyond it have no noise")],
    "position": [(-2, "expected 0 <= position < 2^64, got -2; "), (2**64, "expected 0 <= position"),
                 (torch.tensor([3, -2]), "expected 0 <= position < 2^64, got -2; ")],
    "token_ids": [(-1, "expected 0 <= token_ids < 2^34, got -1; "), (2**34, "expected 0 <= token_"),
                  (torch.tensor([[0], [2**34]]), "expected 0 <= token_ids < 2^34, got 17179869184"),
                  ([1, 2], f"{AN_INT} a list; pass torch.tensor(token_ids)"),
                  (np.arange(2), f"{AN_INT} a ndarray; pass torch.tensor(token_ids)"),
                  (torch.tensor([True]), f"{AN_INT} torch.bool (1,); pass token_ids.nonzero()")],
    "sample": [(2**32, "expected 0 <= sample < 2^32, got 4294967296; "), (-1, "expected 0 <= sam"),
               (torch.tensor(-1), "expected 0 <= sample < 2^32, got -1; ")],
}  # fmt: skip


@pytest.mark.parametrize("function", [noise.words, noise.gumbel])
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_of_the_range_has_no_noise(function, name):
    """Its lowest bits are those of another number, which has the noise."""
    for value, text in NO_NUMBERS[name]:
        given = {"seed": 1, "position": 2, "token_ids": 3, name: value}
        with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(f'{name}: {text}')}"):
            function(**given)


def test_the_ends_of_the_ranges_have_noise():
    last = noise.words(2**64 - 1, 2**64 - 1, 2**34 - 1, sample=2**32 - 1)
    ids = torch.tensor([2**34 - 1], dtype=torch.int64)
    assert noise.words(np.int64(-1), 2**64 - 1, ids, sample=2**32 - 1) == last
    assert noise.words(1, 2, ids[:0]).shape == (0,)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 1001])
@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_a_tile_is_a_window_of_the_row(first, count):
    stream = tuple(word.view(1) for word in noise.row_stream(torch.tensor(7), torch.tensor(9)))
    tile = noise.tile_noise(stream, first, count)
    whole = noise.gumbel(7, 9, torch.arange(first, first + count))
    natural = -(tile.double() + math.log2(math.log(2))) * math.log(2)
    assert torch.equal(natural.float(), whole)


def _true_log2(word: torch.Tensor, quad_xor: torch.Tensor) -> torch.Tensor:
    """log2(-log2(1 - u)) in float64 from the ideal 48-bit uniform."""
    low = ((quad_xor ^ word) & 0xFFFF).double()
    u = word.double() * 2.0**-32 + (low + 0.5) * 2.0**-48
    return torch.log2(-torch.log1p(-u) / math.log(2))


SWEEP = {
    "strided": torch.arange(0, 2**32, 2047),
    "lowest": torch.arange(0, 2**20),
    "quarter": torch.arange(2**30 - 2**16, 2**30 + 2**16),
}


@pytest.mark.parametrize("words", SWEEP.values(), ids=SWEEP.keys())
def test_formula_error(words):
    """Within 1.1e-5 in log2 up to u = 1 - 2^-8 (E = 5.5), everything that can win at all often.

    Beyond, where 1 - u has few bits left, a single value may be off by 2^-25 e^E / E; those words
    have total probability 2^-8 and an average error below 1e-6.
    """
    quad_xor = (words * 2654435761) & 0xFFFFFFFF
    error = (noise.log2_exponential(words, quad_xor).double() - _true_log2(words, quad_xor)).abs()
    common = words < 2**32 - 2**24
    assert error[common].max() < 1.1e-5
    if not common.all():
        weight = (~common).double().mean()
        assert error[~common].mean() * weight < 1e-6


@pytest.mark.parametrize("bits", range(20, 47, 2))
def test_the_law_holds_in_the_far_tail(bits):
    """P(e < x) / (1 - 2^-x) is 1 for x = 2^-bits · log2 e, where fp32 -log(-log(u)) has nothing.

    Counted over every word that can be below x and evenly spaced low halves.
    """
    exponent = 2.0**-bits
    words = torch.arange(max(1, int(exponent * 2**32) + 2))
    lows = torch.arange(0, 65536, max(1, len(words) // 64)) if bits < 36 else torch.arange(65536)
    word, low = torch.broadcast_tensors(words[:, None], lows[None, :])
    value = noise.log2_exponential(word.flatten(), (word ^ low).flatten())
    below = (value < math.log2(exponent / math.log(2))).double().mean()
    probability = below.item() * len(words) * 2.0**-32
    # Evenly spaced lows count a threshold to one step; the 48-bit grid ends at 2^-49.
    slack = 2.0**-32 / len(lows) + 2.0**-49
    assert probability == pytest.approx(-math.expm1(-exponent), rel=2e-5, abs=slack)


def test_noise_is_finite_for_every_extreme_word():
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    for quad_xor in (0, 0xFFFF, 0xFFFFFFFF):
        assert noise.log2_exponential(words, torch.full_like(words, quad_xor)).isfinite().all()


def _minted(master: int, *identity: int) -> int:
    """Follow NOISE.md in plain numbers."""
    seed = master
    for sample, number in enumerate(identity):
        counter = (*noise_checker.halves(number), sample, 0x6D696E74)
        low, high = noise_checker.philox(counter, noise_checker.halves(seed))[:2]
        seed = int(low) | int(high) << 32
    return seed % 2**63


def test_a_seed_follows_from_the_numbers_that_name_a_text():
    names = [(7, 0, 3), (7, 3, 0), (7, 0), (8, 0, 3), (-1, 2**64 - 1, 5), (7, 0, 0, 3), (0, -2)]
    seeds = [seed_of(*each) for each in names]
    assert seeds == [_minted(*each) for each in names]
    assert len(set(seeds)) == len(names) and all(0 <= seed < 2**63 for seed in seeds)
    group = {seed_of(7, prompt, sample) for prompt in range(8) for sample in range(8)}
    assert len(group) == 64
    assert re.search(rf">>> seed_of\(7, 0, 3\)\n +{seeds[0]}\n", seed_of.__doc__)


@pytest.mark.parametrize("given", [(7,), (7, "a"), (7.0, 1), (True, 1), (None, 1)])
def test_no_number_is_no_identity(given):
    with pytest.raises(TypeError, match=r"^seed_of: expected a master and at least one number"):
        seed_of(*given)


@pytest.mark.parametrize("given", [(7, 2**64 + 1), (2**64, 1), (7, -(2**63) - 1)])
def test_a_number_of_more_bits_is_no_identity(given):
    """Its lowest 64 bits are another number's."""
    with pytest.raises(ValueError, match=r"^seed_of: expected an int from -92"):
        seed_of(*given)


def test_noise_of_a_transform_is_that_of_its_rows():
    seeds, ids = torch.arange(3), torch.arange(5)
    expected = noise.words(seeds.unsqueeze(1), 7, ids)
    rows = torch.vmap(lambda seed: noise.words(seed, 7, ids))(seeds)
    traced = make_fx(lambda seed: noise.words(seed, 7, ids))(seeds.unsqueeze(1))
    assert torch.equal(rows, expected) and torch.equal(traced(seeds.unsqueeze(1)), expected)
