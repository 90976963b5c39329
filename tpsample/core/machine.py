"""The kernels that this machine can run, interpreted, overlapping or native, and what is missing.

Each question is asked once.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from tpsample.core.checks import kind_and_text
from tpsample.core.version import __version__

_ROOT = Path(__file__).parents[2]
"""The clone that this file is in, if it was not installed."""


@cache
def interpreted() -> bool:
    """Whether TRITON_INTERPRET is on, read once.

    Later changes of the variable are ignored, because Triton ignores them too: a function is
    interpreted or compiled as it was when its module was imported.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def amd() -> bool:
    """Return whether this PyTorch is built for GPUs of AMD, which it calls "cuda" too."""
    return torch.version.hip is not None


OVERLAP_ARCH = 90
"""Compute capability × 10 from which programmatic dependent launch and bulk prefetch exist."""


@cache
def kernels_overlap(device: torch.device) -> bool:
    """Return whether the kernels on a device may.

    An MI300 of AMD reports (9, 4), and can do neither.
    """
    if device.type != "cuda" or amd() or interpreted():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= OVERLAP_ARCH


ASYNC_ARCHS = range(90, 120)
"""GPUs whose products read shared memory by a way of their own; those of sm_120 do not."""
TENSOR_MEMORY_ARCHS = range(100, 120)
"""GPUs whose products go to a memory of their own."""
FENCED = (3, 7, 1)
"""The first Triton that orders copies before such products."""
EARLY_READS = (3, 9)
"""The first Triton whose code reads tensor memory too early; none is known to be repaired."""


def compiler_doubt(arch: int, triton: str) -> str | None:
    """Return what is known against code that a Triton compiles for a GPU, or None if nothing is.

    It was read in the code and seen by executing that on a CPU (`tests.compiled`). On one H100 no
    token was wrong.

    Args:
        arch: compute capability × 10 of a GPU of NVIDIA.
        triton: version, such as "3.7.1".
    """
    parts = (re.match(r"\d*", part) for part in triton.split(".")[:3])
    version = tuple(int(part[0] or 0) for part in parts if part)
    fixed = ".".join(map(str, FENCED))
    way_out = f"take Triton {fixed}, which torch 2.13 installs, or compare steps with `doctor`"
    if arch in ASYNC_ARCHS and version < FENCED:
        return (
            f"triton: {triton} compiles products for sm_{arch} without the fence that PTX asks for "
            f"behind their copies, so a token may be wrong, though none was seen; {way_out}"
        )
    if arch in TENSOR_MEMORY_ARCHS and version >= EARLY_READS:
        return (
            f"triton: {triton} compiles for sm_{arch} code that reads products before it waits for "
            f"them, and an emulated GPU drew wrong tokens with it; {way_out}"
        )
    return None


OLDEST = (0, 61)
"""The first Numba that supports numpy 2.1 and Python 3.13."""


def how_to_install(extras: str = "hf") -> str:
    """Return the command that installs some extras of the tpsample that runs, from where it came.

    pip keeps that beside the package: a folder, a file or an address. It keeps nothing of a package
    that it found by name, because the same name finds it again.
    """
    came: dict[str, Any] = {}
    try:
        came = json.loads(distribution("tpsample").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # its folder is on the path, and was never installed
        if (_ROOT / "pyproject.toml").exists():
            return f"pip install {quote(f'{_ROOT}[{extras}]')}"
    url, missing = str(came.get("url", "")), ""
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        if came.get("dir_info", {}).get("editable"):
            return f"pip install -e {quote(f'{path}[{extras}]')}"
        missing = ", with its new place, because nothing is there now" * (not Path(path).exists())
    elif "vcs_info" in came:
        url = f"{came['vcs_info']['vcs']}+{url}@{came['vcs_info']['commit_id']}"
    which = f" @ {url}" if url else f"=={__version__}"
    return f"pip install {quote(f'tpsample[{extras}]{which}')}{missing}"


@cache
def numba_missing() -> str | None:
    """Return why native kernels are not available, in one line, or None if they are."""
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        return f"Numba cannot be imported ({error}); {how_to_install('cpu')}"
    except Exception as error:  # a broken installation raises whatever it raises
        return _broken(error)
    version = tuple(int(part) for part in numba.__version__.split(".")[:2] if part.isdigit())
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"Numba {numba.__version__} is older than {oldest}; {how_to_install('cpu')}"
    try:
        modules = {name: importlib.import_module(f"numba.{name}") for name in _NEEDED}
        disabled = modules["core.config"].DISABLE_JIT
    except Exception as error:
        return _broken(error)
    return "NUMBA_DISABLE_JIT is set, so Numba compiles nothing; unset it" if disabled else None


_NEEDED = ("core.config", "core.caching", "core.compiler_lock", "core.serialize", "extending")
"""Modules of Numba that native kernels need; an installation that is not whole may lack some."""


def _broken(error: Exception) -> str:
    said = " ".join(kind_and_text(error).split())
    return f"Numba is broken ({said}); {how_to_install('cpu')}"
