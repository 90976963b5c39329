"""Older versions: a Python that runs, and how a machine without a network says that it has none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NO_NETWORK = ("Temporary failure in name resolution", "Network is unreachable", "ConnectionError")


def interpreter_of(version: tuple[int, int]) -> str | None:
    """Return a Python of a version that runs: on the path, or among those of pyenv."""
    name = ".".join(map(str, version))
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python{name}"), *sorted(pyenv.glob(f"{name}.*/bin/python"))]
    for each in found:
        # The shims of pyenv do not run where another version is chosen.
        if each and subprocess.run([each, "--version"], capture_output=True).returncode == 0:
            return str(each)
    return None
