"""The forecast is a band of marked numbers, and no time of a CPU gets into it."""

from __future__ import annotations

import json

import pytest

from benchmarks import calibration, scaling_model
from benchmarks.harness import Run, execute
from benchmarks.report import RESULT, write_report
from benchmarks.scaling_model import ASSUMED, HOSTS, MEASURED, NVLINK, Band, shard, step
from benchmarks.shapes import Shape
from benchmarks.tile_model import CHIPS
from tests.support.tiers import long

SHAPE = Shape(16384, 512, "none")
POINTS = [(chip.name, batch) for batch in (1, 16, 64, 128, 256) for chip in CHIPS]


def _small() -> Run:
    return Run.small(batches=(2,), repeats=1)


@pytest.fixture(scope="module")
def tiny_shards(tmp_path_factory):
    """What `shard` writes here."""
    path = tmp_path_factory.mktemp("shards") / RESULT
    execute("shard", _small(), path)
    return path.read_text()


def _shard_result(tiny_shards, folder, hardware="NVIDIA H200", **changes):
    """A result of `shard` as if of a GPU."""
    data = json.loads(tiny_shards)
    data["machine"] |= {"hardware": hardware, "triton_interpreter": False}
    data["settings"]["tiny"] = False
    data |= changes
    (folder / RESULT).write_text(json.dumps(data))
    return folder / RESULT


@pytest.mark.parametrize(("chip", "batch"), [*POINTS[:4], *long(*POINTS[4:])])
def test_the_tile_model_gives_published_times_within_15_percent(chip, batch):
    low, high = calibration.BAND
    ratio = calibration.over_published(chip, batch)
    assert 0.85 < low - 0.005 <= ratio <= high + 0.005 < 1.15


def test_without_a_measurement_nothing_is_called_measured():
    run = _small()
    rows = list(scaling_model.rows(run))
    assert {row["shard_time"] for row in rows} == {ASSUMED}
    assert MEASURED not in {each["kind"] for each in run.inputs}
    assert all(
        each["source"] and each["low"] <= each["value"] <= each["high"] for each in run.inputs
    )
    worlds = {t: [r["world_size"] for r in rows if r["topology"] == t] for t in (NVLINK, HOSTS)}
    assert worlds[NVLINK][-1] == worlds[HOSTS][-1] == 72
    for row in rows:
        assert row["step_low_us"] < row["step_us"] < row["step_high_us"]
        assert row["efficiency_low"] < row["efficiency"] < row["efficiency_high"]


def test_measured_shards_are_taken_as_they_are_and_scale_the_others(tiny_shards, tmp_path):
    run = _small()
    run.shard_result = _shard_result(tiny_shards, tmp_path)
    times = {
        row["world_size"]: row
        for row in json.loads(run.shard_result.read_text())["rows"]
        if row["candidate"] == "tpsample"
    }
    rows = {row["world_size"]: row for row in scaling_model.rows(run) if row["topology"] == NVLINK}
    assert [w for w, row in rows.items() if row["shard_time"] == MEASURED] == [1, 2, 4, 8]
    for world_size, row in times.items():
        assert rows[world_size]["shard_us"] == row["median_us"]
    measured = [each for each in run.inputs if each["kind"] == MEASURED]
    assert len(measured) == 4 and all("NVIDIA H200" in each["source"] for each in measured)
    chip = CHIPS[1]
    model = {w: shard(chip, SHAPE, w, 2, {}) for w in (8, 16)}
    twice = {8: Band(2 * model[8].us, 1.0, 2.0, MEASURED), 1: Band(1.0, 1.0, 1.0, MEASURED)}
    found = shard(chip, SHAPE, 16, 2, twice)
    assert found.us == pytest.approx(2 * model[16].us) and found.kind == ASSUMED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hardware": "CPU"}, "expected times of a GPU"),
        ({"settings": {"tiny": True, "shapes": []}}, "expected times of a GPU"),
        ({"hardware": "AMD MI300X"}, "it knows NVIDIA H100, NVIDIA H200"),
        ({"benchmark": "single_gpu"}, "expected a complete result of shard"),
        ({"rows": []}, "got none"),
    ],
    ids=["a CPU", "tiny", "unknown", "another", "empty"],
)
def test_what_forecasts_no_gpu_is_refused(changes, said, tiny_shards, tmp_path):
    run = _small()
    run.shard_result = _shard_result(tiny_shards, tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        list(scaling_model.rows(run))


def test_an_exchange_costs_its_tail_and_its_words():
    one = Band(100.0, 90.0, 110.0, ASSUMED)
    assert step(one, 1, 256, NVLINK) == one
    inside = step(one, 8, 256, NVLINK)
    assert inside.us - one.us == pytest.approx(6.0 + 7 * 8 * 256 / 450e3)
    assert inside.high_us - one.high_us == pytest.approx(20.0 + 7 * 8 * 256 / 360e3)
    assert step(one, 8, 256, HOSTS) == inside
    two = step(one, 16, 256, HOSTS)
    assert two.us - inside.us == pytest.approx(25.0 + 8 * 256 / 50e3)


def test_the_page_shows_bands_and_marks(tmp_path):
    execute("scaling_model", _small(), tmp_path / RESULT)
    page = write_report(tmp_path).read_text()
    assert "| name | value | low | high | unit | kind | source |" in page
    assert "| assumed |" in page and "| published |" in page
