"""Lets every rank learn of a call that is wrong on one, so that none takes part in it.

Where ranks meet on the host (CPU tensors; `SwapExchange`) they compare a digest of all
that decides the result (`Call.parts`) before anything of a call is returned or changed. It travels
with the words of a step, and by itself where a call has none or is about to draw seeds. If a rank
has an error, which has the digest 1, or digests differ, a gather brings the errors or the values. A
rank that skipped a step has other positions.

Where ranks meet on the device the host must not wait in every step. There a rank that refuses one
leaves the text in the store of the process group, where the `check()` of the others finds it.

After leaving a step, a rank refuses all further steps until `reset()`. Otherwise its new words
would be merged with its peers' old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from tpsample.core.digest import digest_bits, digest_text
from tpsample.core.row_noise import SeedSource
from tpsample.errors import Desync, PeerLost, RankMismatch
from tpsample.exchange.base import Exchange
from tpsample.exchange.swap import SwapExchange
from tpsample.ranks.ranks import Ranks, gather_or_raise
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step_batch import StepBatch


@dataclass(frozen=True)
class Call:
    """A collective call whose arguments are right on this rank.

    Attributes:
        name: of the call.
        rows: rows of hidden states.
        batch: of these rows; None if the call takes none.
        positions: int64 [B], or None.
        num_samples: draws per row, or another number that must be equal.
        token_ids: int64, tokens the call is about, or None.
        seeds_drawn: how many seeds this rank has drawn for rows without one.
    """

    name: str
    rows: int = 0
    batch: StepBatch | BatchView | None = None
    positions: Tensor | None = None
    num_samples: int = 1
    token_ids: Tensor | None = None
    seeds_drawn: int = 0

    @cached_property
    def parts(self) -> dict[str, Any]:
        """All that decides the result, by name, in the order in which a difference is told."""
        found: dict[str, Any] = {
            "call": self.name,
            "hidden_states rows": self.rows,
            "num_samples": self.num_samples,
        }
        batch = self.batch
        if batch is not None:
            found["batch"] = batch.plan
        if isinstance(batch, StepBatch):
            found["rows without a seed"] = f"{batch.unseeded} after {self.seeds_drawn} drawn seeds"
            found["slots"] = None  # of a selection, told before what follows from them
        if batch is not None:
            found |= {"seeds": batch.seed, "temperatures": batch.temperature}
        found |= {"positions": self.positions, "token_ids": self.token_ids}
        if isinstance(batch, StepBatch):
            found |= batch.state()
        return found

    def digest(self) -> int:
        """Return 64 bits of all parts. It reads tensors, so they must be on a CPU."""
        return digest_text(str({name: _digest(part) for name, part in self.parts.items()}))

    def texts(self) -> dict[str, Any]:
        """Return all parts as JSON values, to say where they differ. A list is one of rows."""
        return {name: _text(part) for name, part in self.parts.items()}


class StepAgreement:
    """Compares the steps of a sampler's ranks.

    In a `with` statement it tells the peers why this rank cannot go on, if the body raises; they
    wait for it.

    Args:
        ranks: of the sampler.
        exchange: brings the digest of a call to the other ranks, if it is a swap.
        seeds: where rows without a seed get theirs, once a call is settled.
    """

    def __init__(self, ranks: Ranks, exchange: Exchange, seeds: SeedSource) -> None:
        self._ranks, self._seeds = ranks, seeds
        self._swap = exchange if isinstance(exchange, SwapExchange) else None
        self.reset()

    def __enter__(self) -> None:
        """Begin what the peers take part in."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerLost):
            self._ranks.counters.lost.update(error.ranks)
        elif error is not None and not isinstance(error, (Desync, RankMismatch)):
            self.leave(f"{type(error).__name__}: {error}", refused=False)

    def reset(self) -> None:
        """Forget that a step was left, and count steps from 0 again; all ranks do so together."""
        self._left: str | None = None
        # A call that is not yet compared, or the error in its place, and which step was before it.
        self._open: tuple[Call | None, Exception | None, int] | None = None
        if self._swap is not None:
            self._swap.ranks.roll.step = -1

    def settle(
        self, check: Callable[..., Call], *arguments: Any, words_follow: bool = False
    ) -> Call:
        """Run ``check(*arguments)`` on every rank. Return its result if it succeeded alike.

        Only then are seeds drawn for the rows of its batch that wait for one.

        Args:
            words_follow: the caller sends the words of the step and then calls `compare`, so what
                need not be known before is compared there.

        Raises:
            RankMismatch: the call is wrong or differs on some of several ranks; all raise it.
            Exception: `check` raised it, on a rank alone or without a process group.
        """
        ranks, swap = self._ranks, self._swap
        if self._left is not None:
            raise RankMismatch(f"{self._left}; call reset() on every rank first")
        call, error = None, None
        digest = 1
        try:
            call = check(*arguments)
            if swap is not None:
                digest = call.digest()
        except Exception as wrong:  # of whatever kind: the other ranks must hear of it
            error = wrong
        if swap is not None:
            roll = swap.ranks.roll
            assert roll.step is not None
            self._open = call, error, roll.step
            # `PeerLost.step` counts steps and verifications.
            roll.step += call is None or call.name.startswith(("step", "verify"))
            swap.bring(digest)
            unseeded = call and isinstance(call.batch, StepBatch) and call.batch.unseeded
            if call is None or not call.rows or unseeded or not words_follow:
                swap.publish(0, 0)
                self.compare()
        elif error is not None:
            if ranks.world_size > 1 and ranks.roll is not None:
                text = f"rank {ranks.rank}: {error}"
                self.leave(text, refused=True)
                raise RankMismatch(text) from error
            raise error
        assert call is not None
        if isinstance(call.batch, StepBatch):
            call.batch.draw_seeds(self._seeds)
        return call

    def compare(self) -> None:
        """Wait for what the peers have sent, and raise if their calls differ from this rank's.

        It does nothing if they are compared.

        Raises:
            RankMismatch: the call is wrong or differs on some of several ranks; all raise it.
        """
        if self._open is None or self._swap is None:
            return
        (call, error, step_before), self._open = self._open, None
        if self._swap.agrees() and error is None:
            return
        try:
            texts = {} if call is None else call.texts()
            raise RankMismatch(difference(gather_or_raise(self._ranks, texts, error)))
        finally:  # no rank takes this step
            self._swap.ranks.roll.step = step_before

    def leave(self, text: str, *, refused: bool) -> None:
        """Tell the peers, who may wait, that this rank is not in the step with them."""
        roll = self._ranks.roll
        if roll is not None and self._ranks.world_size > 1:
            roll.say(text, refused=refused)
            self._left = text


