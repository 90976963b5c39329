"""How many kernels, operators and exchanges has each kind of call on a GPU? Counted without one.

    python -m benchmarks.static.kinds [--page FOLDER]

Kernels run in Triton's interpreter, on one rank, under the plan of a GPU. The second call of each
kind is counted. An operator is one of torch's, without views and allocations of memory that nobody
fills. Bytes are a rank's own, for its peers, without the 8 per row of a plain step. The counts are
those of `EXPECTED`, or the command fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from benchmarks.lab.calls import Calls, counted
from benchmarks.lab.requests import REQUESTS
from benchmarks.lab.text import table
from benchmarks.static.counts_page import write_page
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, sample_draft, verify
from tpsample.core import tensors
from tpsample.speculative import drawn_drafts

V, D, ROWS, K = 4096, 16, 2, 2

FREE = ("unsqueeze", "expand", "empty", "empty_like", "new_empty", "split_with_sizes", "unbind")
"""Operators that launch nothing on a GPU, beside views."""
COUNTED: dict[str, dict[str, Any]] = {
    **REQUESTS,
    "top_k 300": {"top_k": 300},
    "top_k 300, top_p 0.9": {"top_k": 300, "top_p": 0.9},
    "top_k 1500, top_p 0.9": {"top_k": 1500, "top_p": 0.9},
}
"""The fields of all rows of a step, which is counted where `EXPECTED` has its name."""


class Counts(NamedTuple):
    """The numbers of one kind of call."""

    kernels: int
    operators: int
    exchanges: int
    sent: int

    @staticmethod
    def of(calls: Calls) -> Counts:
        operators = sum(name.split(".")[1] not in FREE for name in calls.operators)
        return Counts(len(calls.kernels), operators, len(calls.exchanges), calls.sent)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each kind of call by its name, once it was made."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator)
    hidden = torch.randn(ROWS, K + 1, D, generator=generator)
    drafts = torch.randint(0, V, (ROWS, K), generator=generator)
    law = torch.randn(ROWS, K, V, generator=generator).bfloat16()
    sampler, at = LMHeadSampler(weight, backend="triton", group="alone"), torch.arange(ROWS)

    def batch(fields: dict[str, Any], **options: Any) -> SamplingBatch:
        params = [SamplingParams(seed=row, **fields) for row in range(ROWS)]
        its = {"prompt_token_ids": [[1, 2]] * ROWS, "output_token_ids": [[3]] * ROWS, **options}
        return SamplingBatch.from_params(params, vocab_size=V, **its)

    def step(rows: SamplingBatch) -> Callable[[], object]:
        out = sampler(hidden[:, 0], rows, at)
        return partial(sampler, hidden[:, 0], rows, at + 1, out=out)

    for name, fields in COUNTED.items():
        if name in EXPECTED:
            yield name, step(batch(fields))
    yield "kept sets of plain rows", step(batch({}, kept_cap=100))
    yield "top_p 0.9 with kept sets", step(batch({"top_p": 0.9}, kept_cap=100))
    yield "top_k 50 with kept sets", step(batch({"top_k": 50}, kept_cap=100))
    joint = "top_k 50, top_p 0.9, joint"
    for name in ("top_p 0.9", joint, "top_k 300, top_p 0.9", "top_k 1500, top_p 0.9"):
        yield f"{name}, fixed rounds", step(batch(COUNTED[name], fixed_rounds=True))
    for method in ("coupled", "rejection", "block"):
        for fields, suffix in (({}, ""), ({"top_p": 0.9}, " under top_p 0.9")):
            how: dict[str, Any] = {"method": method}
            given = partial(verify, sampler, hidden, drafts, batch(fields), at, **how)
            given()
            yield f"{method}{suffix}", given
            if method != "coupled" and not fields:
                yield f"{method} with draft logits", partial(given, draft_logits=law)
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 5}, {"top_p": 0.9}, {"top_k": 50}]
    known = [0, 1, 2, 3]
    for name, host in (("that the host knows", known), ("unknown to the host", None)):
        yield f"select to append, four slots {name}", selecting(sampler, hidden, kinds, host)
    penalised = [{"repetition_penalty": 1.2, "bad_words": [[1, 2]]}] * 4
    yield "select to append, four penalised slots", selecting(sampler, hidden, penalised, known)
    for method in ("coupled", "rejection"):
        yield (
            f"select to append, {method} drafts of slots",
            verifying(sampler, hidden, drafts, method),
        )
    yield "sample_draft", partial(sample_draft, sampler, law[:, 0], batch({}), at, 1)


def selecting(
    sampler: LMHeadSampler,
    hidden: torch.Tensor,
    fields: list[dict[str, Any]],
    host: list[int] | None,
) -> Callable[[], object]:
    """Return a step over slots of these requests, from its selection to its tokens."""
    batch = SamplingBatch.of_slots(len(fields), vocab_size=V)
    params = [SamplingParams(seed=slot, **its) for slot, its in enumerate(fields)]
    tokens = {"prompt_token_ids": [[1]] * len(fields), "output_token_ids": [[2]] * len(fields)}
    batch.put(range(len(fields)), params, **tokens)
    named, rows = torch.arange(len(fields)), hidden[:, :2].flatten(0, 1)
    held, at = batch.select(named, host=host), torch.arange(len(fields))
    out = sampler(rows, held, at)

    def step() -> None:
        chosen = batch.select(named, host=host, out=held)
        chosen.append(sampler(rows, chosen, at + 1, out=out))

    return step


def verifying(
    sampler: LMHeadSampler, hidden: torch.Tensor, drafts: torch.Tensor, method: Any
) -> Callable[[], object]:
    """Return a verification over slots, from their selection to their tokens."""
    batch, named = SamplingBatch.of_slots(ROWS, vocab_size=V), torch.arange(ROWS)
    batch.put(range(ROWS), [SamplingParams(seed=row) for row in range(ROWS)])
    held = batch.select(named, host=[0, 1])

    def step() -> None:
        chosen = batch.select(named, host=[0, 1], out=held)
        chosen.append(verify(sampler, hidden, drafts, chosen, named, method=method))

    step()
    return step


def found() -> dict[str, Counts]:
    """Return the counts of each kind of call."""
    looks = patch.object(drawn_drafts, "LOOKS", 0), patch.object(tensors, "READ_ON", ())
    with looks[0], looks[1]:  # the host looks at nothing of a GPU
        return {name: Counts.of(counted(call)) for name, call in calls()}


EXPECTED = {
    "plain": Counts(2, 0, 0, 0),
    "greedy": Counts(2, 0, 0, 0),
    "penalties and a bias": Counts(2, 0, 0, 0),
    "top_k 50": Counts(6, 0, 1, 800),
    "top_p 0.9": Counts(5, 1, 2, 544),
    "top_k 50, top_p 0.9": Counts(6, 0, 1, 800),
    "top_k 50, top_p 0.9, joint": Counts(8, 4, 2, 816),
    "min_p 0.05": Counts(6, 2, 2, 32),
    "top_k 300": Counts(5, 1, 2, 544),
    "top_k 300, top_p 0.9": Counts(6, 0, 1, 4800),
    "top_k 1500, top_p 0.9": Counts(10, 10, 6, 28752),
    "logprobs 5": Counts(6, 4, 2, 160),
    "top_p 0.9, processed logprobs 5": Counts(10, 8, 3, 13424),
    "top_k 50, processed logprobs 5": Counts(9, 12, 2, 864),
    "kept sets of plain rows": Counts(6, 7, 2, 64),
    "top_p 0.9 with kept sets": Counts(10, 12, 3, 13424),
    "top_k 50 with kept sets": Counts(8, 8, 1, 800),
    "top_p 0.9, fixed rounds": Counts(10, 7, 7, 16960),
    "top_k 50, top_p 0.9, joint, fixed rounds": Counts(8, 4, 2, 816),
    "top_k 300, top_p 0.9, fixed rounds": Counts(6, 0, 1, 4800),
    "top_k 1500, top_p 0.9, fixed rounds": Counts(13, 12, 10, 24624),
    "coupled": Counts(4, 2, 0, 0),
    "coupled under top_p 0.9": Counts(7, 3, 2, 1632),
    "rejection": Counts(9, 4, 3, 160),
    "rejection with draft logits": Counts(9, 4, 3, 288),
    "rejection under top_p 0.9": Counts(12, 7, 5, 49408),
    "block": Counts(9, 4, 3, 240),
    "block with draft logits": Counts(9, 4, 3, 368),
    "block under top_p 0.9": Counts(12, 7, 5, 49488),
    "select to append, four slots that the host knows": Counts(14, 21, 5, 752),
    "select to append, four slots unknown to the host": Counts(19, 30, 10, 35840),
    "select to append, four penalised slots": Counts(5, 4, 0, 0),
    "select to append, coupled drafts of slots": Counts(5, 6, 0, 0),
    "select to append, rejection drafts of slots": Counts(10, 8, 3, 160),
    "sample_draft": Counts(2, 2, 1, 16),
}
"""Whoever changes a number here changes what a GPU launches, or what ranks send."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write a page there")
    options = parser.parse_args()
    counts = found()
    rows = [(name, *its) for name, its in counts.items()]
    print(lines := table(("call", *Counts._fields), rows, right=1))
    if options.page:
        sections = [
            "# Kinds of calls, counted",
            f"{V} ids, {ROWS} rows, {K} drafts a row, one rank. Nothing ran on a GPU, and no "
            "figure is a time. " + " ".join(str(__doc__).split("\n\n")[2].split()),
            lines,
            "## Machine",
        ]
        write_page(
            options.page, sections, counts={name: its._asdict() for name, its in counts.items()}
        )
    sys.exit(counts != EXPECTED)


if __name__ == "__main__":
    main()
