"""The kernels of others that are measured beside tpsample, where their packages are at hand.

They are no dependency, and nothing of theirs is in this repository. They are imported as usual; the
folder that `TPSAMPLE_BASELINES` names is searched after the installed packages, so that a copy of
torch in it does no harm:

    pip install --target DIR flashinfer-python nvtx
    cp -r FlashSampling/src/fused_mm_sampling DIR     # github.com/FlashSampling/FlashSampling
    TPSAMPLE_BASELINES=DIR python -m benchmarks.run single_gpu

Both need a GPU. One that is missing is left out, and the result says how to add it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = "TPSAMPLE_BASELINES"
"""The environment variable with the folder of packages to compare with."""

FLASHINFER, FLASHSAMPLING = "FlashInfer", "FlashSampling"
_PACKAGES = {
    FLASHINFER: ("flashinfer", "`pip install --target DIR flashinfer-python`"),
    FLASHSAMPLING: (
        "fused_mm_sampling",
        "copy src/fused_mm_sampling of github.com/FlashSampling/FlashSampling to DIR; it imports "
        "flashinfer and nvtx",
    ),
}


def usable(name: str, device: torch.device) -> bool:
    """Return whether the kernels of `name` can be measured on a device."""
    return runs_on(device) and _is_here(name)


def runs_on(device: torch.device) -> bool:
    """Return whether kernels of CUDA run there."""
    return device.type == "cuda"


def notes(device: torch.device, names: Sequence[str] = (FLASHINFER, FLASHSAMPLING)) -> list[str]:
    """Say what is left out, and how to add it; say how the others draw."""
    lines = []
    for name in names:
        package, how = _PACKAGES[name]
        if not _is_here(name):
            lines.append(
                f"{name} was not measured, because there is no package {package}; {how}, and set "
                f"{FOLDER}=DIR."
            )
        elif not runs_on(device):
            lines.append(f"{name} was not measured, because it needs a GPU.")
        else:
            lines.append(
                f"{name} draws the same at every replay of its graph, whose seed is fixed."
            )
    return lines


def flashinfer_sample(
    logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """FlashInfer's kernels without a filter, for one kind of filter, or for top_k before top_p.

    vLLM takes them with VLLM_USE_FLASHINFER_SAMPLER=1, SGLang with --sampling-backend flashinfer.
    """
    sampling = _module(FLASHINFER, "sampling")
    logits = logits.float()
    if top_k > 0 and top_p < 1:
        return sampling.top_k_top_p_sampling_from_logits(logits, top_k, top_p)
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return sampling.sampling_from_logits(logits)
    probabilities = logits.softmax(dim=1)
    if top_k > 0:
        return sampling.top_k_sampling_from_probs(probabilities, top_k)
    if top_p < 1:
        return sampling.top_p_sampling_from_probs(probabilities, top_p)
    return sampling.min_p_sampling_from_probs(probabilities, min_p)


def flash_sampling(hidden_states: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """A step of FlashSampling's Triton kernel on one rank, at T = 1: ids [B].

    Its kernel is tuned again for each number of rows. By itself it keeps the tile of the first
    number, in a file as well.
    """
    temperature, tuned = torch.ones((), device=weight.device), False

    def step() -> Tensor:
        nonlocal tuned
        # It prints at its first step; stdout is for results.
        with contextlib.redirect_stdout(sys.stderr):
            core = _module(FLASHSAMPLING, "core")
            if not tuned:
                core.fused_mm_sample_triton_kernel.cache_results = False
                core.fused_mm_sample_triton_kernel.cache.clear()
                tuned = True
            drawn = core.fused_mm_sample_triton(
                weights=weight,
                hidden_states=hidden_states,
                num_samples=1,
                temperature=temperature,
                seed=0,
            )
        return drawn.squeeze(1)

    return step


def _is_here(name: str) -> bool:
    _search_folder()
    return importlib.util.find_spec(_PACKAGES[name][0]) is not None


def _module(name: str, module: str) -> Any:
    _search_folder()
    return importlib.import_module(f"{_PACKAGES[name][0]}.{module}")


def _search_folder() -> None:
    """Have imports look into the folder too.

    Raises:
        ValueError: the variable names no folder.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    if not Path(folder).is_dir():
        raise ValueError(f"{FOLDER}: expected a folder with packages, got {folder!r}")
    if folder not in sys.path:
        sys.path.append(folder)
