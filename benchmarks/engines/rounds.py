"""The rows of the page of `vllm bench serve`: times of both servers, and ratios by chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy import stats

from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.lab.timing import Timing

TPSAMPLE, VLLM = "tpsample", "vLLM"
"""The servers: tokens come from the adapter, or are vLLM's own."""
THROUGHPUT, PARTS = "output_throughput", "parts_ms"
OF_VLLM = {
    THROUGHPUT: "of the server per token",
    "median_tpot_ms": "per output token, median of requests",
    "p99_tpot_ms": "per output token, p99",
    "median_itl_ms": "between two tokens, median",
    "p99_itl_ms": "between two tokens, p99",
    "median_ttft_ms": "to the first token, median",
    "p99_ttft_ms": "to the first token, p99",
}
"""Numbers of vLLM's result, as the page calls them: times, the first from tokens per second."""
SHOWN = {PARTS: "LM head and sampler of a step", **OF_VLLM}
"""Numbers of a round."""

VIEWS = [
    View("", "Tokens per second", x="world_size", y="tokens_per_s"),
    View("", "Times", x="world_size"),
]


def rows(rounds: list[Row]) -> list[Row]:
    """Return a row per number of ranks and requests, number and server, with the ratio of times."""
    found = []
    for ranks, requests in points(rounds):
        for key, name in SHOWN.items():
            ours, theirs = times = [
                times_of(rounds, ranks, requests, server, key) for server in (TPSAMPLE, VLLM)
            ]
            shape = f"{requests} requests at once, {name}"
            point = {"shape": shape, "batch": requests, "world_size": ranks}
            kinds = zip((TPSAMPLE, VLLM), ("tpsample", "baseline"), times, strict=True)
            pair = [row(name, kind, Timing(tuple(us), False), **point) for name, kind, us in kinds]
            low, _, high = interval(ours, theirs)
            pair[0]["may_be_chance"] = low <= 1 <= high
            if key == THROUGHPUT:
                for each in pair:
                    each["tokens_per_s"] = 1e6 / each["median_us"]
            found += with_ratios(pair)
    return found


def points(rounds: list[Row]) -> list[tuple[int, int]]:
    """Return the numbers of ranks and of requests that were measured."""
    return list(dict.fromkeys((each["ranks"], each["requests"]) for each in rounds))


def times_of(rounds: list[Row], ranks: int, requests: int, server: str, key: str) -> list[float]:
    """Return one number of a server's rounds, in µs."""
    own = (each for each in rounds if (each["ranks"], each["requests"]) == (ranks, requests))
    values = [each[key] for each in own if each["server"] == server]
    return [1e6 / value if key == THROUGHPUT else 1e3 * value for value in values]


def interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean ratio of the pairs of rounds, between the ends of its interval of 95 %.

    Logarithms of the ratios are taken for independent and normal.
    """
    logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
    mean, count = statistics.fmean(logs), len(logs)
    if count < 2:
        return 0.0, math.exp(mean), math.inf
    half = stats.t.ppf(0.975, count - 1) * statistics.stdev(logs) / math.sqrt(count)
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def notes(rounds: list[Row], texts: dict[int, int]) -> list[str]:
    """Return the notes of the page.

    Args:
        texts: by number of ranks, how many greedy texts were compared.
    """
    told = [
        "Times are medians of the rounds (first–third quartile). Rounds come in pairs, one of each "
        "server. A ratio may be chance where the interval of 95 % of its pairs includes 1.",
    ]
    for key in (PARTS, THROUGHPUT):
        for ranks, requests in points(rounds):
            pair = [times_of(rounds, ranks, requests, each, key) for each in (TPSAMPLE, VLLM)]
            low, mean, high = interval(*pair)
            told.append(
                f"tpsample ÷ vLLM, {SHOWN[key]}, {requests} requests at once, {ranks} "
                f"rank{'s' * (ranks > 1)}: {mean:.3f} ({low:.3f}–{high:.3f}) of {len(pair[0])} "
                "pairs."
            )
    compared = ", ".join(f"{count} on {ranks} ranks" for ranks, count in texts.items())
    return [
        *told,
        "Requests have random prompts, and answers that end by their length. LM head and sampler "
        "are timed inside the workers, in steps of all requests, on the slower rank.",
        "Greedy texts that were compared before anything was timed, and were the same from both "
        f"servers: {compared or 'none'}.",
        "Timed requests draw at temperature 1 without seeds: vLLM's own sampler ends its server on "
        "a CPU when a request with a seed is in the middle of its prompt.",
        "Both servers run at once, and the one that is not asked waits idle.",
    ]
