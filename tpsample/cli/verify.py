"""`tpsample verify` samples recorded steps again, and confirms or refutes their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpsample.cli import report
from tpsample.cli.model import head_loader
from tpsample.core.machine import how_to_install
from tpsample.core.word import Status
from tpsample.record import RowVerdict, verify_record


def verify(
    records: Annotated[list[Path], typer.Argument(help="Files of tpsample.record.write_record.")],
    allow_download: Annotated[
        bool,
        typer.Option(
            "--allow-download", help="Let a record name a model that is not on this machine."
        ),
    ] = False,
) -> None:
    """Sample every row of recorded steps again, by the definition of the correct token.

    Each file brings the hidden states, the head or the name of its model, the requests, seeds and
    positions. Exit status 0 if every token is confirmed, 1 if one is refuted, 2 if a file is not a
    record or cannot be repeated. Nothing a file brings is run.
    """
    refuted = unusable = rows = 0
    for path in records:
        try:
            verdicts = verify_record(path, load_head=head_loader(allow_download))
        except (ImportError, ValueError) as error:
            way_out = f": {how_to_install()}" if isinstance(error, ImportError) else ""
            report.error(f"{path}: {error}{way_out}")
            unusable += 1
            continue
        for row, verdict in enumerate(verdicts):
            typer.echo(f"{path}: row {row}: {_line(verdict)}")
        rows += len(verdicts)
        refuted += sum(not verdict.confirmed for verdict in verdicts)
    typer.echo(f"{rows} rows: {rows - refuted} confirmed, {refuted} refuted")
    if refuted or unusable:
        raise typer.Exit(2 if unusable else 1)


def _line(verdict: RowVerdict) -> str:
    recorded, expected = (_shown(*side) for side in (verdict.recorded, verdict.expected))
    if verdict.recorded == verdict.expected:
        return f"confirmed: {recorded}"
    if verdict.near_tie:
        return f"confirmed: {recorded}, a near tie with {expected} ({verdict.gap:.1e} below)"
    return f"REFUTED: recorded {recorded}, expected {expected}"


def _shown(token_ids: list[int], status: int) -> str:
    known = status in list(Status)
    name = "" if status == Status.OK else f" ({Status(status).name if known else status})"
    return f"token {' '.join(map(str, token_ids))}{name}"
