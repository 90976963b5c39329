"""`tpsample generate --trace` writes the trace of a generation, and a plot beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tpsample.cli.model import Model
from tpsample.core.machine import how_to_install
from tpsample.record.trace import TopKTrace

MAX_LABELS = 100
"""Tokens of a row that are written under its plot."""


def write(
    trace: TopKTrace, path: Path, model: Model, prompts: Sequence[str], rows: list[list[int]]
) -> str:
    """Write the file, and the plot if matplotlib is there. Return a line that says so."""
    lengths = [len(row) for row in rows]
    metadata = {"model": model.name, "prompts": json.dumps(list(prompts)), "mode": "raw_logprobs"}
    trace.save(path, lengths=lengths, metadata=metadata)
    image = path.with_suffix(".png")
    texts = [[model.tokenizer.decode([token_id]) for token_id in row] for row in rows]
    if plot(trace.tensors(lengths), texts, prompts, image):
        return f"{path}, {image.name}"
    return f"{path} (no plot without matplotlib: {how_to_install('bench')})"


def plot(
    tensors: dict[str, Tensor], texts: list[list[str]], titles: Sequence[str], path: Path
) -> bool:
    """Plot entropy and confidence, a panel per row. Return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False

    longest = max(1, *map(len, texts))
    size = (max(6.0, min(0.22 * longest, 30.0)), 2.6 * len(texts))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(texts), 1, squeeze=False)
    for row, (axis, words) in enumerate(zip(axes[:, 0], texts, strict=True)):
        own = {name: each[row, : len(words)] for name, each in tensors.items() if each.ndim > 1}
        top, drawn = (own[name].exp().numpy() for name in ("top_logprobs", "logprobs"))
        steps, entropies = range(len(words)), own["entropies"].numpy()
        axis.plot(steps, entropies, color="tab:blue", label="entropy of the raw logits, nats")
        axis.bar(steps, top[:, 0], color="tab:orange", alpha=0.3, label="top probability")
        axis.plot(steps, drawn, ".", color="tab:red", label="probability of the token drawn")
        axis.set(xlim=(-0.5, longest - 0.5), ylim=(0, None))
        axis.set_title(titles[row], fontsize="small", loc="left")
        if len(words) <= MAX_LABELS:
            # A dollar sign would start a formula.
            labels = [word.strip().replace("$", r"\$") or "·" for word in words]
            axis.set_xticks(steps, labels, rotation=90, fontsize="x-small")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", fontsize="small")
    figure.savefig(path, dpi=120)
    return True
