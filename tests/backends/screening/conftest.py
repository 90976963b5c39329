"""Steps of every size read the 8-bit copy first, not only those where it is faster."""

import pytest

from tpsample.backends.numba_ import launch as native_backend


@pytest.fixture(autouse=True)
def _the_copy_comes_first(monkeypatch):
    monkeypatch.setattr(native_backend, "COPY_ROWS", 64)
