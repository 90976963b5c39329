"""Registers the adapter as the one sampling backend that SGLang has on a CPU, and changes SGLang.

The variable TPSAMPLE_SGLANG names a change of `CHANGES`; without it there is none.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import sglang as engine
from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tpsample.integrations import sglang

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def _later() -> None:
    """Let SGLang be of a later version."""
    engine.__version__ = "0.6.0"


def _counts_otherwise() -> None:
    """Let SGLang count one token more where it samples, as a later version may do."""

    def late(original: Any, runner: Any, output: Any, forward_batch: Any) -> Any:
        forward_batch = copy.copy(forward_batch)
        forward_batch.seq_lens = forward_batch.seq_lens + 1
        return original(runner, output, forward_batch)

    HookRegistry.register(f"{_RUNNER}.sample", late, HookType.AROUND)


def _deterministic() -> None:
    """Leave out the kernels of deterministic inference, which need a GPU."""
    add_deterministic_attention_backend_choices(["torch_native"])
    place = f"{_RUNNER}.maybe_enable_batch_invariant_mode"
    HookRegistry.register(place, lambda runner: None, HookType.REPLACE)


CHANGES = {"later": _later, "counts": _counts_otherwise, "deterministic": _deterministic}


def register() -> None:
    """Do as the package's own entry point, and take the place of the backend "pytorch"."""
    if change := os.environ.get("TPSAMPLE_SGLANG"):
        CHANGES[change]()
    sglang.register()
    sglang.register("pytorch")
