"""Some steps through compiled kernels, on an emulated GPU; `make compiled` runs the rest."""

from __future__ import annotations

import pytest

from tests.compiled.__main__ import QUICK, problems_of, run


@pytest.mark.parametrize("part", QUICK)
def test_what_compiled_kernels_of_sm_90_do(part):
    found = run((90, part, 0))
    assert problems_of(found) == []
    assert found["wrong"] == 0 < found["rows"]
    assert part == "planted" or sum(found["launches"].values()) > 0


def test_a_part_that_ends_is_told():
    found = run((90, "no_such_part", 0))
    (problem,) = problems_of(found)
    assert "KeyError: 'no_such_part'" in problem
