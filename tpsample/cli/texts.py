"""The rows of `tpsample generate` with a model: prompts as ids, ids as text, and their record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tpsample.cli.decode import Decoded
from tpsample.cli.model import Model
from tpsample.cli.report import Report
from tpsample.cli.requests import Request
from tpsample.output import SampleOutput
from tpsample.record import write_record
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler


class Texts:
    """The rows.

    Args:
        show: is given each new piece of the first row's text, once its letters are whole.

    Attributes:
        prompts: token ids of each row.
        params: the request of each row.
    """

    def __init__(
        self,
        model: Model,
        rows: Sequence[Request],
        *,
        raw: bool = False,
        show: Callable[[str], None] | None = None,
    ) -> None:
        encode = partial(model.tokenizer.encode, add_special_tokens=False)
        self.params = [each.params(encode, model.eos_token_ids) for each in rows]
        self.prompts = [model.prompt_token_ids(each.prompt, raw=raw) for each in rows]
        self._model, self._rows, self._show, self._shown = model, rows, show, ""

    def batch(self, sampler: LMHeadSampler, logprobs: int | None = None) -> SamplingBatch:
        """Return the requests before their first token."""
        return SamplingBatch.from_params(
            [replace(each, logprobs=logprobs) for each in self.params],
            vocab_size=sampler.vocab_size,
            device=sampler.weight.device,
            prompt_token_ids=self.prompts,
        )

    def ends(self, row: int, token_ids: list[int]) -> bool:
        """Return whether an answer is as long as was asked for, or has one of its stop texts."""
        fields = self._rows[row].fields
        if self._show is not None:
            text = self.text(row, token_ids)
            if text.startswith(self._shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._show(text[len(self._shown) :])
                self._shown = text
        if len(token_ids) >= fields.get("max_tokens", len(token_ids) + 1):
            return True
        return "stop" in fields and self.text(row, token_ids) != self._decoded(token_ids)

    def text(self, row: int, token_ids: list[int]) -> str:
        """Return the text of an answer, without its first stop text and what follows."""
        text = self._decoded(token_ids)
        found = [text.find(stop) for stop in self._rows[row].fields.get("stop", ()) if stop in text]
        return text[: min(found, default=None)]

    def print(self, shown: Report, decoded: Decoded) -> None:
        """Show every answer."""
        for row, (request, params) in enumerate(zip(self._rows, self.params, strict=True)):
            shown.text(request.prompt, params, self.text(row, decoded.rows[row]))

    def record(self, path: Path, decoded: Decoded, seeds: Tensor) -> str:
        """Write every token of every row for `tpsample verify`. Return a line that says so."""
        steps = decoded.steps
        drawn = [step.token_ids.ge(0).nonzero().flatten().tolist() for step in steps]
        kept = [(t, row) for t, rows in enumerate(drawn) for row in rows]

        def each(name: str) -> Tensor:
            return torch.stack([getattr(steps[t], name)[row] for t, row in kept])

        ok = torch.zeros(len(kept), dtype=torch.int32)
        write_record(
            path,
            each("hidden_states"),
            self._model.name,
            [self.params[row] for _, row in kept],
            each("positions"),
            SampleOutput(each("token_ids"), ok, seeds[[row for _, row in kept]]),
            prompt_token_ids=[self.prompts[row] for _, row in kept],
            output_token_ids=[decoded.rows[row][:t] for t, row in kept],
        )
        return f"{path}, {len(kept)} tokens: tpsample verify {path}"

    def _decoded(self, token_ids: list[int]) -> str:
        text: str = self._model.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
