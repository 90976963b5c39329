"""The answers of `tpsample generate`: transformers' loop draws them, and a record keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tpsample.cli.model import Model
from tpsample.noise import signed64
from tpsample.record.format import Record
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler


@dataclass
class Row:
    """The answer to a request while it is drawn.

    Attributes:
        prompt: token ids.
        stop: texts that end the answer, and are not of it.
        drawn: token ids; the last one may be an end of sequence.
        states: the hidden states [D] that they were drawn from.
    """

    model: Model
    prompt: list[int]
    params: SamplingParams
    stop: Sequence[str] = ()
    drawn: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    ended: bool = False

    def take(self, token_id: int, state: Tensor) -> None:
        """Add a token, and see whether the answer has ended."""
        self.drawn.append(token_id)
        self.states.append(state)
        self.ended = token_id in self.model.eos_token_ids
        text = self._whole() if self.stop else ""
        self.ended |= any(stop in text for stop in self.stop)

    @property
    def answer(self) -> list[int]:
        """The token ids without an end of sequence."""
        return [token_id for token_id in self.drawn if token_id not in self.model.eos_token_ids]

    def text(self) -> str:
        """Return the text of the answer, without its first stop text and what follows."""
        text = self._whole()
        starts = [text.find(stop) for stop in self.stop if stop in text]
        return text[: min(starts, default=None)]

    def _whole(self) -> str:
        text: str = self.model.tokenizer.decode(self.answer, skip_special_tokens=True)
        return text


@dataclass
class Decoded:
    """The steps that some rows took.

    Attributes:
        first_s: how long the first pass and its tokens took, which may compile kernels.
        seconds: how long all later ones took.
        forwards: passes of the model, the prompt's included.
    """

    rows: Sequence[Row]
    first_s: float = 0.0
    seconds: float = 0.0
    forwards: int = 0


@torch.inference_mode()
def decode(
    model: Model,
    rows: Sequence[Row],
    sampler: LMHeadSampler,
    max_new_tokens: int,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> Decoded:
    """Continue the prompts of all rows together, until each has ended.

    A row that ended stays in the batch, uncollected, so that the batch keeps its shape.

    Args:
        on_step: called after each pass of the model.

    Raises:
        NoToken: the logits of a row are NaN, or all masked.
    """
    from tpsample.integrations import transformers  # needs the extra hf

    prompts, done, states = [row.prompt for row in rows], Decoded(rows), Tensor()

    def keep(lm_head: Any, given: tuple[Tensor]) -> None:
        nonlocal states
        states = given[0][:, -1].contiguous()

    def take(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Collect the tokens of a step; as a stopping criterion, return which rows have ended."""
        for row, token_id, state in zip(rows, input_ids[:, -1].tolist(), states, strict=True):
            if not row.ended:
                row.take(token_id, state)
        done.forwards += 1
        on_step()
        if done.forwards == 1:
            done.first_s = time.perf_counter() - start
        return torch.tensor([row.ended for row in rows], device=input_ids.device)

    input_ids, attention_mask = (
        pad_sequence([torch.tensor(numbers) for numbers in lists], True, padding_side="left")
        for lists in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    start = time.perf_counter()
    with model.causal_lm.get_output_embeddings().register_forward_pre_hook(keep):
        model.causal_lm.generate(
            input_ids.to(model.lm_head.weight.device),
            attention_mask=attention_mask.to(model.lm_head.weight.device),
            max_new_tokens=max_new_tokens,
            stopping_criteria=[take],
            params=[row.params for row in rows],
            sampler=sampler,
            custom_generate=transformers.generate,
        )
    done.seconds = time.perf_counter() - start - done.first_s
    return done


def record_of(model: Model, rows: Sequence[Row]) -> Record:
    """Return every token that was drawn, row by row, with what it was drawn from."""
    draws = [(row, t) for row in rows for t in range(len(row.drawn))]
    states = torch.stack([row.states[t] for row, t in draws])
    numbers = [
        (len(row.prompt) + t, signed64(row.params.seed or 0), row.drawn[t]) for row, t in draws
    ]
    columns = torch.tensor(numbers, device=states.device).T.contiguous()
    tensors = dict(zip(("positions", "seeds", "token_ids"), columns, strict=True))
    tensors["status"] = torch.zeros(len(draws), dtype=torch.int32, device=states.device)
    so_far = {
        "prompt_token_ids": [row.prompt for row, _ in draws],
        "output_token_ids": [row.drawn[:t] if row.params.reads_output else [] for row, t in draws],
    }
    return Record(
        {"hidden_states": states, **tensors},
        [row.params for row, _ in draws],
        so_far,
        model.lm_head.options,
        model=model.name,
    )
