"""The versions of transformers whose `generate` the adapter knows."""

from __future__ import annotations

SUPPORTED = ((5, 23),)
"""Major and minor version. The loop of `generate` is not a stable interface of transformers."""


def check_version(found: str) -> None:
    """Raise an ImportError for a version whose `generate` was not tried."""
    known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    major, minor = (int(part) for part in found.split(".")[:2])
    if (major, minor) not in SUPPORTED:
        raise ImportError(
            f"tpsample.integrations.transformers: transformers {known} is supported, {found} is "
            f"installed; pip install 'transformers=={known.split(', ')[-1]}.*'"
        )
