"""Draws the pictures of the README: what happens in a step, and what travels.

    python -m benchmarks.questions.explained [FOLDER]

Both are SVG, pure functions of the sizes below, so the files in pictures/ are what this prints.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.lab import text
from benchmarks.lab.machine import ROOT

FOLDER = ROOT / "benchmarks" / "pictures"
ROWS, VOCAB_SIZE, WORLD_SIZE = 256, 128256, 8
FILTERED_ROW = 1960
"""Most bytes that a rank hands to its peers for a row with top_p, which a test bounds."""

IDS = ("token ids [0, V/3)", "[V/3, 2V/3)", "[2V/3, V)")
INK, FAINT = "#20344f", "#8793a3"
OURS, THEIRS, NOISE, SOFT = "#1f5fbf", "#d1495b", "#e29a1f", "#eaf1fb"


class Drawing:
    """Shapes that are written down as they come."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="DejaVu Sans, Verdana, sans-serif">',
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
            '<marker id="head" markerWidth="9" markerHeight="8" refX="7" refY="4" orient="auto">'
            f'<path d="M0 0.5 L8 4 L0 7.5 z" fill="{INK}"/></marker>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = INK
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def say(
        self,
        x: float,
        y: float,
        lines: str | Sequence[str],
        *,
        size: int = 13,
        fill: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        for number, line in enumerate([lines] if isinstance(lines, str) else lines):
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * size * 1.3:g}" font-size="{size}" '
                f'fill="{fill}" text-anchor="{anchor}"{weight}>{escape(line)}</text>'
            )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, stroke: str = INK) -> None:
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{stroke}" '
            'stroke-width="1.4" marker-end="url(#head)"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def step() -> str:
    """Return the picture of a step on three ranks."""
    drawing, lanes, top, high = Drawing(980, 460), 3, 96, 92
    for x, heading in (
        (80, ["hidden states", "[B, D], equal on all ranks"]),
        (265, ["its rows of the LM head", "[V / W, D], by tiles"]),
        (470, ["logits tile + noise", "stays on chip"]),
        (650, ["best candidate", "8 bytes per row"]),
        (778, ["exchange", "words only"]),
        (900, ["token", "equal on all ranks"]),
    ):
        drawing.say(x, 38, heading[0], bold=True)
        drawing.say(x, 56, heading[1], size=11, fill=FAINT)
    centre = [top + lane * (high + 18) + high / 2 for lane in range(lanes)]
    for rank, y in enumerate(centre):
        drawing.say(80, y - 30, f"rank {rank}", size=12, fill=FAINT)
        drawing.box(35, y - 20, 90, 40, SOFT)
        drawing.say(80, y + 5, "h")
        drawing.arrow(127, y, 172, y)
        for tile in range(4):
            drawing.box(176 + tile * 45, y - 26, 42, 52, OURS if tile == 1 else SOFT)
        drawing.say(265, y + 44, IDS[rank], size=11, fill=FAINT)
        drawing.arrow(358, y, 402, y)
        drawing.box(406, y - 32, 128, 64, "#ffffff", OURS)
        drawing.say(470, y - 12, "logit · log2 e / T", size=12)
        drawing.say(470, y + 6, "− L(seed, position, id)", size=11, fill="#a86d09")
        drawing.say(470, y + 23, "= score", size=12)
        drawing.arrow(536, y, 592, y)
        drawing.box(596, y - 16, 108, 32, NOISE)
        drawing.say(650, y + 5, "(score, id)", size=12)
        for other in centre:
            drawing.arrow(706, y, 842, other + (y - other) * 0.06, FAINT)
        drawing.box(848, y - 18, 104, 36, SOFT)
        drawing.say(900, y + 5, "largest word", size=12)
    drawing.say(
        490,
        432,
        "No rank stores or gathers [B, V] logits. The largest integer wins, so all ranks agree.",
        size=13,
        fill=OURS,
    )
    return str(drawing)


def travels() -> list[tuple[str, float, str]]:
    """Return (what, bytes a rank sends and receives, colour) of a step, the most first."""
    logits = ROWS * VOCAB_SIZE * 4 * (WORLD_SIZE - 1) / WORLD_SIZE
    word = ROWS * 8 * (WORLD_SIZE - 1)
    return [
        ("all-gather of logits, fp32", logits, THEIRS),
        ("all-gather of logits, bf16", logits / 2, THEIRS),
        ("all-to-all of logits, fp32", logits / WORLD_SIZE, THEIRS),
        ("all-to-all of logits, bf16", logits / WORLD_SIZE / 2, THEIRS),
        ("tpsample, all rows with top_p (at most)", ROWS * FILTERED_ROW, OURS),
        ("tpsample", word, OURS),
    ]


def num_bytes() -> str:
    """Return the picture of what a rank sends, and receives, in a step."""
    bars, left, wide = travels(), 300, 520
    drawing = Drawing(980, 110 + 40 * len(bars))
    drawing.say(
        30,
        34,
        f"Bytes a rank sends, and receives, in a step: B = {ROWS}, V = {VOCAB_SIZE}, "
        f"{WORLD_SIZE} ranks",
        anchor="start",
        bold=True,
        size=15,
    )
    bottom = 56 + 40 * len(bars)
    for power in range(3, 9):
        x = left + (power - 3) / 5.3 * wide
        drawing.parts.append(
            f'<line x1="{x:g}" y1="52" x2="{x:g}" y2="{bottom}" stroke="#e3e7ec"/>'
        )
        drawing.say(x, bottom + 18, text.size(10**power), size=11, fill=FAINT)
    drawing.say(left, bottom + 38, "logarithmic", size=11, fill=FAINT, anchor="start")
    for place, (what, count, colour) in enumerate(bars):
        y, length = 60 + 40 * place, (math.log10(count) - 3) / 5.3 * wide
        drawing.say(left - 12, y + 19, what, size=12, anchor="end")
        drawing.box(left, y, length, 28, colour, colour)
        drawing.say(left + length + 10, y + 19, text.size(count), anchor="start", bold=True)
    return str(drawing)


PICTURES = {"step.svg": step, "bytes.svg": num_bytes}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(prog="explained", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args(arguments).folder
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw())


if __name__ == "__main__":
    main()
