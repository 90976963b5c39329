"""Every step compiles for a GPU as it is launched, with the arguments it has then."""

from __future__ import annotations

import sys

import pytest

from tests.support.commands import run_command
from tests.support.jit_launches import cases


@pytest.fixture(scope="session")
def launched() -> dict[str, list[str]]:
    """Kernels by case, of a process that does not interpret."""
    done = run_command(sys.executable, "-m", "tests.support.jit_launches")
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, kernel = line.rsplit(": ", 1)
        kernels.setdefault(name, []).append(kernel)
    return kernels


MASKED = (
    "allowed ids",
    "bad words",
    "min_tokens",
    "grammar",
    "forced ids",
    "all together",
    "drafts",
)
LEADING, FIRST_KEPT = ["group_best", "best_scores"], ["before", "first_kept", "write_tokens"]
FIRST_WORDS = ["group_first", "group_words"]
TOP_WORDS = [*FIRST_WORDS, "top_words", "write_tokens"]
LOGPROBS = [*FIRST_WORDS, "mass", "count"]
SEARCH = ["digit", "next_digit"] * 9
STORED = {
    "top_k": [*LEADING, *FIRST_KEPT],
    "top_p": [*LEADING, *FIRST_KEPT],
    "filters, samples": [*LEADING, *FIRST_KEPT],
    "top_p in top_k": [*LEADING, *SEARCH, *FIRST_KEPT],
    "top_k, top_p": TOP_WORDS,
    "logprobs": LOGPROBS,
    "fixed rounds": ["group_first", "min_p_cut", "mass", *SEARCH, "best_kept", "write_tokens"],
    "all together": [*TOP_WORDS, *LOGPROBS],
    "drafts": [*TOP_WORDS, *LOGPROBS],
}
"""Launches over the stored logits, without their `_kernel`."""
NOTHING_AHEAD = (
    "weight at an odd address",
    "given logits",
    "given logits, all together",
    "peer, given logits",
)
"""Cases without weights that can travel while noise is made."""
MOST_OPERATORS = {"top_k": 6, "top_p": 6, "filters, samples": 6, "top_k, top_p": 8}
"""Torch operators beside them, of a batch whose rows all go the same way."""


@pytest.mark.parametrize("name", cases())
def test_a_step_compiles_as_it_is_launched(launched, name):
    ways = STORED.get(name.removeprefix("given logits, "), [])
    finish = "peer_finish" if name.startswith("peer") else "decode"
    expected = ["token_mask"] * name.endswith(MASKED) + ["lm_head", finish, *ways]
    *kernels, operators = launched[name]
    assert [kernel.removesuffix("_kernel") for kernel in kernels] == expected
    assert launched[f"overlap, {name}"] == [
        "launch_dependents" if name in NOTHING_AHEAD else "L2+launch_dependents",
        "wait+early",
    ]
    most = MOST_OPERATORS.get(name)
    if most is not None:
        assert 0 < int(operators.split()[0]) <= most
