"""How to get what an extra of pyproject.toml brings. No index of packages has tpsample yet."""

from __future__ import annotations


def how_to_install(extras: str = "cli,hf") -> str:
    """Return the command that installs some extras."""
    return f"in a clone of tpsample, pip install '.[{extras}]'"
