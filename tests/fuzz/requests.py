"""Random requests and rows, and the modes of torch that may surround a call."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.fields import OTHER_FILTERS, VALUES
from tests.support.rows import Row

SEEDS = (0, 1, -1, 2**63, 2**64 - 1, -(2**63))
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@dataclass(frozen=True)
class Theme:
    """The values that the rows of a story share, so that they meet where they seldom would.

    Attributes:
        kinds: of the requests, see `_request`.
        controlled, told: how many have penalties or constraints, and logprobs.
        changes: how many between two steps, one of these.
        verified, drafts: how many steps are verification, and K, one of these.
        samples: `num_samples` of the other steps, one of these.
        most_ids, most_rows: of the head and of the batch.
        written: temperatures that are written in place.
    """

    kinds: tuple[str, ...]
    controlled: float = 0.3
    told: float = 0.3
    changes: tuple[int, ...] = (0, 0, 1, 1, 2, 3)
    verified: float = 0.25
    drafts: tuple[int, ...] = (0, 1, 2, 3)
    samples: tuple[int | None, ...] = (None, None, None, None, 1, 3)
    most_ids: int = 1200
    most_rows: int = 2**20
    written: tuple[float, ...] = (0.0, 0.7, 1.0, 20.0)


ALL_KINDS = ("plain", "greedy", "wide", "wide", "filtered", "filtered")
THEMES = {
    "mixed": Theme(ALL_KINDS),
    "few": Theme(ALL_KINDS, most_rows=3),
    "top words": Theme(("top_k", "top_k top_p"), controlled=0.1, most_rows=3),
    "thresholds": Theme(("threshold", "threshold", "plain"), controlled=0.1, most_rows=4),
    "rules": Theme(("rule", "rule", "plain"), controlled=0.1, most_rows=4),
    "masks": Theme(ALL_KINDS, controlled=0.0, changes=(0, 0, 1), verified=0.6, drafts=(2,)),
    "texts": Theme(ALL_KINDS, controlled=0.9, told=0.7, verified=0.5, most_ids=12),
    "controls": Theme(ALL_KINDS, controlled=0.9, told=0.7, changes=(1, 2)),
}


def request(pick: random.Random, size: int, theme: Theme = THEMES["mixed"]) -> dict[str, Any]:
    """A request in which some allowed id is left."""
    while True:
        fields = _request(pick, size, theme)
        banned = {word[0] for word in fields.get("bad_words", ()) if len(word) == 1}
        banned |= set(fields.get("stop_token_ids", ()))
        if not banned.issuperset(fields.get("allowed_token_ids", [-1])):
            return fields


def _request(pick: random.Random, size: int, theme: Theme) -> dict[str, Any]:
    seed = pick.choice([*SEEDS, None, None]) if pick.random() < 0.2 else pick.getrandbits(64)
    found: dict[str, Any] = {"seed": seed}
    kind = pick.choice(theme.kinds)
    if kind == "greedy":
        found["temperature"] = pick.choice([0.0, 1e-6, 9e-6])
    elif kind == "wide":  # the best by noise are rarely in the kept set
        found |= {"temperature": pick.choice([1.5, 3.0, 50.0])} | pick.choice(
            [
                {"top_k": 20},
                {"top_k": pick.choice([1, 2, 300])},
                {"top_p": pick.choice([1e-9, 0.01, 0.3])},
                {"top_k": pick.choice([50, 300]), "top_p": pick.choice([0.01, 0.9])},
                {"min_p": 1.0},
            ]
        )
    elif kind == "top_k":
        found |= {"temperature": pick.choice([5.0, 50.0]), "top_k": pick.choice([2, 20])}
    elif kind == "top_k top_p":
        found |= {"top_k": pick.choice([20, 50]), "top_p": 0.9}
    elif kind == "threshold":
        wide = pick.choice([{"top_k": 300, "top_p": 0.01}, {"min_p": 1.0}, {"top_p": 0.01}])
        found |= {"temperature": pick.choice([3.0, 50.0])} | wide
    elif kind == "filtered":
        found["temperature"] = pick.choice([1e-5, 0.01, 0.5, 1.0, 1.0, 2.0])
        found["top_k"] = pick.choice([0, -1, 1, 2, 20, 256, 257, size - 1, size, size + 1])
        found["top_p"] = pick.choice([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999])
        found["min_p"] = pick.choice([0.0, 0.0, 0.01, 0.5, 1.0])
        found |= {name: pick.choice(VALUES[name]) for name in OTHER_FILTERS if pick.random() < 0.3}
    elif kind == "rule":  # which top_k and top_p would mostly hide
        found["temperature"] = pick.choice([0.6, 1.0, 3.0, 50.0])
        found |= {name: pick.choice(VALUES[name]) for name in OTHER_FILTERS if pick.random() < 0.5}
    if kind in ("wide", "filtered"):
        found["ties"] = pick.choice(["exact", "keep"])
        found["filter_order"] = pick.choice(["sequential", "joint", "min_p_last"])
    if pick.random() < theme.controlled:
        found |= _controls(pick, size)
    if pick.random() < theme.told:
        found["logprobs"] = pick.choice([0, 1, 3, 20, -1 if size < 300 else 5])
        found["logprobs_mode"] = pick.choice(MODES)
        if pick.random() < 0.5:
            found["logprob_token_ids"] = [pick.randrange(size) for _ in range(pick.randint(1, 3))]
    return found


def _controls(pick: random.Random, size: int) -> dict[str, Any]:
    def ids(most: int) -> list[int]:
        return [pick.randrange(size) for _ in range(pick.randint(1, most))]

    few = min(size, 4)
    found = {
        "repetition_penalty": pick.choice([0.5, 1.1, 1.3, 10.0]),
        "presence_penalty": pick.choice([-2.0, 0.3, 1.5]),
        "frequency_penalty": pick.choice([-0.3, 0.1, 2.0]),
        "logit_bias": {v: pick.uniform(-150, 150) for v in ids(5)},
        "bad_words": [
            [pick.randrange(few) for _ in range(pick.choice([1, 2, 2, 3, 4]))]
            for _ in range(pick.randint(1, 6))
        ],
        "allowed_token_ids": sorted(set(ids(40))),
        "repetition_scope": pick.choice(["all", "output"]),
        "min_tokens": pick.choice([1, 5, 20]),
    }
    found = {name: found[name] for name in pick.sample(sorted(found), pick.randint(1, 4))}
    if "min_tokens" in found:
        found["stop_token_ids"] = [*ids(3), pick.randrange(few)]
    return found


def _tokens_so_far(pick: random.Random, size: int, *, prompt: bool) -> list[int]:
    """Pick a few ids, also for bad words; in a prompt sometimes ids that are no tokens."""
    found = [pick.randrange(min(size, 4)) for _ in range(pick.randint(0, 6))]
    if prompt and pick.random() < 0.1:
        found += [-1, size, 2**31 + 7]
    return found


def random_row(pick: random.Random, size: int, theme: Theme) -> Row:
    """Draw a request, and a few tokens that the row has so far."""
    fields = request(pick, size, theme)
    prompt, output = (_tokens_so_far(pick, size, prompt=each) for each in (True, False))
    return Row.of(fields, prompt, output)


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "bfloat16": lambda: _default(torch.bfloat16),
    "float64": lambda: _default(torch.float64),
    "meta": lambda: torch.device("meta"),
}
"""Modes of torch that a caller may have around a call."""


@contextlib.contextmanager
def surroundings(pick: random.Random) -> Iterator[str]:
    """Set one mode around a call; yields the name of it."""
    name = pick.choice(["grad", "grad", *SURROUNDINGS])
    with SURROUNDINGS[name]():
        yield name
