"""The limits that a step is held against: each reads what it says, and all are in the record."""

import json

import pytest
import torch

from benchmarks import ceilings, tile_model, tile_read
from benchmarks.harness import Run, execute
from benchmarks.problem import make_weight
from benchmarks.report import RESULT
from benchmarks.results import row, with_ratios
from benchmarks.tile_model import CHIPS, measured_chip, predict
from benchmarks.tile_read import tile_reads
from benchmarks.timing import Timing
from tpsample.local.tiles import Tile

CPU = torch.device("cpu")
MEASURED = {
    "copy_tb_per_s",
    "read_tb_per_s",
    "l2_tb_per_s",
    "tile_read_tb_per_s",
    "one_kernel_us",
    "two_kernels_us",
    "matmul_tflops",
}


def test_every_ceiling_is_in_the_record(tmp_path):
    result = execute("ceilings", Run.small(repeats=1), tmp_path / RESULT)
    assert set(result.measured) == MEASURED
    assert all(value > 0 for value in result.measured.values())
    rates = {each["candidate"]: each for each in result.rows if each["shape"].endswith(" bytes")}
    assert set(rates) == {"copy", "read", "l2"}
    for each in rates.values():
        num_bytes = int(each["shape"].split()[0])
        assert each["tb_per_s"] == pytest.approx(num_bytes / each["median_us"] / 1e6)


def test_without_triton_the_rest_is_measured(monkeypatch):
    for module in (ceilings, tile_read, ceilings.baselines):
        monkeypatch.setattr(module, "has_triton", lambda device: False)
    run = Run.small(repeats=1)
    assert {each["candidate"] for each in ceilings.rows(run)} == {"copy", "read", "matmul"}


@pytest.mark.parametrize(("vocab_rows", "hidden_size"), [(1, 64), (1025, 64), (3000, 34)])
def test_a_read_by_tiles_reads_every_row_once(vocab_rows, hidden_size):
    """Rows past the last are not counted twice; widths that no piece divides are not cut."""
    weight = make_weight(vocab_rows, hidden_size, CPU)
    (read,) = tile_reads(weight).values()
    words = weight.view(torch.int32)
    assert int(read().sum()) % 2**32 == int(words.sum()) % 2**32
    weight[-1, -1] += 1
    assert int(read().sum()) % 2**32 == int(words.sum()) % 2**32


def test_a_read_by_tiles_that_skips_some_is_refused(monkeypatch):
    kernel = pytest.importorskip("benchmarks.baseline_kernels").tile_read_kernel

    class Short:
        def __getitem__(self, grid):
            return lambda **arguments: kernel[grid](**{**arguments, "num_rows": 500})

    monkeypatch.setattr("benchmarks.baseline_kernels.tile_read_kernel", Short())
    with pytest.raises(AssertionError, match="every byte"):
        tile_reads(make_weight(1000, 64, CPU))


def test_a_read_from_l2_counts_every_pass():
    source = torch.randint(256, (2**16,), dtype=torch.uint8)
    read, num_bytes = ceilings.l2_read(source, tiny=True)
    part = num_bytes // 3
    assert num_bytes == 3 * part and part <= 2**16
    expected = 3 * int(source[:part].view(torch.int32).long().sum())
    assert int(read().sum()) % 2**32 == expected % 2**32


def test_tpsample_is_divided_by_the_read_in_the_shape_of_its_tiles():
    rows = [
        row(kind, kind, Timing((us,), True)) for kind, us in (("tpsample", 6.0), ("limit", 3.0))
    ]
    ours, limit = with_ratios(rows, 3.0, 4.0)
    assert ours["over_limit"] == 2.0 and ours["over_tile_read"] == 1.5
    assert "over_tile_read" not in limit


def test_the_model_takes_measured_ceilings(tmp_path, capsys, monkeypatch):
    h200 = CHIPS[1]
    measured = {
        "read_tb_per_s": h200.memory / 1e6,
        "l2_tb_per_s": h200.l2 / 1e6,
        "tile_read_tb_per_s": h200.memory * h200.row_pieces / 1e6,
        "one_kernel_us": h200.graph_us,
        "two_kernels_us": h200.graph_us + h200.second_kernel_us,
        "matmul_tflops": h200.flops * h200.sms * h200.clock * tile_model.MATRIX_EFFICIENCY / 1e6,
    }
    path = tmp_path / "result.json"

    def chip(**changes):
        result = {"machine": {"hardware": "NVIDIA H200"}, "measured": {**measured, **changes}}
        path.write_text(json.dumps(result))
        return measured_chip(path)

    shape, tile = tile_model.Shape(16384, 2048, "none"), Tile(128, 64, 64, 4, 4)
    assumed = predict(h200, shape, 1, 64, tile).step_us
    assert predict(chip(), shape, 1, 64, tile).step_us == pytest.approx(assumed)
    for slower in ("read_tb_per_s", "l2_tb_per_s", "matmul_tflops"):
        changed = predict(chip(**{slower: measured[slower] / 8}), shape, 1, 64, tile)
        assert changed.step_us > 1.1 * assumed, slower
    later = predict(chip(two_kernels_us=20.0), shape, 1, 64, tile)
    assert later.step_us == pytest.approx(assumed + 20.0 - measured["two_kernels_us"])
    monkeypatch.setattr(tile_model, "BATCHES", (16,))
    monkeypatch.setattr(tile_model, "SHAPES", ("49152x576",))
    assert tile_model.main(["--ceilings", str(path)]) == 0
    assert capsys.readouterr().out.count("predicted: µs") == 1
