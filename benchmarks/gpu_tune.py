"""Section `tune` of `gpu_check`: the fastest tiles of the shapes that the sections behind it time.

They use its table at once, because it is the table that the sampler reads. A copy goes into the
archive, with what each point took.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_sections, machine, tune
from benchmarks.gpu_compile import processes
from benchmarks.timing import one_line
from tpsample.distributed import Job
from tpsample.local import measured_tiles

TABLE, RECORD = "measured_tiles.json", "tune.json"
_SPARE_SECONDS = 15.0


def tune_shapes(
    device: torch.device, dry_run: bool, output: Path, until: float
) -> Iterator[dict[str, Any]]:
    """Compile every candidate, then time shape by shape; the table is whole after each.

    A dry run writes no table but the one in its folder.

    Args:
        output: the folder of result folders.
        until: the `time.time()` at which the section will be killed.
    """
    run = gpu_sections.run_of("tune", dry_run, Job(device=device))
    _, _, world_sizes = gpu_sections.TUNED
    facts = machine.describe(device)
    folder = output / f"tune-{machine.slug(facts)}-{facts['date']}"
    folder.mkdir(parents=True, exist_ok=True)
    yield {"folder": folder.name}
    table = folder / TABLE if dry_run else measured_tiles.FILE
    until -= min(_SPARE_SECONDS, (until - time.time()) / 3)
    try:
        compiled = tune.compile_first(run, world_sizes, processes(), until)
    except AssertionError as error:  # a candidate that does not compile is left out again
        compiled = {"not compiled": one_line(error)}
    record = {"machine": facts, **compiled, "tuned": [], "notes": run.notes}
    for line in tune.fill(run, world_sizes[: 1 if dry_run else None], table, until - time.time()):
        record["tuned"].append(line)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        if table.parent != folder:
            shutil.copy(table, folder / TABLE)
        yield {"tuned": [line]}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    yield {**compiled, "notes": run.notes}
