"""The limits that a step is held against: each reads what it says, and all are in the record."""

import pytest
import torch

from benchmarks.lab import reads
from benchmarks.lab.harness import Run, execute
from benchmarks.lab.problem import make_weight
from benchmarks.lab.reads import tile_reads
from benchmarks.lab.results import RESULT, row, with_ratios
from benchmarks.lab.timing import Timing
from benchmarks.questions import ceilings

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
    result = execute(ceilings.BENCHMARK, Run.small(repeats=1), tmp_path / RESULT)
    assert set(result.measured) == MEASURED
    assert all(value > 0 for value in result.measured.values())
    rates = {each["candidate"]: each for each in result.rows if each["shape"].endswith(" bytes")}
    assert set(rates) == {"copy", "read", "l2"}
    for each in rates.values():
        num_bytes = int(each["shape"].split()[0])
        assert each["tb_per_s"] == pytest.approx(num_bytes / each["median_us"] / 1e6)


def test_without_triton_the_rest_is_measured(monkeypatch):
    for module in (ceilings, reads):
        monkeypatch.setattr(module, "has_triton", lambda device: False)
    run = Run.small(repeats=1)
    assert {each["candidate"] for rows in ceilings.rows(run) for each in rows} == {
        "copy",
        "read",
        "matmul",
    }


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
    kernel = pytest.importorskip("benchmarks.lab.kernels").tile_read_kernel

    class Short:
        def __getitem__(self, grid):
            return lambda **arguments: kernel[grid](**{**arguments, "num_rows": 500})

    monkeypatch.setattr("benchmarks.lab.kernels.tile_read_kernel", Short())
    with pytest.raises(AssertionError, match="every byte"):
        tile_reads(make_weight(1000, 64, CPU))


def test_a_read_from_l2_counts_every_pass():
    source = torch.randint(256, (2**16,), dtype=torch.uint8)
    read, num_bytes = reads.l2_read(source, tiny=True)
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
