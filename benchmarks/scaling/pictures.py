"""The pictures of a scaling record: tokens per second, bytes, and the time beside the baselines'.

A family of candidates has one colour everywhere. Of the samplers behind one exchange the fastest is
drawn, point by point; the tables have them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import drawing, text
from benchmarks.scaling.candidates import ONE_RANK, STORED, TPSAMPLE
from benchmarks.scaling.record import Record, Row
from benchmarks.scaling.sessions import disturbances
from benchmarks.whole_logits import AllGather, AllToAll

GATHERED, SCATTERED = AllGather.name, AllToAll.name
COLOURS = dict(zip((TPSAMPLE, GATHERED, SCATTERED, ONE_RANK), drawing.PALETTE, strict=False))
LABELS = {
    GATHERED: f"{GATHERED} + fastest sampler",
    SCATTERED: f"{SCATTERED} + fastest sampler",
    ONE_RANK: "one rank alone (tpsample)",
}
SHADES = ("#a9c8f0", "#6f9fe0", "#1f5fbf", "#0e2f66")
"""Of tpsample's colour, for the number of ranks."""


def draw(record: Record, folder: Path) -> dict[str, list[str]]:
    """Draw everything the record has rows for; return the file names by shape."""
    if not drawing.available():
        return {}
    rows, drawn = fastest(record.rows()), {}
    footer = drawing.footer(record.machine)
    if disturbances(record):
        footer += " · the machine was not quiet"
    for shape in unique(rows, "shape"):
        own = [row for row in rows if row["shape"] == shape]
        files = [_tokens(own, mode, folder, footer) for mode in unique(own, "mode")]
        files += [_bytes(own, folder, footer), _ratio(own, folder, footer)]
        drawn[shape] = [file for file in files if file]
    return drawn


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Return the fastest row of each family at each point.

    On one rank the two exchanges are the same: whole logits that nobody has to move.
    """
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        families = [row["family"]] if row["family"] != STORED else [GATHERED, SCATTERED]
        for family in families:
            key = (row["shape"], row["mode"], row["world_size"], row["batch"], family)
            if key not in best or row["median_us"] < best[key]["median_us"]:
                best[key] = {**row, "family": family}
    return list(best.values())


def unique(rows: Iterable[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def at(rows: Iterable[Row], **where: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def _tokens(rows: list[Row], mode: str, folder: Path, footer: str) -> str | None:
    """Tokens per second over the number of ranks, a panel per batch size."""
    rows = at(rows, mode=mode)
    worlds = sorted(unique(rows, "world_size"))
    if len(worlds) < 2:
        return None
    batches = drawing.few(unique(rows, "batch"))
    figure, axes = drawing.panels(len(batches))
    for axis, batch in zip(axes, batches, strict=True):
        here = at(rows, batch=batch)
        for family, colour in COLOURS.items():
            line = sorted(at(here, family=family), key=lambda row: row["world_size"])
            if not line:
                continue
            x, y = [r["world_size"] for r in line], [r["tokens_per_s"] for r in line]
            axis.plot(x, y, marker="o", color=colour, label=LABELS.get(family, family))
            low, high = ([batch / r[q] * 1e6 for r in line] for q in ("q3_us", "q1_us"))
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        for first in at(here, family=TPSAMPLE, world_size=1):
            ideal = [w * first["tokens_per_s"] for w in worlds]
            axis.plot(worlds, ideal, "k--", linewidth=0.9, label="ideal: W × tpsample at W = 1")
        drawing.ticks(axis, worlds)
        drawing.plain_numbers(axis)
        axis.set(title=f"B = {batch}", xlabel="ranks W")
    axes[0].set_ylabel("tokens per second")
    name = f"tokens-{rows[0]['shape']}-{mode.replace(' ', '-')}.png"
    return drawing.save(figure, folder / name, _tokens_message(rows, mode), footer)


def _tokens_message(rows: list[Row], mode: str) -> str:
    world, batch = max(unique(rows, "world_size")), max(unique(rows, "batch"))
    here = at(rows, batch=batch)
    ours = at(here, family=TPSAMPLE, world_size=world)
    alone = at(here, family=TPSAMPLE, world_size=1)
    others = [r for f in (GATHERED, SCATTERED) for r in at(here, family=f, world_size=world)]
    said = f"{rows[0]['shape']}, {mode}"
    if not ours:
        return f"{said}: tokens per second over ranks"
    parts = []
    if alone:
        gain = ours[0]["tokens_per_s"] / alone[0]["tokens_per_s"]
        parts.append(f"{text.three(gain)} × the tokens of one rank")
    if others:
        beside = ours[0]["tokens_per_s"] / max(row["tokens_per_s"] for row in others)
        parts.append(f"{text.three(beside)} × those of the best baseline")
    return f"{said}, B = {batch}: tpsample on {world} ranks makes {', '.join(parts)}"


def _bytes(rows: list[Row], folder: Path, footer: str) -> str | None:
    """Bytes that a rank sends in a step over the batch size, a panel per mode."""
    world = max(unique(rows, "world_size"))
    rows = [row for row in at(rows, world_size=world) if row["bytes_sent"] > 0]
    if not rows:
        return None
    modes = unique(rows, "mode")
    figure, axes = drawing.panels(len(modes))
    for axis, mode in zip(axes, modes, strict=True):
        for family, colour in COLOURS.items():
            line = sorted(at(rows, mode=mode, family=family), key=lambda row: row["batch"])
            if line:
                x, y = [r["batch"] for r in line], [r["bytes_sent"] for r in line]
                label = family if family == TPSAMPLE else f"{family} of logits"
                axis.plot(x, y, marker="o", color=colour, label=label)
        drawing.ticks(axis, unique(rows, "batch"))
        axis.set_yscale("log")
        axis.set_ylim(
            min(row["bytes_sent"] for row in rows) / 2, max(row["bytes_sent"] for row in rows) * 2
        )
        axis.yaxis.set_major_formatter(lambda value, _: text.size(value))
        axis.set(title=mode, xlabel="batch size B")
    axes[0].set_ylabel("bytes that a rank sends")
    batch = max(unique(rows, "batch"))
    last = at(rows, mode=modes[0], batch=batch)
    said = ", ".join(f"{r['family']} {text.size(r['bytes_sent'])}" for r in last)
    message = f"{rows[0]['shape']}, {modes[0]}: at W = {world}, B = {batch} a rank sends {said}"
    return drawing.save(figure, folder / f"bytes-{rows[0]['shape']}.png", message, footer)


def _ratio(rows: list[Row], folder: Path, footer: str) -> str | None:
    """tpsample's time over the best baseline's, a panel per mode, a shade per number of ranks."""
    rows = [row for row in rows if "over_best_baseline" in row]
    if not rows:
        return None
    modes, worlds = unique(rows, "mode"), drawing.few(unique(rows, "world_size"), len(SHADES))
    figure, axes = drawing.panels(len(modes))
    for axis, mode in zip(axes, modes, strict=True):
        for world, shade in zip(worlds, _shades(len(worlds)), strict=True):
            line = sorted(at(rows, mode=mode, world_size=world), key=lambda row: row["batch"])
            x, y = [r["batch"] for r in line], [r["over_best_baseline"] for r in line]
            axis.plot(x, y, marker="o", color=shade, label=f"tpsample, W = {world}")
        axis.axhline(1, color="black", linewidth=1, linestyle="--", label="the best baseline")
        drawing.ticks(axis, unique(rows, "batch"))
        drawing.plain_numbers(axis)
        ratios = [row["over_best_baseline"] for row in rows]
        axis.set_ylim(min([1, *ratios]) / 1.3, max([1, *ratios]) * 1.3)
        axis.set(title=mode, xlabel="batch size B")
    axes[0].set_ylabel("time ÷ best baseline's\n(below 1 tpsample is faster)")
    slower = sum(row["over_best_baseline"] >= 1 for row in rows)
    low, high = (text.three(f(row["over_best_baseline"] for row in rows)) for f in (min, max))
    message = (
        f"{rows[0]['shape']}: tpsample takes {low} to {high} times as long as the best baseline; "
        f"it is slower at {slower} of {len(rows)} points"
    )
    return drawing.save(figure, folder / f"ratio-{rows[0]['shape']}.png", message, footer)


def _shades(number: int) -> Sequence[str]:
    return SHADES[-number:]
