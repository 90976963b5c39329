"""SGLang's environment, beside vLLM's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SGLANG = "sglang==0.5.23"
BESIDE_SGLANG = ("gguf", "orjson", "IPython", "addict", "xxhash", "zstandard")
"""Packages that SGLang imports, beside those of vLLM's environment."""


def make_sglang(cache: Path) -> Path:
    """Install SGLang beside vLLM's environment, once, and return its Python.

    Its dependencies are a CUDA build of torch and kernels. On a CPU it runs with vLLM's, a few
    small packages more, and stands-in for what is only imported (`sglang_on_cpu`).
    """
    folder = cache / "sglang"
    python, stamp = folder / "bin" / "python", folder / f"installed-{SGLANG}"
    if stamp.exists():
        return python
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (theirs,) = (cache / "vllm").glob("lib/python*/site-packages")
    (site / "vllm.pth").write_text(f"{theirs.resolve()}\n")
    subprocess.run([*pip, "install", "--no-deps", SGLANG], check=True)
    subprocess.run([*pip, "install", *BESIDE_SGLANG], check=True)
    metadata = site / "tpsample_on_cpu-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tpsample-on-cpu\nVersion: 0\n")
    plugin = "[sglang.srt.plugins]\ntpsample_on_cpu = tpsample_on_cpu:register\n"
    (metadata / "entry_points.txt").write_text(plugin)
    stamp.touch()
    return python
