"""Every step compiles for a GPU as it is launched, with the arguments it has then."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from tests.support.commands import run_command
from tests.support.jit_launches import cases
from tpsample.core.rules import ENDING, Rule

MASKED = (
    "allowed ids",
    "bad words",
    "min_tokens",
    "grammar",
    "forced ids",
    "all together",
)
LEAST, TOP = "least_word", "top"
FIRST_KEPT = ["before", "first_kept", "decode"]
FIRST_WORDS = ["largest", "group_words", "largest"]
LISTED, DIGITS = ["words", "cut"], ["digit"] * 4 + ["last_digit"]
SEARCHES = ["bin", *LISTED, *DIGITS, "bin", *LISTED, *DIGITS]
TOP_WORDS = [*FIRST_WORDS, "top_words", "decode"]
BEST_KEPT = ["last_cut", "best_kept", "decode"]
LOGPROBS = ["few_words", "listed_words", "mass", "told_logprobs"]


def _asked_by(rule: Rule) -> list[str]:
    """The kernels of the facts that a rule asks for."""
    kernels = {"total_mass": "mass", "total_moment": "mass", "spread": "spread"}
    asked: list[str] = []

    class Facts:
        temperature = torch.ones(1)

        def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
            asked.append(kernels.get(name, name))
            return lambda *_: torch.ones(2, 1, dtype=torch.int64)

    assert rule.end is not None
    rule.end(Facts(), torch.ones(1, dtype=torch.float64))  # type: ignore[arg-type]
    return asked


EVERY_END = [kernel for rule in ENDING for kernel in _asked_by(rule)]
# Its logprobs are of logits before the controls. The LM head tells no words of them.
FILTERED = [*FIRST_WORDS, TOP, *EVERY_END, "mass", *TOP_WORDS[3:]]
ALL_TOGETHER = [*FILTERED, "group_first", *LOGPROBS]
STORED = {
    "top_k": TOP_WORDS,
    "top_p": ["best_scores", *FIRST_KEPT],
    **{rule.name: [TOP, *_asked_by(rule), *BEST_KEPT] for rule in ENDING},
    "filters, samples": ["best_scores", *FIRST_KEPT],
    "top_p in top_k": [TOP, *SEARCHES, *BEST_KEPT],
    "top_k, top_p": TOP_WORDS,
    "many top_k, top_p": TOP_WORDS,
    "top_k beside top_p": [*FIRST_WORDS, TOP, "mass", *TOP_WORDS[3:]],
    "logprobs": LOGPROBS,
    "all together": ALL_TOGETHER,
}
"""Launches over the stored logits, without their `_kernel`."""
SCREEN = ["screening_rows", "screen", "list_groups"]
PREFETCHES = "L2+launch_dependents"
MERGED, MERGE_BEST = "merged", "merge_best"
"""The largest words, and the best scores, of all 8 ranks; one rank has nothing to merge."""
SEARCH_OF_8 = ["digit", "exchange"] * 4
REJECTION = ["best_scores", "exchange", MERGE_BEST, "before", "exchange", "first_kept"]
KEPT = ["best_kept", "exchange", "decode"]
FIXED = {
    # Launches and exchanges of one of 8 ranks; one rank launches the same, but for what is merged.
    "top_p": [*REJECTION, *SEARCH_OF_8, *KEPT],
    "top_k 5": [*FIRST_WORDS, "exchange", MERGED, "top_words", "decode"],
    "min_p": ["exchange", TOP, LEAST, "last_cut", *KEPT],
    "top_k 2000, top_p": ["exchange", TOP, *SEARCH_OF_8, "last_digit", *SEARCH_OF_8, *KEPT],
}
FIXED["top_k 300"] = [*REJECTION, *SEARCH_OF_8, "last_digit", *KEPT]
FIXED["top_k 5, top_p"] = FIXED["top_k 300, top_p"] = FIXED["top_k 5"]
BOTH_FIRST = [*FIRST_WORDS, "best_scores", "exchange", "exchange", MERGED, "top_words"]
FIXED["mixture"] = [*BOTH_FIRST, MERGE_BEST, TOP, LEAST, *REJECTION[3:], *SEARCH_OF_8, *KEPT]
TOLD_OF_8 = ["own_words", "exchange", MERGED, "listed_words", "mass", "exchange", "told_logprobs"]
FOUND = [*BOTH_FIRST, *REJECTION[2:], *SEARCH_OF_8, *KEPT]
FIXED["logprobs of a mixture"] = [*FOUND, *TOLD_OF_8]  # the first words serve both
BY_RATIO = ["law_tops", "law_rows", "law_sums", "accept", "residual", "emit"]
VERIFICATIONS = ("coupled", "rejection", "block")
STORED |= {"coupled": ["coupled"], "coupled, all together": [*ALL_TOGETHER, "coupled"]}
STORED |= dict.fromkeys(("rejection, certain", "rejection", "block"), BY_RATIO)
STORED["block, 8 ranks"] = [
    "law_tops", "exchange", "law_rows", "law_sums", "exchange", "accept", "residual", "exchange",
    "emit",
]  # fmt: skip
OF_8 = ("exchange", MERGED, MERGE_BEST)
for fixed, one_of_8 in FIXED.items():
    STORED[f"fixed rounds, {fixed}"] = [e for e in one_of_8 if e not in OF_8]
    STORED[f"peer, fixed rounds, {fixed}"] = [e.replace(MERGED, "largest") for e in one_of_8]
NOTHING_AHEAD = (
    "weight at an odd address",
    "given logits",
    "given logits, all together",
    "peer, given logits",
)
"""Cases without weights that can travel while noise is made."""


@pytest.mark.heavy
def test_every_step_compiles_as_it_is_launched():
    """In one process that does not interpret: most steps share kernels with others."""
    done = run_command(sys.executable, "-m", "tests.support.jit_launches")
    assert done.returncode == 0, done.stderr[-4000:]
    launched: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, kernel = line.rsplit(": ", 1)
        launched.setdefault(name, []).append(kernel.removesuffix("_kernel"))
    names = list(cases([]))
    assert {name: launched[name] for name in names} == {name: expected(name) for name in names}
    overlaps = {name: launched[f"overlap, {name}"] for name in names}
    assert overlaps == {name: overlap(name) for name in names}


def expected(name: str) -> list[str]:
    """The kernels of a step, and the exchanges between them."""
    ways = STORED.get(name.removeprefix("given logits, "), [])
    finish = "peer_finish" if name.startswith("peer") or "8 ranks" in name else "decode"
    screen = SCREEN if "screened" in name else []
    masks = ["token_mask"] * name.endswith(MASKED)
    drafted = ["drafted_rows"] * name.startswith(VERIFICATIONS)
    if name == "slots":
        return ["read_slots", "lm_head", finish]
    # Words of filters are decoded with all others, but for a kernel that waits for peers.
    finish = [] if "decode" in ways and finish == "decode" else [finish]
    return [*drafted, *masks, *screen, "lm_head", *finish, *ways]


def overlap(name: str) -> list[str]:
    """How the kernels of its words overlap."""
    if "screened" in name:
        screen = ["launch_dependents", f"{PREFETCHES}+wait+early"]
        return [*screen, "launch_dependents+wait+early", f"{PREFETCHES}+wait+early", "wait+early"]
    lm_head = "launch_dependents" if name in NOTHING_AHEAD else PREFETCHES
    anew = [""] * (name.startswith("peer") and "decode" in STORED.get(name, ()))
    return [lm_head, "wait+early", *anew]
