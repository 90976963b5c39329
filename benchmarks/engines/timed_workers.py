"""Workers of vLLM that time their LM head and sampler: vLLM's own, and the adapter's.

    --worker-cls benchmarks.engines.timed_workers.Adapter

Each rank appends a line per step to a file of its own in the folder TPSAMPLE_WATCH: the rows that
were sampled, and the seconds from the call of `compute_logits` and of the sampler to their returns.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.engines.steps import file_of
from tpsample.integrations.vllm import Worker

FOLDER = Path(os.environ["TPSAMPLE_WATCH"])


def time_steps(worker: Any) -> None:
    """Time the steps of a worker that has loaded its model, whichever sampler takes them."""
    runner, head_s, rows = worker.model_runner, 0.0, 0
    compute_logits, forward = runner.model.compute_logits, runner.sampler.forward
    lines = file_of(FOLDER, worker.rank).open("a")

    def timed_head(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal head_s, rows
        rows, start = len(hidden_states), time.perf_counter()
        logits = compute_logits(hidden_states, *args, **kwargs)
        head_s = time.perf_counter() - start
        return logits

    def timed_sampler(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = forward(*args, **kwargs)
        lines.write(f"{rows} {head_s + time.perf_counter() - start}\n")
        lines.flush()
        return out

    runner.model.compute_logits, runner.sampler.forward = timed_head, timed_sampler


class Own(CPUWorker):
    """vLLM's own worker, whose logits are gathered."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        time_steps(self)


class Adapter(Worker):
    """The adapter's worker."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        time_steps(self)