def _digest(part: Any) -> object:
    if isinstance(part, Tensor):
        return digest_bits(part)
    return part.digest if isinstance(part, BatchPlan) else part


def _text(part: Any) -> Any:
    if isinstance(part, BatchPlan):
        return part.text.split("\n")
    if not isinstance(part, Tensor):
        return part if isinstance(part, int) else str(part)
    if part.is_floating_point():  # nine digits tell any two numbers of fp32 apart
        return [f"{each:.{9 if part.itemsize <= 4 else 17}g}" for each in part.tolist()]
    return part.tolist()


_SAME = "must be the same on every rank"
_EXPECTED = {
    "call": "every rank must make the same call",
    "rows without a seed": f"{_SAME}, and so must be how many seeds were drawn before",
    "positions": f"{_SAME}; a rank that skipped a step has others",
    "tokens so far": f"{_SAME}, by digest; every rank appends the same tokens as often",
}
"""The expectation that a message prints of a part; parts without an entry must be the same."""

_WIDE = 8
"""Numbers of a row that a message shows together."""


def difference(texts: list[dict[str, Any]]) -> str:
    """Return a message about the first part of a call that is not the same on all ranks.

        temperatures: row 1: must be the same on every rank, got rank 0: 0.5, rank 1: 0.25

    Args:
        texts: every rank's `Call.texts`, in which lists have an entry per row.
    """
    for name in texts[0]:
        shown: list[Any] = [text.get(name) for text in texts]
        if any(each != shown[0] for each in shown):
            return _in_batch(shown) if name == "batch" else _in_part(name, shown)
    return f"batch: {_SAME}, got other parts of it"


def _in_part(name: str, shown: list[Any]) -> str:
    """Say where the values of a part first differ."""
    expected, where = _EXPECTED.get(name, _SAME), name
    if all(isinstance(each, list) for each in shown):
        where, shown = _first(f"{name}: row", shown)
    if all(isinstance(each, list) and len(each) > _WIDE for each in shown):
        where, shown = _first(f"{where}, column", shown)
    return f"{where}: {expected}, got {_each(shown)}"


def _first(of: str, lists: list[list[Any]]) -> tuple[str, list[Any]]:
    """Return the name and the values of the first entry in which lists differ."""
    for place, values in enumerate(zip(*lists, strict=False)):
        if any(each != values[0] for each in values):
            return f"{of} {place}", list(values)
    return f"{of}s", [len(each) for each in lists]


def _in_batch(plans: list[list[str]]) -> str:
    """Say in which row, and in which of its fields, the ranks' requests first differ."""
    for lines in zip(*plans, strict=False):
        if len(set(lines)) > 1:
            row, _, first = lines[0].partition(": ")
            fields = [dict(_fields(line.partition(": ")[2])) for line in lines]
            for field in dict(_fields(first)):
                values = [of_rank.get(field) for of_rank in fields]
                if len(set(values)) > 1:
                    return f"batch: {row}: {field}: {_SAME}, got {_each(values)}"
            return f"batch: {_SAME}, got {_each(lines)}"
    return f"batch: {_SAME}, got batches of {_each([len(plan) for plan in plans])} lines"


def _fields(line: str) -> list[tuple[str, str]]:
    """Return the fields of a line such as ``temperature=1.0, top_k=0``; values may have commas."""
    found: list[tuple[str, str]] = []
    for part in line.split(", "):
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            found.append((name, value))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}, {part}")
    return found


def _each(values: Any) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
