"""The residual of two laws against integers of Python, and the scores of a draw from it."""

import math

import torch

from tpsample.core import residual
from tpsample.core.masses import TOP_MASS

GENERATOR = torch.Generator().manual_seed(6)
MASSES = torch.cat(
    [
        torch.tensor([0, 1, 2, TOP_MASS - 1, TOP_MASS]),
        torch.randint(0, TOP_MASS, (200,), generator=GENERATOR),
        2 ** torch.randint(0, 40, (50,), generator=GENERATOR),
    ]
)
TOTALS = torch.tensor([TOP_MASS, TOP_MASS + 1, 3 * TOP_MASS // 2, 2**50 + 12345, 2**60])


def test_a_share_is_the_product_rounded_down():
    coefficients = torch.tensor([1.0, 0.3, 2.0**-30, 2.0**-52], dtype=torch.float64)
    weights = residual.share_weight(coefficients.unsqueeze(1), TOTALS).flatten()
    weights = torch.cat([weights, torch.tensor([0, 1, 2**62, 2**62 - 1, 2**21 - 1, 2**42 + 1])])
    found = residual.shares(MASSES.unsqueeze(1), weights)
    for mass, row in zip(MASSES.tolist(), found.tolist(), strict=True):
        assert row == [mass * weight >> 40 for weight in weights.tolist()]


def test_a_weight_is_the_coefficient_over_the_sum():
    for total in TOTALS.tolist():
        for c in (1.0, 0.7, 2.0**-40):
            given = torch.tensor(c, dtype=torch.float64), torch.tensor(total)
            assert int(residual.share_weight(*given)) == int(c / float(total) * 2.0**102)
    assert int(residual.share_weight(torch.tensor(1.0).double(), torch.tensor(1))) == 0


def test_a_score_is_the_logarithm_less_the_noise():
    left = torch.tensor([1, 2**62, 2**61 + 1, 123456789, 2**40 - 1])
    noise = torch.tensor([0.0, 3.5, -40.0, 1.25, -2.0])
    found = residual.recovery_scores(left, torch.full_like(left, TOP_MASS), noise)
    for number, its_noise, score in zip(left.tolist(), noise.tolist(), found.tolist(), strict=True):
        assert abs(score - (math.log2(number) - 62 - its_noise)) < 2.0**-17


def test_the_target_is_drawn_from_only_where_nothing_is_left():
    nothing, all_of_it = torch.tensor([0]), torch.tensor([TOP_MASS])
    best_of_target = residual.recovery_scores(nothing, all_of_it, torch.tensor([-49.0]))
    worst_residual = residual.recovery_scores(torch.tensor([1]), all_of_it, torch.tensor([5.1]))
    assert torch.isfinite(best_of_target) and best_of_target < worst_residual
    masked = residual.recovery_scores(nothing, nothing, torch.tensor([0.0]))
    assert masked.item() == -math.inf
