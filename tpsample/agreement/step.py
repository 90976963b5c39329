"""Lets every rank learn of a call that is wrong on one, so that none takes part in it.

Where ranks meet on the host (CPU tensors; `Exchange.compares_steps`) they compare a few integers
before anything of a call is sent: whether the arguments are right, which call it is, its sizes, and
digests of the batch, the seeds, the positions and what else a step reads. If one has an error, or
they differ, a second gather brings the texts. A rank that skipped a step has other positions.

Where ranks meet on the device the host must not wait in every step. There a rank that refuses one
leaves the text in the store of the process group, where the `check()` of the others finds it.

After leaving a step, a rank refuses all further steps until `reset()`. Otherwise its new words
would be merged with its peers' old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tpsample.agreement.differences import difference
from tpsample.core.digest import digest_bits, digest_text
from tpsample.errors import Desync, PeerLost, RankMismatch
from tpsample.ranks.ranks import Ranks, gather_or_raise
from tpsample.request.plan import BatchView
from tpsample.request.seeds import SeedSource
from tpsample.request.step_batch import StepBatch

_FIELDS = (
    "arguments",
    "call",
    "hidden_states rows",
    "num_samples",
    "batch",
    "rows without a seed",
    "slots",
    "seeds",
    "temperatures",
    "positions",
    "token_ids",
    "grammar_bitmask",
    "forced_token_ids",
    "tokens so far",
    "parameters",
)
"""What ranks compare of a call, in the order in which a difference is told."""


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
    def view(self) -> BatchView:
        """The batch as a step of the call reads it, once the call is settled."""
        assert self.batch is not None
        return self.batch.view(self.rows)

    @property
    def emits_tokens(self) -> bool:
        """Whether this is a step or a verification, which `PeerLost.step` counts."""
        return self.name.startswith(("step", "verify"))

    def record(self) -> dict[str, int]:
        """Return what the ranks compare. It reads tensors, so they must be on a CPU."""
        found = dict.fromkeys(_FIELDS, 0) | {
            "arguments": 1,
            "call": digest_text(self.name),
            "hidden_states rows": self.rows,
            "num_samples": self.num_samples,
            "positions": _digest(self.positions),
            "token_ids": _digest(self.token_ids),
        }
        if self.batch is not None:
            found["batch"] = self.batch.plan.digest
            found["seeds"] = _digest(self.batch.seed)
            found["temperatures"] = _digest(self.batch.temperature)
        if isinstance(self.batch, StepBatch):
            waiting = self.batch.unseeded
            found["rows without a seed"] = digest_text(f"{waiting}, {self.seeds_drawn}")
            found |= self.batch.state_digests()
        return found

    def texts(self) -> dict[str, Any]:
        """Return what the digests are made of, as JSON values, to say where they differ.

        A list has an entry per row.
        """
        found: dict[str, Any] = {"call": self.name}
        found |= {
            name: tensor.tolist()
            for name, tensor in (("positions", self.positions), ("token_ids", self.token_ids))
            if tensor is not None
        }
        if self.batch is not None:
            found["batch"] = self.batch.plan.text.split("\n")
            found["seeds"] = self.batch.seed.tolist()
            # Nine digits tell any two numbers of fp32 apart.
            found["temperatures"] = [f"{each:.9g}" for each in self.batch.temperature.tolist()]
        if isinstance(self.batch, StepBatch):
            found["rows without a seed"] = (
                f"{self.batch.unseeded} after {self.seeds_drawn} drawn seeds"
            )
        return found


class StepAgreement:
    """Compares the steps of a sampler's ranks.

    Args:
        ranks: of the sampler.
        compares_steps: whether ranks meet on the host before every step.
        seeds: where rows without a seed get theirs, once a call is settled.
    """

    def __init__(self, ranks: Ranks, compares_steps: bool, seeds: SeedSource) -> None:
        self._ranks, self._seeds, self.compares_steps = ranks, seeds, compares_steps
        self.reset()

    def reset(self) -> None:
        """Forget that a step was left, and count steps from 0 again; all ranks do so together."""
        self._left: str | None = None
        if self.compares_steps:
            roll = self._ranks.roll
            assert roll is not None
            roll.step = -1

    def settle(self, check: Callable[[], Call]) -> Call:
        """Run `check` on every rank. Return its result if it succeeded everywhere alike.

        Only then are seeds drawn for the rows of its batch that wait for one.

        Raises:
            RankMismatch: the call is wrong or differs on some of several ranks; all raise it.
            Exception: `check` raised it, on a rank alone or without a process group.
        """
        ranks = self._ranks
        if self._left is not None:
            raise RankMismatch(f"{self._left}; call reset() on every rank first")
        call, error = None, None
        own = dict.fromkeys(_FIELDS, 0)
        try:
            call = check()
            if self.compares_steps:
                own = call.record()
        except Exception as wrong:  # of whatever kind: the other ranks must hear of it
            error = wrong
        if self.compares_steps:
            roll = ranks.roll
            assert roll is not None and roll.step is not None
            before, roll.step = roll.step, roll.step + (call is None or call.emits_tokens)
            try:
                self._compare(call, own, error)
            except RankMismatch:  # no rank takes this step
                roll.step = before
                raise
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

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Tell the peers why this rank cannot go on, if the body raises; they wait for it."""
        try:
            yield
        except (PeerLost, Desync, RankMismatch):
            raise
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}", refused=False)
            raise

    def _compare(self, call: Call | None, own: dict[str, int], error: Exception | None) -> None:
        ranks = self._ranks
        values = torch.tensor([own[name] for name in _FIELDS], dtype=torch.int64)
        records = ranks.gather_tensor(values).tolist()
        if not all(right for right, *_ in records):
            gather_or_raise(ranks, {}, error)
        for place, name in enumerate(_FIELDS):
            of_ranks = [record[place] for record in records]
            if len(set(of_ranks)) > 1:
                assert call is not None
                raise RankMismatch(difference(name, of_ranks, ranks.gather(call.texts())))

    def leave(self, text: str, *, refused: bool) -> None:
        """Tell the peers, who may be waiting, that this rank is not in the step with them."""
        roll = self._ranks.roll
        if roll is not None and self._ranks.world_size > 1:
            roll.say(text, refused=refused)
            self._left = text


def _digest(tensor: Tensor | None) -> int:
    return 0 if tensor is None else digest_bits(tensor)
