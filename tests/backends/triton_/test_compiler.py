"""A sampler on a GPU says what is known against the code that its Triton compiles for it."""

import warnings

import pytest
import torch
import triton

from tpsample import LMHeadSampler
from tpsample.backends.triton_.tile_table import Gpu


def _made(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, version: str) -> list[str]:
    """Return the warnings of a sampler on such a GPU with such a Triton."""
    monkeypatch.setattr(Gpu, "of", staticmethod(lambda _: gpu))
    monkeypatch.setattr(triton, "__version__", version)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LMHeadSampler(torch.zeros(8, 4), backend="triton", group="alone")
    return [str(each.message) for each in said]


def test_a_sampler_warns_of_a_compiler_that_is_known_to_be_wrong(monkeypatch):
    h100 = Gpu("NVIDIA H100", 90, 132)
    (said,) = _made(monkeypatch, h100, "3.7.0")
    assert said.startswith("triton: 3.7.0 compiles products for sm_90 without the fence")
    assert not _made(monkeypatch, h100, "3.7.1")
    assert not _made(monkeypatch, Gpu("AMD Instinct MI300X", 94, 304, amd=True), "3.7.0")
