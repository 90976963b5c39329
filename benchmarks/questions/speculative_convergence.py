"""Distance of the emitted law to the target against the number of samples, beside direct sampling.

python -m benchmarks.questions.speculative_convergence FOLDER

A correct verification comes as close as direct draws from the target do, for any drafter; a biased
one stops getting closer. One biased on purpose is drawn to show it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import drawing, machine, text
from tpsample import SamplingBatch, reference
from tpsample.noise import tile_noise
from tpsample.speculative import laws
from tpsample.speculative import reference as speculative
from tpsample.speculative.checks import Method
from tpsample.speculative.streams import DOMAIN_DRAFT, stream

VOCAB_SIZE = 256
SEEDS = 2**16
CHUNK = 2**10
NUM_DRAFTS = 2
DRAFTS = ("uniform", "anti-ranked", "near the target")
METHODS: tuple[Method, ...] = ("coupled", "rejection", "block")
LOG2_E = 1.4426950408889634


def target_logits() -> Tensor:
    """A Zipf law over shuffled ids, fp32 [V]."""
    rank = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    return -1.1 * (1 + rank).double().log().float()


def draft_logits(kind: str, target: Tensor) -> Tensor:
    """The drafter's logits, fp32 [V]."""
    if kind == "uniform":
        return torch.zeros_like(target)
    if kind == "anti-ranked":
        return -target
    noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    return target + 0.5 * noise


def verified_tokens(kind: str, method: Method, seeds: Tensor) -> Tensor:
    """The first two tokens of each seed, int64 [2 B]: one verification of two drafts, and a plain
    draw where it emits a single token."""
    target, rows = target_logits(), len(seeds)
    draft = draft_logits(kind, target)
    drafts = []
    for index in range(NUM_DRAFTS):
        streams = stream(seeds.unsqueeze(1), torch.tensor([[index]]), index, DOMAIN_DRAFT)
        noise = tile_noise(streams, 0, VOCAB_SIZE, 10)
        drafts.append((draft.double() * LOG2_E - noise.double()).argmax(dim=1))
    batch = SamplingBatch(torch.ones(rows), seeds, vocab_size=VOCAB_SIZE)
    out = speculative.verify(
        target.expand(rows, NUM_DRAFTS + 1, -1),
        torch.stack(drafts, dim=1),
        batch,
        0,
        method=method,
        draft=None if method == "coupled" else draft.expand(rows, NUM_DRAFTS, -1),
    )
    tokens = out.token_ids[:, :2]
    return torch.where(tokens >= 0, tokens, direct_tokens(seeds)[:, 1:]).flatten()


def direct_tokens(seeds: Tensor) -> Tensor:
    """Two plain draws per seed, at positions that no verification looks at, int64 [B, 2]."""
    batch = SamplingBatch(torch.ones(len(seeds)), seeds, vocab_size=VOCAB_SIZE)
    logits = target_logits().expand(len(seeds), -1)
    draws = [reference.sample(logits, batch, position).token_ids for position in (70, 71)]
    return torch.stack(draws, dim=1)


def distances(tokens: Tensor) -> list[tuple[int, float]]:
    """(samples, total variation to the target) at powers of 2."""
    law = target_logits().double().softmax(dim=0)
    found = []
    count = 2**8
    while count <= len(tokens):
        frequency = torch.bincount(tokens[:count], minlength=VOCAB_SIZE).double() / count
        found.append((count, float((frequency - law).abs().sum() / 2)))
        count *= 2
    return found


def curves(count: int) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Every curve of the picture, by name."""
    chunks = torch.arange(count).split(CHUNK)
    yield "direct", distances(torch.cat([direct_tokens(seeds).flatten() for seeds in chunks]))
    for method in METHODS:
        for kind in DRAFTS:
            tokens = torch.cat([verified_tokens(kind, method, seeds) for seeds in chunks])
            yield f"{method}, {kind}", distances(tokens)
    true_residual = laws.residual
    try:
        laws.residual = lambda coefficient, p, q: coefficient * p
        tokens = torch.cat([verified_tokens("uniform", "rejection", seeds) for seeds in chunks])
    finally:
        laws.residual = true_residual
    yield "planted: recovery from p", distances(tokens)


def plot(found: dict[str, list[tuple[int, float]]], record: dict[str, Any], path: Path) -> None:
    """Draw distance against samples, both logarithmic, a panel per method."""
    if not drawing.available():
        return
    figure, axes = drawing.panels(len(METHODS), (2.3, 2.7))
    lowest, highest = (f(y for points in found.values() for _, y in points) for f in (min, max))
    for axis, method in zip(axes, METHODS, strict=True):
        for name, points in found.items():
            planted = name.startswith("planted")
            if name != "direct" and not name.startswith(method) and not planted:
                continue
            style: dict[str, Any] = {"marker": "o", "markersize": 3}
            if name == "direct":
                style = {"color": "black", "linewidth": 2.5}
            elif planted:
                style = {"color": "red", "linestyle": "--"}
            # A longer label would be cut off at the edge of the picture.
            label = "planted bias" if planted else name.removeprefix(f"{method}, ")
            axis.plot(*zip(*points, strict=True), label=label, alpha=0.8, **style)
        axis.set(title=method, xlabel="samples", xscale="log", yscale="log")
        axis.set_ylim(lowest / 1.2, highest * 1.2)
        if axis is not axes[0]:
            axis.tick_params(labelleft=False)
    axes[0].set_ylabel("total variation to the target")
    at_end = {name: points[-1][1] for name, points in found.items()}
    planted_tv, direct_tv = at_end.pop("planted: recovery from p"), at_end.pop("direct")
    low, high = min(at_end.values()), max(at_end.values())
    message = (
        f"After {found['direct'][-1][0]:,} samples every method is {text.three(low)} to "
        f"{text.three(high)} from the target, direct draws are {text.three(direct_tv)}, and a bias "
        f"planted on purpose stays at {text.three(planted_tv)} (V = {VOCAB_SIZE}, Zipf 1.1)"
    )
    footer = drawing.footer(record)
    drawing.save(figure, path, message, footer, legend="drafts")


def main(folder: Path, count: int = SEEDS) -> None:
    """Write the numbers, the picture and a page."""
    folder.mkdir(parents=True, exist_ok=True)
    found = dict(curves(count))
    record = machine.describe(torch.device("cpu"), 1)
    (folder / "result.json").write_text(
        json.dumps({"curves": found, "machine": record}, indent=1) + "\n"
    )
    plot(found, record, folder / "convergence.png")
    at_end = "\n".join(f"| {name} | {points[-1][1]:.5f} |" for name, points in found.items())
    (folder / "README.md").write_text(
        "# speculative_convergence\n\n"
        "How close is the emitted law to the target after n samples, beside direct draws?\n\n"
        "![Total variation against samples](convergence.png)\n\n"
        f"After {2 * count} samples, the first two tokens of {count} seeds, two drafts per "
        f"verification, V = {VOCAB_SIZE}, by the definition over full logits "
        "(`tpsample.speculative.reference`), from which the shards differ in no bit; a position "
        "that a verification does not reach is drawn plainly:\n\n"
        f"| draws | total variation |\n| --- | ---: |\n{at_end}\n\n"
        "```bash\n"
        f"{record['command']}\n"
        "```\n\n"
        f"Commit {record['commit']}, {record['date']}. Counts hold on any machine.\n"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
