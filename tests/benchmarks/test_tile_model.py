"""The model of a launch: no faster than its limits, slower where a resource is taken away."""

import json
from dataclasses import replace

import pytest

from benchmarks import launch_model, screen_model, tile_model
from benchmarks.shapes import Shape
from benchmarks.tile_model import CHIPS, predict, programs_per_sm
from tpsample.local.tiles import Tile

H200 = CHIPS[1]
SHAPE = Shape(16384, 2048, "none")
TILE = Tile(block_v=128, block_b=64, block_d=64, num_warps=4, num_stages=4)


def test_a_launch_takes_longer_than_reading_the_weights():
    for batch in (1, 64, 100):
        found = predict(H200, SHAPE, 1, batch, TILE)
        weights = SHAPE.vocab_size * SHAPE.hidden_size * 2
        assert found.limit_us == weights / H200.memory
        assert found.over_limit > 1 / launch_model.ROW_PIECES
        assert found.tiles == 128 * (1 if batch <= 64 else 2)


@pytest.mark.parametrize(
    ("chip", "tile"),
    [
        (replace(H200, memory=H200.memory / 2), TILE),
        (replace(H200, l2=H200.l2 / 4), TILE),
        (replace(H200, sms=H200.sms // 8), TILE),
        (replace(H200, flops=H200.flops / 16), TILE),
        (H200, replace(TILE, num_stages=2)),  # too few bytes in flight
    ],
)
def test_it_is_slower_where_a_resource_is_taken_away(chip, tile):
    assert (
        predict(chip, SHAPE, 1, 64, tile).step_us > 1.1 * predict(H200, SHAPE, 1, 64, TILE).step_us
    )


def test_a_last_wave_of_few_tiles_costs_a_program_of_its_own():
    """132 tiles more than two waves of two programs per SM."""
    full = Shape(128 * 4 * H200.sms, 512, "none")
    more = Shape(128 * (4 * H200.sms + 1), 512, "none")
    before, after = (predict(H200, shape, 1, 16, TILE) for shape in (full, more))
    assert before.waves == 2.0 and after.waves > 2.0
    assert after.step_us - before.step_us > 2.0 > 1.2 * (after.limit_us - before.limit_us)


def test_an_sm_holds_what_its_memory_and_registers_allow():
    assert programs_per_sm(TILE) == 2
    assert programs_per_sm(replace(TILE, num_stages=8)) == 1
    assert programs_per_sm(replace(TILE, block_b=256, num_warps=8, num_stages=3)) == 1


def test_programs_of_one_sm_share_its_link_and_no_other():
    """Two multiprocessors, whose links alone hold the programs up: the third waits beside one."""
    chip = replace(H200, sms=2, memory=1e12, l2=1e12, flops=1e12)
    one = launch_model.Grid(
        tiles=1,
        resident=2,
        weight_bytes=1e8,
        prefetched=0.0,
        readers=1,
        through_l2=1.0,
        in_flight=1e12,
        operations=1.0,
        epilogue_us=0.0,
    )
    alone, apart, beside = (
        launch_model.duration_us(chip, replace(one, tiles=tiles)) for tiles in (1, 2, 3)
    )
    assert apart == pytest.approx(alone, rel=0.01)
    assert beside == pytest.approx(2 * alone, rel=0.01)


def test_a_screened_step_saves_bytes_and_costs_launches(monkeypatch, capsys):
    """Half of a large head's time, and nothing of a small one's."""
    large, small = Shape(128256, 8192, "large"), Shape(8192, 1024, "small")
    plain = predict(H200, large, 1, 16, TILE).step_us
    assert 0.5 < screen_model.screened_us(H200, large, 1, 16) / plain < 0.65
    assert screen_model.screened_us(H200, small, 1, 16) > predict(H200, small, 1, 16, TILE).step_us
    monkeypatch.setattr(screen_model, "SHAPES", ("49152x576",))
    assert tile_model.main(["--screened"]) == 0
    assert capsys.readouterr().out.count("49152x576") == 4


def test_predictions_stand_beside_measured_times(tmp_path, capsys):
    row = {"shape": "49152x576", "world_size": 1, "batch": 64, "median_us": 25.0}
    rows = [{**row, "candidate": "tpsample"}, {**row, "candidate": "limit"}]
    result = {"machine": {"hardware": "1 × NVIDIA H200"}, "rows": rows}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert tile_model.main(["--measured", str(tmp_path / "result.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and shown[2].startswith("| 1/1 | 49152x576 | 64 | 25.0 | ")
    result["machine"]["hardware"] = "CPU"
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="no constants"):
        tile_model.main(["--measured", str(tmp_path / "result.json")])
