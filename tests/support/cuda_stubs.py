"""Libraries that stand for CUDA's, so that a CUDA build of torch runs on a CPU, without them.

    python -m tests.support.cuda_stubs FOLDER    of an environment with torch alone

Each has the functions that torch looks for when it is loaded, under the versions that it asks for.
None does anything, so torch finds no GPU. Needs cc, readelf and nm.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

_OF_CUDA = re.compile(r"lib(cu|nv|nccl)")
_CUDA_PACKAGES = re.compile(r"^Requires-Dist: (nvidia|cuda)-.*\n", re.MULTILINE)
_FUNCTION = re.compile(r"(cu|nccl|nv|CUDA)")


def make(environment: Path) -> list[str]:
    """Write the libraries beside torch's own, and return their names.

    torch's metadata then name no packages of CUDA's, so that pip may install others beside it. A
    build for CPUs stays as it is.
    """
    (folder,) = environment.glob("lib/python3*/site-packages/torch/lib")
    (metadata,) = environment.glob("lib/python3*/site-packages/torch-*/METADATA")
    text, count = _CUDA_PACKAGES.subn("", metadata.read_text())
    if not count:
        return []
    metadata.write_text(text)
    # This one call is made on a CPU, too, and torch crashes over an error of a stub.
    graphs = folder.parent / "cuda" / "graphs.py"
    graphs.write_text(
        graphs.read_text().replace("return _cuda_isCurrentStreamCapturing()", "return False")
    )
    needed: set[str] = set()
    library_of: dict[str, str] = {}  # by version
    functions: dict[str, set[str]] = defaultdict(set)  # by version, "" is none
    for library in folder.glob("*.so*"):
        file = ""
        for line in _printed("readelf", "-dVW", library).splitlines():
            if found := re.search(r"\(NEEDED\).*\[(.*)\]", line):
                needed.add(found[1])
            elif found := re.search(r"Version: 1  File: (\S+)", line):
                file = found[1]
            elif found := re.search(r"Name: (\S+)\s+Flags", line):
                library_of[found[1]] = file
        for line in _printed("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.lstrip("@")
            if _OF_CUDA.match(library_of.get(version, "")) or (
                not version and _FUNCTION.match(name)
            ):
                functions[version].add(name)
    names = sorted(n for n in needed if _OF_CUDA.match(n) and not (folder / n).exists())
    for name in names:
        versions = [version for version, library in library_of.items() if library == name]
        _write(folder / name, {each: functions[each] for each in versions or [""]})
    return names


def _write(library: Path, functions: dict[str, set[str]]) -> None:
    code = "".join(
        f"int {name}(void) {{ return 999; }}\n" for name in set().union(*functions.values())
    )
    maps = [
        f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n"
        for version, names in functions.items()
        if version
    ]
    with TemporaryDirectory() as folder:
        source, versions = Path(folder) / "stub.c", Path(folder) / "versions"
        source.write_text(code)
        versions.write_text("".join(maps))
        words = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", library, source]
        words.append(f"-Wl,-soname,{library.name}")
        words += [f"-Wl,--version-script={versions}"] * bool(maps)
        subprocess.run(words, check=True)


def _printed(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(*make(Path(sys.argv[1])))
