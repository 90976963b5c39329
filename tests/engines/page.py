"""The page of a run: what was compared, with versions, machine and command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    lines = [
        "# engines",
        "",
        "Is a vLLM server with tpsample a vLLM server? It was started on loopback with",
        "`--worker-cls`, and asked by the `openai` client: ten kinds of requests at once, sixteen",
        "at once, streams, `n`, stop strings, a row of NaN, a killed worker, drafts by n-grams.",
        "All in fp32, no GPU.",
        "",
        "| compared | held | found |",
        "| --- | --- | --- |",
        *(
            f"| {verdict.what} | {WORDS[verdict.held]} | {_cell(verdict.found)} |"
            for verdict in verdicts
        ),
        "",
        "| server | vLLM's runner | ranks | tokens of | started in |",
        "| --- | --- | ---: | --- | ---: |",
        *(
            f"| {server['name']} | V{server['runner']} | {server['ranks']} | "
            f"{server['tokens_of']} | {server['ready_s']:.0f} s |"
            for server in about["servers"]
        ),
        "",
        *_texts(about["texts"]),
        f"{machine['cpu']}, {machine['cpu_cores']} cores, one thread a rank; the last run took",
        f"{about['minutes']:.1f} minutes, within {about['limit_minutes']:g} but for the starts of",
        f"servers, at a load average of {machine['load_average']} when it began.",
        f"{about['versions']},",
        f"`{machine['command']}`, commit {machine['commit']}, {machine['date']}.",
        "The runner V2 ran its kernels in Triton's interpreter.",
        "",
    ]
    return "\n".join(lines)


def _texts(texts: dict[str, dict[str, str]]) -> list[str]:
    """Return the table of one seed in all engines, which is the same text."""
    if not texts:
        return []
    return [
        "The same seed, the same text:",
        "",
        "| request | where | text |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {where} | {_cell(found)} |"
            for name, by_engine in texts.items()
            for found, where in _grouped(by_engine).items()
        ),
        "",
    ]


def _grouped(by_engine: dict[str, str]) -> dict[str, str]:
    grouped: dict[str, list[str]] = {}
    for engine, found in by_engine.items():
        grouped.setdefault(found, []).append(engine)
    return {found: ", ".join(engines) for found, engines in grouped.items()}


def _cell(found: str) -> str:
    return found.replace("\n", " ").replace("|", "\\|")
