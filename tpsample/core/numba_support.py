"""Whether Numba can compile the native kernels of a CPU here, and the reason if it cannot."""

from __future__ import annotations

import importlib
from functools import cache

OLDEST = (0, 61)
"""The first Numba that supports numpy 2.1 and Python 3.13."""

WAY_OUT = 'install it with: pip install "tpsample[cpu]"'


@cache
def missing() -> str | None:
    """Return why native kernels are not available, in one line, or None if they are."""
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        return f"Numba cannot be imported ({error}); {WAY_OUT}"
    except Exception as error:  # a broken installation raises whatever it raises
        said = " ".join(str(error).split())
        return f"Numba is broken ({type(error).__name__}: {said}); {WAY_OUT}"
    version = tuple(int(part) for part in numba.__version__.split(".")[:2] if part.isdigit())
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"Numba {numba.__version__} is older than {oldest}; {WAY_OUT}"
    return None
