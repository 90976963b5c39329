"""The benchmark of a CPU step runs, checks its ids, and says what the screen did."""

import json

from benchmarks import screening


def test_every_batch_has_times_candidates_and_ratios(tmp_path, capsys):
    result = tmp_path / "result.json"
    sizes = ["--vocab-size", "1000", "--hidden-size", "32", "--batches", "1,5", "--repeats", "2"]
    assert screening.main([*sizes, "--random-only", "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert [(row["dtype"], row["batch"]) for row in rows] == [
        ("float32", 1),
        ("float32", 5),
        ("bfloat16", 1),
        ("bfloat16", 5),
    ]
    for row in rows:
        assert row["ms"].keys() == row["over_baseline"].keys()
        assert row["over_baseline"][screening.BASELINE] == 1
        assert 1 <= row["candidates_alone_mean"] <= row["candidates_alone_p99"] < 30
        assert row["share_in_full"] == 0
        assert 0.03 < row["mb_read"] < 0.2
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
