"""The record of `gpu_check`: brought up to date after every section, and archived whole."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

ARCHIVE = "gpu_check.tar.gz"


def keep(done: dict[str, Any], dry_run: bool, folder: Path) -> None:
    """Write the record and its page; sections of an earlier run stay until they are run again."""
    path = folder / "check.json"
    earlier = json.loads(path.read_text())["sections"] if path.exists() else {}
    record = {"dry_run": dry_run, "sections": earlier | done}
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, json.dumps(record, indent=1) + "\n")
    _write(folder / "README.md", _page(record))


def archive(output: Path, folders: list[str | None]) -> None:
    """Write these result folders into one file, whole or not at all."""
    unfinished = output / f"{ARCHIVE}.part"
    with tarfile.open(unfinished, "w:gz") as tar:
        for name in sorted({name for name in folders if name}):
            tar.add(output / name, arcname=name)
    unfinished.replace(output / ARCHIVE)


def _write(path: Path, text: str) -> None:
    """Replace the file at once: a process killed here leaves the last one whole."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.replace(path)


def _page(record: dict[str, Any]) -> str:
    lines = ["# gpu_check", ""]
    if record["dry_run"]:
        lines += ["**Dry run: tiny sizes on a CPU, the kernels in the Triton interpreter.**", ""]
    lines += ["| section | status | seconds | commit |", "| --- | --- | ---: | --- |"]
    for name, section in record["sections"].items():
        commit = (section["commit"] or "")[:10]
        lines.append(f"| {name} | {section['status']} | {section['seconds']:.0f} | {commit} |")
    for name, section in record["sections"].items():
        facts = section.get("facts", {})
        if "error" in section:
            facts = {"error": section["error"], **facts}
        lines += ["", f"## {name}", "", "| what | value |", "| --- | --- |"]
        for key, value in facts.items():
            text = str(value).replace("\n", "<br>").replace("|", "\\|")
            lines.append(f"| {key} | {text} |")
    return "\n".join(lines) + "\n"
