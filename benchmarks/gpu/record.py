"""The record of the GPU check: facts as sections find them, one page, one archive of everything.

A section tells each fact on a line of its own, so that one that is killed keeps those it had. The
record raises nothing: a file that cannot be written costs a line, not the sections that follow.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import goals_read
from benchmarks.lab import text

ARCHIVE = "gpu_check.tar.gz"
_MARK = "gpu_check: "


def tell(facts: dict[str, Any]) -> None:
    """Print facts for the process that started this one."""
    print(_MARK + json.dumps(facts), flush=True)


def told(printed: str) -> dict[str, Any]:
    """Return the facts in what a process has printed; other lines, such as a library's, are not.

    Lists of the same name become one list.
    """
    lines = (line.removeprefix(_MARK) for line in printed.splitlines() if line.startswith(_MARK))
    whole: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line of a process that was killed
            for name, value in json.loads(line).items():
                earlier = whole.get(name)
                several = isinstance(value, list) and isinstance(earlier, list)
                whole[name] = earlier + value if several else value
    return whole


@dataclass
class Record:
    """The facts of a run.

    Attributes:
        output: the folder of result folders.
        archive: the file that has the record and every result folder of this run.
        folder: the record's own folder in `output`.
        sections: by name, in the order in which they ran.
        goals: as `goals_read` has them.
        problems: what could not be written, and why.
    """

    output: Path
    archive: Path
    dry_run: bool
    folder: str = "gpu_check"
    sections: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def survives(self, what: str) -> Iterator[None]:
        """Note what the body raises, and go on."""
        try:
            yield
        except Exception as error:
            line = f"{what}: {type(error).__name__}: {error}"
            if line not in self.problems:
                self.problems.append(line)
                print(line, flush=True)

    def keep(self) -> None:
        """Bring the record, its page and the archive up to date.

        Sections of an earlier run into the same folder stay, after those of this one, until they
        are run again.
        """
        earlier: dict[str, Any] = {}
        path = self.output / self.folder / "check.json"
        with self.survives("The earlier record was not read"):
            earlier = json.loads(path.read_text())["sections"] if path.exists() else {}
        left = {name: its for name, its in earlier.items() if name not in self.sections}
        whole: dict[str, Any] = {"dry_run": self.dry_run, "sections": self.sections | left}
        with self.survives("The goals were not read"):
            self.goals = goals_read(whole["sections"])
        whole |= {"goals": self.goals, "problems": self.problems}
        files = {"check.json": json.dumps(whole, indent=1) + "\n", "README.md": _page(whole)}
        for name, content in files.items():
            with self.survives(f"{name} was not written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_name(f"{name}.part")
                unfinished.write_text(content)
                unfinished.replace(path.with_name(name))
        with self.survives("The archive was not written"):
            self._archive(files)

    def _archive(self, files: dict[str, str]) -> None:
        """Write one file, whole or not at all. The record comes from memory, not from its file."""
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.archive.with_name(f"{self.archive.name}.part")
        folders = {each.get("facts", {}).get("folder") for each in self.sections.values()}
        with tarfile.open(unfinished, "w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"{self.folder}/{name}")
                entry.size = len(content.encode())
                tar.addfile(entry, io.BytesIO(content.encode()))
            for name in sorted(each for each in folders if each):
                with self.survives(f"{name} is not in the archive"):
                    tar.add(self.output / name, arcname=name)
        unfinished.replace(self.archive)


def _page(record: dict[str, Any]) -> str:
    parts = ["# gpu_check"]
    if record["dry_run"]:
        parts.append("**Dry run: tiny sizes on a CPU, the kernels in the Triton interpreter.**")
    parts += record["problems"]
    goals = [(each["goal"], each["target"], each["found"]) for each in record["goals"]]
    parts.append(text.table(("goal", "at most", "found"), goals, right=3))
    sections = [
        (name, each["status"], f"{each['seconds']:.0f}", (each["commit"] or "")[:10])
        for name, each in record["sections"].items()
    ]
    parts.append(text.table(("section", "status", "seconds", "commit"), sections, right=4))
    for name, section in record["sections"].items():
        error = {"error": section["error"]} if "error" in section else {}
        facts = {**error, **section.get("facts", {})}
        cells = [
            (key, f"{len(value)} of them" if key == "rows" else text.cell(str(value)))
            for key, value in facts.items()
        ]
        parts += [f"## {name}", text.table(("name", "value"), cells, right=2)]
    return "\n\n".join(parts) + "\n"
