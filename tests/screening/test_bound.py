"""The proved bounds hold, and where they are tight a bound that is a little too small is seen."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from tpsample.screening.candidates import UpperScores
from tpsample.screening.fp32_pass import Fp32Pass
from tpsample.screening.noise_bound import BITS_SCALE, NOISE_TOP, Pairs, TileNoise

from tests.support.screening import HEADS, PASSES, Problem, problem, requests
from tpsample import SamplingBatch, noise
from tpsample.core.row_noise import RowNoise
from tpsample.core.score import Head, head_logits, logits_tile, score_tile
from tpsample.request.step import StepRows
from tpsample.screening import bound, int8_pass
from tpsample.screening.int8_copy import BLOCKS, Int8Copy, block_norms
from tpsample.screening.int8_pass import Int8Pass, limbs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows_of(case: Problem, temperature: float | None = None) -> StepRows:
    b = case.hidden_states.shape[0]
    batch = SamplingBatch.from_params(requests(b), vocab_size=case.weight.shape[0])
    heat = batch.temperature if temperature is None else torch.full((b,), temperature)
    return StepRows(case.hidden_states, RowNoise(heat, batch.seed, torch.arange(b), 1, 10), None)


def first_pass(case: Problem, which: str) -> Fp32Pass | Int8Pass:
    return Fp32Pass(case.weight) if which == "fp32" else Int8Pass(Int8Copy(case.weight))


def approximation(case: Problem, which: str) -> bound.Approximation:
    return first_pass(case, which).tile(rows_of(case), 0, case.weight.shape[0])


def excess(case: Problem, which: str) -> torch.Tensor:
    """How far every product is from the definition's, over the bound; above 1 is a violation."""
    found = approximation(case, which)
    exact = (case.hidden_states.double() @ case.weight.double().T).float().double()
    return (found.product.double() - exact).abs() / found.error.double()


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", HEADS)
def test_products_are_within_the_bound(name, dtype, which):
    for v, b, d, seed in ((1000, 12, 128, 1), (300, 5, 33, 2), (200, 7, 1, 3)):
        case = problem(name, v, b, d, seed).to(dtype)
        assert (excess(case, which) <= 1).all()


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize(
    "head", [Head(), Head(0.3), Head(-5.0), Head(1.0, 4.0), Head(3.0, 30.0)], ids=str
)
def test_scores_are_below_their_upper_bounds(head, which):
    for name in HEADS:
        case = problem(name, 600, 9, 48, seed=5)
        bias = torch.randn(600, generator=torch.Generator().manual_seed(1)) * 50
        rows, found = rows_of(case), approximation(case, which)
        slack = bound.of_scores(found, rows, head, bias, 0)
        assert slack.proved.all()
        upper = UpperScores(
            head_logits(found.product, bias, head),
            slack.of(found.error),
            TileNoise(rows.noise, 0, 0, 600),
            rows.noise,
        )
        exact = logits_tile(rows.hidden_double, case.weight, bias, head)
        scores = score_tile(exact, 0, rows.noise, 0)
        for row in range(9):
            at_least = upper.at_least(scores.amin(dim=1))
            assert (at_least.rows == row).sum() == 600
        # Every single id is found when the bar is its own score.
        for column in range(0, 600, 7):
            at_least = upper.at_least(scores[:, column])
            assert (at_least.columns == column).sum() == 9


# -- where the bounds are tight ----------------------------------------------------------------


def parallel(d: int = 64, seed: int = 0) -> Problem:
    """Hidden states of one block that lie along the residual of a weight row, exactly.

    Every weight is a multiple of 1/4 quantum off its quantised value, so the residual has entries
    of ±1/4, which the limbs of the hidden states hold exactly.
    """
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (d,), generator=generator) * 2.0 - 1
    whole = torch.randint(-120, 121, (d,), generator=generator).float()
    weight = whole + sign / 4
    weight[0], sign[0] = 127.0, 0.0  # the largest: the scale is 1, and its own residual 0
    return Problem(weight.unsqueeze(0), 32512.0 * sign.unsqueeze(0))


