"""The page of a run: what was compared, with versions, machine and command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lab.text import cell, table
from tests.engines.verdicts import Verdict

WORDS = {True: "yes", False: "**no**", None: "not run"}


def write(folder: Path, verdicts: list[Verdict], about: dict[str, Any]) -> None:
    """Write README.md and result.json."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {**about, "verdicts": [vars(verdict) for verdict in verdicts]}
    (folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "README.md").write_text(text(verdicts, about))


def text(verdicts: list[Verdict], about: dict[str, Any]) -> str:
    """Return the page."""
    machine = about["machine"]
    compared = [(each.what, WORDS[each.held], cell(each.found)) for each in verdicts]
    started = [
        (each["name"], f"V{each['runner']}", each["ranks"], each["tokens_of"],
         f"{each['ready_s']:.0f} s")
        for each in about["servers"]
    ]  # fmt: skip
    same = [
        (name, where, cell(found))
        for name, by_engine in about["texts"].items()
        for found, where in _grouped(by_engine).items()
    ]
    parts = [
        "# engines",
        "Is a vLLM server with tpsample a vLLM server? It was started on loopback with "
        "`--worker-cls`, and asked by the `openai` client: ten kinds of requests at once, sixteen "
        "at once, streams, `n`, stop strings, a row of NaN, a killed worker, drafts. "
        "All in fp32, no GPU.",
        table(("compared", "held", "found"), compared, right=3),
        table(("server", "vLLM's runner", "ranks", "tokens of", "started in"), started, right=4),
        *(
            ("The same seed, the same text:", table(("request", "where", "text"), same, 3))
            * bool(same)
        ),
        f"{machine['cpu']}, {machine['cpu_cores']} cores, one thread a rank; the last run took "
        f"{about['minutes']:.1f} minutes, within {about['limit_minutes']:g} but for the starts of "
        f"servers, at a load average of {machine['load_average']} when it began. "
        f"{about['versions']}, `{machine['command']}`, commit {machine['commit']}, "
        f"{machine['date']}. The runner V2 ran its kernels in Triton's interpreter.",
    ]
    return "\n\n".join(parts) + "\n"


def _grouped(by_engine: dict[str, str]) -> dict[str, str]:
    grouped: dict[str, list[str]] = {}
    for engine, found in by_engine.items():
        grouped.setdefault(found, []).append(engine)
    return {found: ", ".join(engines) for found, engines in grouped.items()}
