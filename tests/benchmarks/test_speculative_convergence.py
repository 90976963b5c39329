"""The convergence picture is made from what the functions draw, and shows a planted bias."""

import json

import pytest

from benchmarks.questions import speculative_convergence


def test_verified_draws_converge_like_direct_ones_and_a_bias_does_not(tmp_path):
    pytest.importorskip("matplotlib")
    speculative_convergence.main(tmp_path, 1024)
    found = json.loads((tmp_path / "result.json").read_text())["curves"]
    at_end = {name: points[-1][1] for name, points in found.items()}
    direct = at_end.pop("direct")
    planted = at_end.pop("planted: recovery from p")
    assert len(at_end) == 9
    assert all(distance < 1.3 * direct for distance in at_end.values()), at_end
    assert planted > 1.4 * direct
    for points in found.values():
        assert [count for count, _ in points] == [256, 512, 1024, 2048]
        assert points[-1][1] < points[0][1]
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert "| direct | 0." in (tmp_path / "README.md").read_text()
