"""The page of `benchmarks.engines.bench`: medians with their range, and where tpsample loses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab import quiet, text

TPSAMPLE, VLLM = "tpsample", "vLLM"
"""The servers: tokens come from the adapter, or are vLLM's own."""
SHOWN = {
    "output_throughput": "tokens per second",
    "median_tpot_ms": "time per output token, median of requests, ms",
    "p99_tpot_ms": "time per output token, p99, ms",
    "median_itl_ms": "between two tokens, median, ms",
    "p99_itl_ms": "between two tokens, p99, ms",
    "median_ttft_ms": "to the first token, median, ms",
    "p99_ttft_ms": "to the first token, p99, ms",
}
"""Numbers of vLLM's result, as the page calls them. Of the first more is better."""
ENOUGH = 3
"""Rounds from which on ranges that do not overlap are taken for more than chance."""

Row = dict[str, Any]


def write(folder: Path, rounds: list[Row], about: dict[str, Any]) -> None:
    """Write README.md and result.json."""
    folder.mkdir(parents=True, exist_ok=True)
    # JSON has no infinity.
    record = {**about, "rounds": [{**each, "rate": f"{each['rate']:g}"} for each in rounds]}
    (folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "README.md").write_text(page(rounds, about))


def compared(rounds: list[Row]) -> list[Row]:
    """Return a row per number of ranks, load and number: both medians and ranges, and the ratio.

    Above 1 the ratio is in tpsample's disfavour, whatever the number is.
    """
    found = []
    points = dict.fromkeys((each["ranks"], each["rate"]) for each in rounds)
    for ranks, rate in points:
        own = [each for each in rounds if (each["ranks"], each["rate"]) == (ranks, rate)]
        for key in SHOWN:
            values = {
                name: [each[key] for each in own if each["server"] == name]
                for name in (TPSAMPLE, VLLM)
            }
            ratio = median(values[TPSAMPLE]) / median(values[VLLM])
            if key == "output_throughput":
                ratio = 1 / ratio
            ours, theirs = values[TPSAMPLE], values[VLLM]
            apart = max(ours) < min(theirs) or max(theirs) < min(ours)
            apart = apart and len(ours) >= ENOUGH
            row = {"ranks": ranks, "rate": rate, "key": key, "ratio": ratio, "apart": apart}
            row |= {name: _cell(each) for name, each in values.items()}
            found.append({**row, "rounds": len(values[VLLM])})
    return found


def page(rounds: list[Row], about: dict[str, Any]) -> str:
    """Return the page."""
    rows = compared(rounds)
    lines = [
        "# vllm_bench",
        "What does the adapter cost or save a vLLM server? `vllm bench serve` asked two servers "
        "with the same options in turn, one of them with "
        "`--worker-cls tpsample.integrations.vllm.Worker`.",
        *_warnings(about),
    ]
    for rate in dict.fromkeys(row["rate"] for row in rows):
        own = [row for row in rows if row["rate"] == rate]
        cells = [
            (row["ranks"], SHOWN[row["key"]], row[TPSAMPLE], row[VLLM], _ratio(row)) for row in own
        ]
        header = ("ranks", "", TPSAMPLE, VLLM, "factor, above 1 tpsample is worse")
        lines += [f"## {load_name(rate).capitalize()}", text.table(header, cells, right=2)]
    lines += _losses(rows)
    return "\n\n".join([*lines, *_notes(rows, about)]) + "\n"


def load_name(rate: float) -> str:
    """Return how requests arrive."""
    if rate == float("inf"):
        return "all requests at once"
    return f"{text.three(rate)} request{'s' * (rate != 1)} per second"


def _cell(values: list[float]) -> str:
    return text.spread(median(values), min(values), max(values))


def _ratio(row: Row) -> str:
    return text.three(row["ratio"]) + ("" if row["apart"] else " \\*")


def _warnings(about: dict[str, Any]) -> list[str]:
    lines = ["**CPU: these times say nothing about a GPU.**"]
    lines += [f"**Not measured: {' '.join(why.split())[:300]}**" for why in about["void"]]
    cores = about["machine"]["cpu_cores"]
    found = quiet.disturbances(about["before"], None, cores=cores, ranks=1)
    return lines + quiet.warning(found)


def _losses(rows: list[Row]) -> list[str]:
    """Name every number in which tpsample is not better."""
    losses = [row for row in rows if row["ratio"] >= 1]
    lines = [
        f"- {_ranks(row['ranks'])}, {load_name(row['rate'])}: {SHOWN[row['key']]}, by a factor of "
        f"{_ratio(row)}"
        for row in losses
    ]
    return [f"## Where tpsample is not better: {len(losses)} of {len(rows)}", "\n".join(lines)]


def _notes(rows: list[Row], about: dict[str, Any]) -> list[str]:
    rounds = {row["ranks"]: row["rounds"] for row in rows}
    rounds_of = ", ".join(f"{count} on {_ranks(ranks)}" for ranks, count in rounds.items())
    texts_of = ", ".join(f"{count} on {_ranks(ranks)}" for ranks, count in about["texts"].items())
    notes = [
        "Cells are the median of the rounds (least–most). A star says that the factor may be "
        f"chance: the ranges of both overlap, or there were fewer than {ENOUGH} rounds.",
        f"Rounds of each server and load: {rounds_of or 'none'}; {about['requests']} requests "
        "each, of random prompts, whose answers end by their length.",
        f"Greedy texts that were compared before anything was timed, and were the same from both "
        f"servers: {texts_of or 'none'}.",
        "Timed requests draw at temperature 1 without seeds: vLLM's own sampler ends its server on "
        "a CPU when a request with a seed is in the middle of its prompt.",
        "Both servers run at once, and the one that is not asked waits idle.",
    ]
    facts = {
        "server with the adapter": about["commands"].get(TPSAMPLE),
        "server without": about["commands"].get(VLLM),
        "threads per rank": about["threads"],
        "versions": about["versions"],
        "load before (1, 5, 15 min)": quiet.shown(about["before"]),
        "load after, its own work too": quiet.shown(about["after"]),
        "minutes": about["minutes"],
        **about["machine"],
    }
    cells = [(name, text.cell(value)) for name, value in facts.items() if value is not None]
    lines = "\n".join(f"- {note}" for note in notes)
    return ["## Notes", lines, "## Machine", text.table(("what", "value"), cells, right=2)]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
