"""The numbers that a run on a GPU is for: in time, and said to be read only where they were."""

from benchmarks.gpu.check import waves
from benchmarks.gpu.goals import GOALS, SMALL, TARGET_SHAPES, goals_read
from benchmarks.gpu.sections import ON_REQUEST, POINTS, SECTIONS

BY, ALL = 300, 480


def _row(candidate, shape, batch, us, world_size=1, **more):
    kind = "tpsample" if candidate in ("tpsample", "screened") else "baseline"
    point = {"shape": shape, "batch": batch, "world_size": world_size}
    return {"candidate": candidate, "kind": kind, "median_us": us, "graph": True, **point, **more}


def _found(section, rows=(), **facts):
    told = goals_read({section: {"facts": {**facts, "rows": list(rows)}}})
    return {goal.name: each["found"] for goal, each in zip(GOALS, told, strict=True)}


def test_every_goal_is_expected_in_time():
    """The facts of `features` are the first that it tells."""
    passed, begins = 0.0, {}
    for wave in waves(list(SECTIONS)):
        assert all(SECTIONS[name].expected_s <= SECTIONS[name].limit_s for name in wave)
        begins |= dict.fromkeys(wave, passed)
        asked = [name for name in wave if name not in ON_REQUEST]
        passed += max((SECTIONS[name].expected_s for name in asked), default=0)
    assert passed <= ALL
    for goal in GOALS:
        if goal.fact:
            assert begins[goal.section] < BY
        elif goal.section:
            assert begins[goal.section] + SECTIONS[goal.section].expected_s <= BY


def test_every_point_that_a_goal_needs_is_measured():
    for goal in GOALS:
        if goal.points and goal.section != "filters":
            shapes, batches = POINTS[goal.section]
            rows = [
                _row(name, shape.name, batch, 1.0, world_size)
                for name in ("tpsample", "screened")
                for shape in shapes
                for batch in batches
                for world_size in (1, 8)
            ]
            counted = {(r["shape"], r["batch"]) for r in rows if goal.rows(r)}
            assert len(counted) == goal.points, goal.name


def test_a_goal_is_read_by_the_worst_of_its_points():
    name = "plain step ÷ limit, B ≤ 64"
    rows = [
        _row("tpsample", shape, b, 1.0, over_limit=1.0) for shape in TARGET_SHAPES for b in SMALL
    ]
    rows.append(_row("tpsample", TARGET_SHAPES[0], 256, 1.0, over_limit=9.0))
    assert _found("single_gpu", rows)[name].startswith("read: 1 at worst")
    rows[2]["over_limit"] = 1.25
    found = _found("single_gpu", rows)[name]
    assert found == "read: 1.25 at worst (tpsample, 128256x8192, B = 32)"
    assert _found("single_gpu", rows[:3])[name].endswith("; 3 of 8 points")
    assert _found("single_gpu")[name] == "not read: no point of it was measured"
    assert _found("noise")[name] == "not read: single_gpu did not run"


def test_a_goal_against_a_package_that_is_not_there_is_not_read():
    name = "plain step ÷ (cuBLAS + FlashInfer), B = 128"
    rows = [
        _row("tpsample", TARGET_SHAPES[0], 128, 3.0),
        _row("FlashInfer", TARGET_SHAPES[0], 128, 4.0),
    ]
    assert _found("single_gpu", rows)[name].startswith("read: 0.75 at worst")
    assert "FlashInfer did not take part" in _found("single_gpu", rows[:1])[name]


def test_what_one_gpu_cannot_show_is_said():
    found = _found("features", launches=2)
    assert found["launches of a plain step, several ranks"] == "read: 2"
    assert found["exchange tail, W = 8, µs"].startswith("not read: one GPU has no link")
