"""The tile that is taken, the table that ranks agree on, and the tuner that fills it."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab.harness import Run, execute
from benchmarks.lab.problem import WrongToken
from benchmarks.lab.results import RESULT
from benchmarks.lab.shapes import TINY
from benchmarks.questions import tune
from benchmarks.static.aot import GPUS
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler, RankMismatch
from tpsample.backends.triton_ import tile_table
from tpsample.backends.triton_.tile_table import Gpu, MeasuredTile, Tile
from tpsample.core.weight_format import BF16, FP16, FP32
from tpsample.pipeline import Pipeline

H200 = Gpu("NVIDIA H200", 90, 132)
TILE = Tile(128, 64, 64, 4, 4)
ENTRY = MeasuredTile(H200, 128256, 4096, "bfloat16", 64, Tile(64, 64, 128, 4, 3), 290.5, 301.0)


def test_a_measured_shape_takes_its_tile_and_any_other_the_rule(monkeypatch):
    monkeypatch.setattr(tile_table, "measured_tiles", lambda: {ENTRY.shape: ENTRY.tile})
    tile_table.tile_for.cache_clear()

    def chosen(rows, vocab_rows=128256, hidden_size=4096, gpu=H200, weights=BF16):
        return tile_table.tile_for(rows, vocab_rows, hidden_size, weights, gpu)

    assert chosen(64) == chosen(33) == ENTRY.tile
    others = [chosen(32), chosen(65), chosen(64, 128255), chosen(64, hidden_size=8192)]
    others += [chosen(64, gpu=Gpu("NVIDIA H100", 90, 132))]
    others += [chosen(64, weights=weights) for weights in (FP16, FP32)]
    tile_table.tile_for.cache_clear()
    assert ENTRY.tile not in others


def test_rules_read_the_weights_once_and_fill_the_gpu():
    def rule(rows, vocab_rows):
        return tile_table.tile_for(rows, vocab_rows, 8192, BF16, H200)

    assert [rule(rows, 128256).block_b for rows in (1, 17, 64, 65, 256, 512)] == [
        16, 32, 64, 128, 256, 256,
    ]  # fmt: skip
    for rows in (16, 32, 64):
        assert rule(rows, 128256).block_v == 64  # fills the GPU 7.6 times
        assert rule(rows, 128256 // 8).block_v == 64  # 251 tiles for 264 places
        assert rule(rows, 151936 // 8).block_v == 128  # 297 would be a second wave of 33
    b200 = dataclasses.replace(H200, arch=100)
    assert tile_table.rule(16, 128256, BF16, b200).block_v == 128  # nothing measured


def test_stored_rows_take_a_tile_of_their_own_on_sm_90():
    def chosen(rows, stores, gpu=H200):
        return tile_table.tile_for(rows, 2**20, 8192, BF16, gpu, stores=stores)

    assert chosen(256, True) == dataclasses.replace(chosen(256, False), num_warps=16)
    assert (chosen(128, False).block_v, chosen(128, True).block_v) == (128, 64)
    for gpu in (dataclasses.replace(H200, arch=100), dataclasses.replace(H200, arch=80)):
        assert all(chosen(rows, True, gpu) == chosen(rows, False, gpu) for rows in (128, 256))


@pytest.mark.parametrize(
    ("arch", "kilobytes", "stages"),
    [(90, 227, (8, 6, 5)), (80, 163, (8, 6, 5)), (89, 99, (5, 5, 4)), (120, 99, (5, 5, 4))],
)
def test_a_list_has_as_many_stages_as_shared_memory_has_room_for(arch, kilobytes, stages):
    gpu = Gpu("a GPU", arch, 100, kilobytes * 1024)
    tiles = [tile_table.list_tile(rows, BF16, gpu) for rows in (16, 32, 64)]
    assert tuple(tile.num_stages for tile in tiles) == stages
    largest = tile_table.rule(256, 128256, BF16, gpu)
    assert largest.block_b == (256 if arch == 90 else 128)
    short = tile_table.short_tile(64, BF16, gpu)
    assert short.num_warps == (8 if arch < 90 else 4)
    shortest = tile_table.short_tile(16, BF16, gpu)  # spills there, if not as deep
    assert shortest.block_d == (128 if arch == 120 else 64)


def test_nothing_that_ships_was_measured():
    assert tile_table.load(tile_table.FILE) == []


def test_a_table_is_read_back_as_it_was_written(tmp_path):
    other = dataclasses.replace(ENTRY, batch=16)
    path = tmp_path / "tiles.json"
    tile_table.save(path, [ENTRY, other])
    assert tile_table.load(path) == [other, ENTRY]
    assert len(path.read_text().splitlines()) == 4  # one entry a line
    tile_table.save(path, [])
    assert tile_table.load(path) == []


@pytest.mark.parametrize("broken", [{"gpu": {}}, 7, {**dataclasses.asdict(ENTRY), "why": "?"}])
def test_a_broken_table_names_the_entry(tmp_path, broken):
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps([dataclasses.asdict(ENTRY), broken]))
    with pytest.raises(ValueError, match="entry 1 is no measured tile"):
        tile_table.load(path)


def test_every_entry_of_the_table_changes_its_fingerprint(tmp_path, monkeypatch):
    found = {tile_table.fingerprint()}
    for tiles in ([ENTRY], [dataclasses.replace(ENTRY, batch=16)]):
        monkeypatch.setattr(tile_table, "FILE", tmp_path / "tiles.json")
        tile_table.save(tmp_path / "tiles.json", tiles)
        found.add(tile_table.fingerprint())
    assert len(found) == 3


def _build_with_own_table(backend: str) -> str:
    rank = dist.get_rank()
    tile_table.fingerprint = lambda: f"table {rank}"
    try:
        LMHeadSampler(torch.zeros(4, 16), vocab_size=8, backend=backend)
    except RankMismatch as error:
        return str(error)
    return "built"


def test_ranks_with_other_tables_refuse_to_be_built():
    for message in run_ranks(2, _build_with_own_table, "triton"):
        assert message == (
            "tile_table: must be the same on every rank, got rank 0: table 0, rank 1: table 1"
        )
    assert run_ranks(2, _build_with_own_table, "torch") == ["built"] * 2  # it uses no table


class TestTuner:
    def test_fills_a_table_that_the_sampler_can_read(self, tmp_path, monkeypatch):
        path = tmp_path / "tiles.json"
        tile_table.save(path, [ENTRY])
        monkeypatch.setattr(tile_table, "FILE", path)
        monkeypatch.setattr(tune, "MIN_GAIN", 0.0)  # on a CPU nothing is faster for a reason
        run = Run(shapes=(TINY,), batches=(3, 2), repeats=1)
        monkeypatch.setattr(tune, "WORLD_SIZES", (1,))
        result = execute(tune.BENCHMARK, run, tmp_path / RESULT)
        assert [each["kind"] for each in result.rows] == ["baseline", "tpsample"]
        tune.main(str(tmp_path / RESULT))
        new, old = tile_table.load(path)
        assert old == ENTRY and new.gpu == Gpu() and new.us <= new.rule_us
        assert new.shape[1:] == (TINY.vocab_size, TINY.hidden_size, "bfloat16", 16)

    def test_a_wrong_token_stops_it(self, tmp_path, monkeypatch):
        finish = Pipeline.finish

        def planted(self, out):
            out = finish(self, out)
            out.token_ids[0] += 1
            return out

        monkeypatch.setattr(Pipeline, "finish", planted)
        with pytest.raises(WrongToken):
            execute(tune.BENCHMARK, Run.small(batches=(3,), repeats=1), tmp_path / RESULT)
        with pytest.raises(SystemExit, match="nothing worth keeping"):
            tune.main(str(tmp_path / RESULT))

    def test_keeps_the_fastest_and_gains_only(self):
        for us, kept in ((290.0, True), (296.0, False), (300.0, False)):
            best = dataclasses.replace(ENTRY, us=us, rule_us=300.0)
            rule = dataclasses.replace(best, tile=TILE, us=300.0)
            slow = dataclasses.replace(best, tile=TILE, us=us + 1)
            assert tune.merged([ENTRY], [rule, best, slow]) == ([best] if kept else [])

    @pytest.mark.parametrize("arch", [80, 89, 90, 100, 103, 120])
    @pytest.mark.parametrize("block_b", [16, 32, 64, 128, 256])
    def test_candidates_of_a_gpu(self, arch, block_b):
        gpu = Gpu("a GPU", arch, 132, GPUS[arch].program_bytes)
        rule = tile_table.rule(block_b, 128256, BF16, gpu)
        tiles = tune.candidates(rule, gpu)
        assert tiles[0] == rule and len(set(tiles)) == len(tiles) >= 2
        large = 90 <= arch < 120  # with the registers and shared memory of a Hopper
        assert {tile.block_b for tile in tiles} == {min(block_b, 256 if large else 128)}
        assert all(tile.block_v >= 64 and tile.num_warps in (4, 8) for tile in tiles)
        assert all(tile_table.fitted(tile, gpu) == tile for tile in tiles)

    def test_takes_the_shards_first_that_are_named_first(self, monkeypatch):
        monkeypatch.setattr(
            tune, "_of_point", lambda run, problem, gpu: (problem.weight.shape, problem.rows)
        )
        run = Run(shapes=(TINY, dataclasses.replace(TINY, hidden_size=32)), batches=(1, 2, 20))
        weights = [(rows, size) for rows in (125, 1000) for size in (64, 32)]
        assert list(tune.rows(run)) == [(weight, batch) for weight in weights for batch in (2, 20)]