def test_the_8_bit_bound_is_tight():
    """So 5 % less would be too little."""
    case = parallel()
    worst = excess(case, "int8").max()
    assert 0.96 < worst <= 1
    found = approximation(case, "int8")
    smaller = found._replace(error=0.95 * found.error)
    exact = (case.hidden_states.double() @ case.weight.double().T).float().double()
    assert ((found.product.double() - exact).abs() > smaller.error).any()


def test_the_limbs_are_exact_integers():
    hidden = torch.cat([torch.randn(40, 33, dtype=torch.float64), torch.zeros(1, 33)])
    high, low, unit = limbs(hidden)
    whole = 256 * high.long() + low.long()
    assert high.abs().max() <= 127
    assert (hidden - unit * whole).abs().le(0.5 * unit * (1 + 1e-9)).all()
    assert torch.equal(unit, unit.float().double())
    assert (whole[-1] == 0).all()
    assert whole.abs().amax(dim=1)[:-1].min() > 32000


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_norms_are_rounded_up(dtype):
    """Held against exact rational numbers: norm² in fp32 is never less than the sum of squares."""
    weight = torch.cat([problem(name, 3, 1, 21).to(dtype).weight for name in HEADS])
    copy = Int8Copy(weight)
    for row, values in enumerate(weight.double().tolist()):
        scale = Fraction(copy.scale[row].item())
        exact = [Fraction(value) for value in values]
        lost = [w - scale * q for w, q in zip(exact, copy.quantised[row].tolist(), strict=True)]
        assert Fraction(copy.norm[row].item()) ** 2 >= sum(w * w for w in exact)
        for j in range(BLOCKS):
            part = lost[copy.bounds[j] : copy.bounds[j + 1]]
            residual = Fraction(copy.residual[row, j].item())
            assert residual**2 >= sum(x * x for x in part)
            true = math.sqrt(sum(x * x for x in part))
            assert residual <= true * (1 + 1e-6) + 1e-37


def test_the_memory_of_a_copy_is_what_it_says():
    copy = Int8Copy(torch.randn(50, 21))
    tensors = (copy.quantised, copy.scale, copy.residual, copy.norm, copy.residual_norm)
    assert copy.num_bytes == sum(each.nbytes for each in tensors) == 50 * (21 + 44)


def test_norms_rounded_down_are_caught(monkeypatch):
    monkeypatch.setattr(
        "tpsample.screening.int8_copy.round_up", lambda x: (x * (1 - 2.0**-24)).float()
    )
    with pytest.raises(AssertionError):
        test_norms_are_rounded_up(torch.float32)


def test_residuals_that_are_too_small_are_caught(monkeypatch):
    true = block_norms

    def smaller(values, bounds):
        return 0.95 * true(values, bounds)

    monkeypatch.setattr("tpsample.screening.int8_copy.block_norms", smaller)
    assert (excess(parallel(), "int8") > 1).any()


@pytest.mark.parametrize("which", PASSES)
def test_bounds_stay_below_the_promised_multiple_of_the_magnitude(which):
    for name in HEADS:
        found = approximation(problem(name, 200, 5, 24), which)
        assert (found.error <= 4 * (found.magnitude + 1)).all()
        assert (found.product.abs() <= found.magnitude + 1e-30).all()


# -- the formulas ------------------------------------------------------------------------------


def test_the_fp32_bound_is_its_formula():
    """γ cannot be reached by real sums, so it is held against rational numbers."""
    case = problem("normal", 50, 4, 96)
    found = approximation(case, "fp32")
    largest = Fraction(case.weight.abs().max().item())
    unit, terms = Fraction(1, 2**24), 96 + 4
    gamma = terms * unit / (1 - terms * unit)
    for row, values in enumerate(case.hidden_states.tolist()):
        total = sum(abs(Fraction(value)) for value in values)
        needed = (Fraction(96) * unit / (1 - 96 * unit) + 2 * unit) * largest * total
        error = Fraction(found.error[row].item())
        assert (
            needed
            < error
            <= gamma * largest * total * (1 + Fraction(1, 10**9)) + Fraction(1, 10**30)
        )


