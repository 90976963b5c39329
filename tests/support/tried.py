"""Tests of an adapter are skipped beside another version of its engine, which it refuses."""

from __future__ import annotations

import importlib.metadata

import pytest

from tpsample.integrations import TRIED


def need_transformers(*, module: bool = False) -> None:
    """Skip a test, or a module of tests, that needs the transformers of the adapter."""
    tried = TRIED["transformers"]
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the extra hf", allow_module_level=module)
    if not found.startswith(tuple(f"{each}." for each in tried)):
        pytest.skip(
            f"needs transformers {' or '.join(tried)}, which the adapter supports",
            allow_module_level=module,
        )
