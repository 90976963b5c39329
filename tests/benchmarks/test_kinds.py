"""Each kind of call launches, calls and sends on a GPU's plan what its page says."""

from benchmarks.static import kinds


def test_each_kind_of_call_is_as_dear_as_its_page_says():
    assert kinds.found() == kinds.EXPECTED