def test_nothing_is_proved_of_sums_that_are_too_long():
    assert bound.sum_error(1) > 2.0**-24
    assert bound.sum_error(2**22) < 0.5
    assert math.isinf(bound.sum_error(2**23 + 1))


def test_rounding_up():
    values = torch.cat([torch.rand(1000, dtype=torch.float64) * 2.0**e for e in range(-160, 120)])
    rounded = bound.round_up(values)
    assert (rounded.double() >= values * (1 + 2.0**-23)).all()
    assert (rounded.double() <= values * (1 + 2.0**-21) + 2.0**-125).all()


def noise_gap(words: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """How far the bound of the noise is above it."""
    bits = words.float().view(torch.int32).double()
    return NOISE_TOP - bits * BITS_SCALE + noise.log2_exponential(words, mixed).double()


def test_the_noise_is_below_its_bound():
    edges = torch.cat([2**e + torch.arange(-300, 300) for e in range(1, 33)])
    words = torch.cat([edges, torch.randint(0, 2**32, (200_000,)), torch.arange(2000)])
    words = words.clamp(0, 2**32 - 1)
    for low in (0, 0xFFFF):
        gap = noise_gap(words, words ^ low)
        assert gap.min() >= 0
        # Small noise, and noise at large u, is bounded less well; the largest is bounded best.
        assert gap[(words > 2**16) & (words < 2**20)].max() < 0.09


def test_the_margin_of_the_noise_is_used():
    """The bound leaves less than 2e-5 where a word is a power of two, so it may not shrink."""
    words = 2 ** torch.arange(6, 15)
    assert (noise_gap(words, words) < 3e-5).all()


def test_tile_noise_is_the_definitions():
    rows = rows_of(problem("normal", 8, 3, 4)).noise
    for first, num in ((0, 8), (3, 10), (1001, 1)):
        tile = TileNoise(rows, 0, first, num)
        expected = noise.tile_noise(rows.streams[0], first, num, 10)
        columns = torch.arange(num)
        for row in range(3):
            assert torch.equal(tile.exact(Pairs(torch.full((num,), row), columns)), expected[row])
        upper = NOISE_TOP - tile.bits().double() * BITS_SCALE
        assert (upper >= -expected.double()).all()


def test_a_tile_in_chunks_has_one_largest_weight(monkeypatch):
    """Several chunks of weights have one largest number."""
    monkeypatch.setattr("tpsample.screening.fp32_pass.CHUNK_ELEMENTS", 1000)
    case = problem("a_huge_row", 400, 6, 48)
    assert (excess(case, "fp32") <= 1).all()
    assert approximation(case, "fp32").magnitude.min() > 1e3


def test_the_kernels_bar_is_below_the_best_score():
    """What the module of the 8-bit pass promises a kernel: max (score − slack) <= best score."""
    case = problem("normal", 800, 6, 64)
    rows, found = rows_of(case), approximation(case, "int8")
    slack = bound.of_scores(found, rows, Head(), None, 0)
    exact = score_tile(logits_tile(rows.hidden_double, case.weight, None, Head()), 0, rows.noise, 0)
    lower = score_tile(found.product, 0, rows.noise, 0) - slack.of(found.error)
    assert (lower <= exact).all()
    assert (lower.amax(dim=1) <= exact.amax(dim=1)).all()


def test_the_bound_of_another_definition_is_wider():
    case = problem("normal", 20, 2, 64)
    copy, rows = Int8Copy(case.weight), rows_of(case)
    narrow = Int8Pass(copy).tile(rows, 0, 20).error
    wide = Int8Pass(copy, (64 / 16 + 32) * 2.0**-22).tile(rows, 0, 20).error
    assert (wide > narrow).all()
    assert int8_pass.DEFINITION_ERROR >= 2.0**-24
