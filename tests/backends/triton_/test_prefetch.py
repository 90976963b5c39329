"""Programs ask ahead of their loads for their own rows, and for each byte of them once."""

import pytest

from benchmarks.static.builds import LM_HEAD, SCREEN, launches
from tpsample.backends.triton_ import screen_launches
from tpsample.backends.triton_.kernels.overlap import parts_of_row


@pytest.mark.parametrize("hidden_size", [96, 384, 512, 4096])
@pytest.mark.parametrize("rows", [1, 64])
def test_no_more_than_a_row_is_asked_for(hidden_size, rows, monkeypatch):
    monkeypatch.setattr(screen_launches, "interpreted", lambda: False)  # whose tiles have one stage
    found = launches(90, "plain", screening="int8", shape=(2048, hidden_size), rows=rows)
    prefetches = {each.kernel: each.named for each in found if each.named.get("PREFETCH")}
    screen, head = prefetches[SCREEN], prefetches[LM_HEAD]
    assert 0 < screen["PREFETCH"] <= screen["PADDED_SIZE"]
    assert 0 < head["PREFETCH"] <= 2 * hidden_size


@pytest.mark.parametrize(
    ("threads", "rows", "num_bytes", "parts"),
    [
        (128, 64, 512, 2),
        (256, 64, 512, 4),
        (256, 128, 512, 2),
        (128, 128, 512, 1),
        (256, 64, 96, 2),  # 6 times 16 bytes cannot be cut in 4
        (256, 64, 80, 1),
    ],
)
def test_threads_that_hold_the_same_row_share_it(threads, rows, num_bytes, parts):
    assert parts_of_row(threads, rows, num_bytes) == parts
    assert num_bytes % (16 * parts) == 0
