"""Verified draws converge as direct ones do, and a planted bias shows."""

from collections import defaultdict

from benchmarks.lab.harness import Run
from benchmarks.questions import speculative_convergence
from benchmarks.questions.speculative_convergence import DIRECT, PLANTED


def test_verified_draws_converge_like_direct_ones_and_a_bias_does_not(monkeypatch):
    monkeypatch.setattr(speculative_convergence, "TINY_SEEDS", 1024)
    curves = defaultdict(list)
    for row in speculative_convergence.rows(Run.small()):
        curves[row["shape"], row["candidate"]].append((row["batch"], row["total_variation"]))
    assert len(curves) == 3 * 4 + 1
    at_end = {name: points[-1][1] for name, points in curves.items()}
    direct, planted = at_end["coupled", DIRECT], at_end.pop(("rejection", PLANTED))
    assert all(distance < 1.3 * direct for distance in at_end.values()), at_end
    assert planted > 1.4 * direct
    for points in curves.values():
        assert [count for count, _ in points] == [256, 512, 1024, 2048]
        assert points[-1][1] < points[0][1]
