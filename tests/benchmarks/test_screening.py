"""The benchmark of a CPU step runs and checks its ids."""

import json

from benchmarks import screening


def test_every_batch_has_times_and_ratios(tmp_path, capsys):
    sizes = ["--vocab-size", "1000", "--hidden-size", "32", "--batches", "1,5", "--repeats", "2"]
    assert screening.main([*sizes, "--random-only", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["dtype"], row["batch"]) for row in rows] == [
        ("float32", 1),
        ("float32", 5),
        ("bfloat16", 1),
        ("bfloat16", 5),
    ]
    for row in rows:
        assert row["ms"].keys() == row["over_baseline"].keys()
        assert row["over_baseline"][screening.BASELINE] == 1
    page = (tmp_path / "README.md").read_text()
    assert page.count("| random | ") == len(rows) and "of 4 points" in page
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
