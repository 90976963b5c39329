"""Changes of a batch, written down where the requests are known, and made where they are not.

    changes = Changes()                                  # on the rank that schedules
    changes.put(7, params, prompt_token_ids=[prompt])
    changes.free([3])
    sampler.broadcast(batch, changes, src=0)             # on every rank; elsewhere without changes

They travel as JSON, so a rank takes numbers and lists from another, never code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.request.as_json import from_json, to_json
from tpsample.request.batch import SamplingBatch
from tpsample.request.batch_checks import request_list
from tpsample.request.params import SamplingParams

Tokens = Sequence[Sequence[int]] | None


class Changes(Sealed):
    """A list of calls of `SamplingBatch`. Arguments are checked when they are made on a batch."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, list[int], Any, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def put(
        self,
        slots: int | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        prompt_token_ids: Tokens = None,
        output_token_ids: Tokens = None,
    ) -> None:
        """Write down a `SamplingBatch.put`."""
        self._note("put", slots, params, prompt_token_ids, output_token_ids)

    def free(self, slots: int | Sequence[int]) -> None:
        """Write down a `SamplingBatch.free`."""
        self._note("free", slots)

    def arrange(
        self,
        order: Sequence[int],
        joining: Sequence[SamplingParams] = (),
        *,
        prompt_token_ids: Tokens = None,
        output_token_ids: Tokens = None,
    ) -> None:
        """Write down a `SamplingBatch.arrange`, with which rows leave, join and move."""
        self._note("arrange", order, joining, prompt_token_ids, output_token_ids)

    def as_json(self) -> list[Any]:
        """Return what `make` takes, as JSON values."""
        return [list(call) for call in self._calls]

    @staticmethod
    def make(batch: SamplingBatch, calls: Iterable[Any]) -> None:
        """Make the calls on a batch, in order. One that is refused leaves those before it made.

        Raises:
            TypeError, ValueError: what the first refused call raises.
        """
        for name, rows, params, prompts, outputs in calls:
            where, tokens = f"changes: {name}", (prompts, outputs)
            requests = [SamplingParams(**from_json(where, each)) for each in params]
            so_far = dict(zip(("prompt_token_ids", "output_token_ids"), tokens, strict=True))
            if name == "free":
                batch.free(rows)
            elif name == "put":
                batch.put(rows, requests, **so_far)
            else:
                batch.arrange(rows, requests, **so_far)

    def _note(self, name: str, rows: Any, params: Any = (), *tokens: Tokens) -> None:
        its = [to_json(each) for each in request_list(params)]
        prompts, outputs = [
            None if lists is None else [_listed(each) for each in lists]
            for lists in tokens or (None, None)
        ]
        self._calls.append((name, _listed(rows), its, prompts, outputs))


def _listed(rows: int | Sequence[int] | Tensor) -> list[int]:
    if isinstance(rows, Tensor):
        return rows.tolist()
    return [rows] if isinstance(rows, int) else [int(row) for row in rows]
