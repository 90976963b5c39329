"""The rows of the page of `vllm bench serve`: times of both servers, and ratios by chance."""

from __future__ import annotations

from benchmarks.lab import text
from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.lab.timing import Timing

TPSAMPLE, VLLM = "tpsample", "vLLM"
"""The servers: tokens come from the adapter, or are vLLM's own."""
THROUGHPUT = "output_throughput"
SHOWN = {
    THROUGHPUT: "of the server per token",
    "median_tpot_ms": "per output token, median of requests",
    "p99_tpot_ms": "per output token, p99",
    "median_itl_ms": "between two tokens, median",
    "p99_itl_ms": "between two tokens, p99",
    "median_ttft_ms": "to the first token, median",
    "p99_ttft_ms": "to the first token, p99",
}
"""Numbers of vLLM's result, as the page calls them: times, the first from tokens per second."""
ENOUGH = 3
"""Rounds from which on ranges that do not overlap are taken for more than chance."""

VIEWS = [
    View("", "Tokens per second", x="world_size", y="tokens_per_s"),
    View("", "Times", x="world_size"),
]


def rows(rounds: list[Row], requests: int) -> list[Row]:
    """Return a row per number of ranks, load, number and server, with the ratio of the times."""
    found = []
    for ranks, rate in dict.fromkeys((each["ranks"], each["rate"]) for each in rounds):
        own = [each for each in rounds if (each["ranks"], each["rate"]) == (ranks, rate)]
        for key, name in SHOWN.items():
            times = {
                server: [
                    1e6 / value if key == THROUGHPUT else 1e3 * value
                    for value in (each[key] for each in own if each["server"] == server)
                ]
                for server in (TPSAMPLE, VLLM)
            }
            point = {"shape": f"{load_name(rate)}, {name}", "batch": requests, "world_size": ranks}
            kinds = {TPSAMPLE: "tpsample", VLLM: "baseline"}
            pair = [row(n, kinds[n], Timing(tuple(us), False), **point) for n, us in times.items()]
            ours, theirs = times.values()
            apart = max(ours) < min(theirs) or max(theirs) < min(ours)
            pair[0]["may_be_chance"] = not apart or len(ours) < ENOUGH
            if key == THROUGHPUT:
                for each in pair:
                    each["tokens_per_s"] = 1e6 / each["median_us"]
            found += with_ratios(pair)
    return found


def load_name(rate: float) -> str:
    """Return how requests arrive."""
    if rate == float("inf"):
        return "all requests at once"
    return f"{text.three(rate)} request{'s' * (rate != 1)} per second"


def notes(rounds: list[Row], texts: dict[int, int], requests: int) -> list[str]:
    """Return the notes of the page.

    Args:
        texts: by number of ranks, how many greedy texts were compared.
    """
    loads = len({each["rate"] for each in rounds})
    counts = {n: sum(each["ranks"] == n for each in rounds) // max(1, 2 * loads) for n in texts}
    rounds_of = ", ".join(f"{count} on {ranks} ranks" for ranks, count in counts.items())
    texts_of = ", ".join(f"{count} on {ranks} ranks" for ranks, count in texts.items())
    return [
        "Times are medians of the rounds (first–third quartile). A ratio may be chance where the "
        f"ranges of both servers overlap, or there were fewer than {ENOUGH} rounds.",
        f"Rounds of each server and load: {rounds_of or 'none'}; {requests} requests each, "
        "of random prompts, whose answers end by their length.",
        "Greedy texts that were compared before anything was timed, and were the same from both "
        f"servers: {texts_of or 'none'}.",
        "Timed requests draw at temperature 1 without seeds: vLLM's own sampler ends its server on "
        "a CPU when a request with a seed is in the middle of its prompt.",
        "Both servers run at once, and the one that is not asked waits idle.",
    ]
