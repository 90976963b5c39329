"""The provenance of a number: machine, versions, commit, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

import tpsample
from tpsample.core.machine import interpreted

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TINY_RESULTS = Path(tempfile.gettempdir()) / "tpsample-benchmarks"
"""Where tiny ones go, which are not kept."""


def describe(device: torch.device, world_size: int = 1) -> dict[str, Any]:
    """Return everything that a reader needs to judge or repeat a measurement on `device`.

    TPSAMPLE_COMMIT names the commit of files that came without their repository, or with an older
    one.
    """
    # Pages of results are no code, and a run leaves one that nobody has committed yet.
    code = ("--untracked-files=no", "--", ".", ":!benchmarks/results")
    changes = printed("git", "-C", str(ROOT), "status", "--porcelain", *code)
    named = os.environ.get("TPSAMPLE_COMMIT")
    if named:
        changes = ""
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": command(),
        "commit": named or printed("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "hardware": "CPU",
        "world_size": world_size,
        "cpu": _cpu(),
        "cpu_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "tpsample": tpsample.__version__,
        "torch": torch.__version__,
        "triton_interpreter": interpreted(),
    }
    for package in ("triton", "flashinfer-python", "numpy"):
        record[package] = _version(package)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record |= {
            "hardware": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "driver": printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "links": printed("nvidia-smi", "topo", "-m") if world_size > 1 else None,
        }
    return record


def folder_name(topic: str, machine: dict[str, Any]) -> str:
    """Return the name of a folder of results: topic, hardware, date."""
    return f"{topic}-{slug(machine)}-{machine['date']}"


def slug(machine: dict[str, Any]) -> str:
    """Return the hardware for a folder name, such as "h200" or "cpu"; several GPUs as "h200x8"."""
    name = re.sub(r"[^a-z0-9]+", "-", machine["hardware"].lower().replace("nvidia", "")).strip("-")
    return name if machine["world_size"] == 1 else f"{name}x{machine['world_size']}"


def command() -> str:
    """Return the command of this process, with its module as `python -m` takes it.

    Of an absolute path its last part is kept: where a folder lies is the machine's own affair.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv[1:])
    return shlex.join(["python", "-m", module, *words])


def _cpu() -> str:
    match = re.search(r"model name\s*: (.+)", printed("cat", "/proc/cpuinfo") or "")
    return match[1] if match else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def printed(*command: str) -> str | None:
    """Return a command's output, or None where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
