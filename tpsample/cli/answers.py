"""What becomes of the tokens of `tpsample generate`: where an answer ends, its text, a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from tpsample.cli.decode import Decoded, Ends
from tpsample.cli.model import Model
from tpsample.cli.requests import Request
from tpsample.output import SampleOutput
from tpsample.record import write_record
from tpsample.request.params import SamplingParams

Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the prompts, without the chat template.")
]
NumSamples = Annotated[int, typer.Option(min=1, help="Answers per prompt.")]
Stream = Annotated[
    bool, typer.Option("--stream", help="Show the text of a single answer as it is written.")
]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not sample every token again.")]
RecordFile = Annotated[
    Path | None,
    typer.Option(help="Write what each token was drawn from to FILE, for tpsample verify."),
]


def ends_of(model: Model, asked: Sequence[Request]) -> Ends:
    """Return what ends a row: as many tokens as its request wants, or one of its stop texts."""

    def ends(row: int, token_ids: list[int]) -> bool:
        request = asked[row]
        if request.max_tokens is not None and len(token_ids) >= request.max_tokens:
            return True
        return bool(request.stop) and text_of(model, request, token_ids, cut=False) != text_of(
            model, request, token_ids
        )

    return ends


def text_of(model: Model, request: Request, token_ids: list[int], *, cut: bool = True) -> str:
    """Return a row's text; `cut` leaves out its first stop text and what follows."""
    text: str = model.tokenizer.decode(token_ids, skip_special_tokens=True)
    places = [text.find(stop) for stop in request.stop if stop in text] if cut else []
    return text[: min(places)] if places else text


def streamer(
    model: Model, request: Request, show: Callable[[str], None]
) -> Callable[[list[list[int]]], None]:
    """Return what shows each new piece of the only row's text, once its letters are whole."""
    shown = ""

    def on_rows(rows: list[list[int]]) -> None:
        nonlocal shown
        text = text_of(model, request, rows[0])
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            show(text[len(shown) :])
            shown = text

    return on_rows


def check_record_path(path: Path) -> None:
    """Raise a ValueError if there is no folder to write a record in."""
    if not path.parent.is_dir():
        raise ValueError(f"record: no folder {str(path.parent)!r} to write {path.name} in")


def record(
    path: Path,
    model: Model,
    decoded: Decoded,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
) -> str:
    """Write every token of every row, so that `tpsample verify` can draw each again.

    Return a line that says so.
    """
    # Of a row that ended, the step that ended it is the last that counts.
    kept = [
        (t, row)
        for t in range(len(decoded.steps))
        for row, tokens in enumerate(decoded.rows)
        if t <= len(tokens)
    ]
    assert decoded.seeds is not None
    steps = decoded.steps
    token_ids = torch.stack([steps[t].token_ids[row] for t, row in kept])
    write_record(
        path,
        torch.stack([steps[t].hidden_states[row] for t, row in kept]),
        model.name,
        [params[row] for _, row in kept],
        torch.stack([steps[t].positions[row] for t, row in kept]),
        SampleOutput(
            token_ids,
            torch.zeros(len(kept), dtype=torch.int32),
            torch.stack([decoded.seeds[row] for _, row in kept]),
        ),
        prompt_token_ids=[prompts[row] for _, row in kept],
        output_token_ids=[decoded.rows[row][:t] for t, row in kept],
    )
    return f"{path}, {len(kept)} tokens: tpsample verify {path}"
