"""Small native functions, by themselves, on numbers that whole steps seldom have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.native import noise_of_rows
from tpsample.backends.numba_.kernels.compiling import F32, U64, jit
from tpsample.backends.numba_.kernels.inputs import (
    Block,
    block_at,
    blocks_of,
    lanes_of,
    weight_of,
)
from tpsample.backends.numba_.kernels.noise import draws_of
from tpsample.backends.numba_.kernels.numbers import lanes_reaching
from tpsample.backends.screening.int8_copy import BLOCK
from tpsample.core.row_noise import RowNoise


@jit(entry=True)
def reaching(values, threshold, block):
    """Find the lanes of a block that reach a threshold."""
    return lanes_reaching(values, threshold, lanes_of(block))


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize(("lane", "count"), [(0, 64), (0, 1), (3, 61), (1, 2), (63, 1), (2, 33)])
def test_no_lane_outside_of_a_block_reaches_a_threshold(lane, count, value):
    block = Block(0, lane, count, 0)
    found = reaching(np.full(BLOCK, value, F32), F32(0.5), block)
    assert int(found) == sum(1 << j for j in range(lane, lane + count))
    assert int(reaching(np.full(BLOCK, -np.inf, F32), F32(-np.inf), block)) == 0


@jit(entry=True)
def lanes_of_range(weight):
    """Count the lanes of all blocks of a range."""
    total = 0
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        lanes = lanes_of(block)
        while lanes:
            lanes &= lanes - U64(1)
            total += 1
    return total


@pytest.mark.parametrize("first_id", [0, 3, 1001])
def test_blocks_have_the_ids_of_a_range_and_no_others(first_id):
    weight = torch.zeros(200, 1)
    for start in (0, 1, 5, 64):
        for stop in (start, start + 1, start + 4, start + 63, start + 130):
            assert lanes_of_range(weight_of(weight, first_id, start, stop)) == stop - start


def test_the_scale_of_any_temperature_is_that_of_the_definition():
    heat = [0.0, 1e-45, 9e-6, 1.1e-5, 0.7, 2.0**100, 1e38, 3e38, math.inf, -math.inf, math.nan]
    rows = torch.arange(len(heat))
    noise = RowNoise(torch.tensor(heat), rows, rows, 1)
    found = noise_of_rows(draws_of(noise), rows.numpy())
    assert found.scale.tolist() == noise.scale.squeeze(1).tolist()
    assert (found.random != 0).tolist() == noise.random.squeeze(1).tolist()
    assert np.isfinite(found.scale).all() and (found.scale > 0).all()
