"""Lets every rank learn of a call that is wrong on one, so that none takes part in it.

Where ranks meet on the host (CPU tensors; `SwapExchange`) they compare a digest of all that decides
the result (`Call.parts`). They do so before a call returns or changes anything. The digest of the
first steps covers the hidden states, because with different ones all ranks would draw the same
wrong tokens. The digest travels with the words of a step. A call without words, or one that is
about to draw seeds, sends it alone. The digest of an error is 1. If a rank has an error, or digests
differ, the ranks gather the errors or the values. A rank that skipped a step has other positions.

Where ranks meet on the device the host must not wait in every step. There a rank that refuses a
step writes the text into the store of the process group, where `check()` of the others reads it.

After a rank has left a step it refuses all further steps until `reset()`. Otherwise its new words
would be merged with old words of its peers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from tpsample.core.checks import kind_and_text, text_of
from tpsample.core.digest import digest_bits, digest_text
from tpsample.core.one_thread import OneCall, OneThread
from tpsample.core.row_noise import SeedSource
from tpsample.core.tensors import capturing
from tpsample.errors import Desync, PeerLost, RankMismatch
from tpsample.exchange.base import Exchange
from tpsample.exchange.swap import SwapExchange
from tpsample.ranks.ranks import SAME, SAME_CALL, Ranks, gather_or_raise, require_equal
from tpsample.ranks.roll_call import SAME_SAMPLER
from tpsample.request.entries import NO_REQUEST
from tpsample.request.params import SamplingParams
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step_batch import StepBatch


class Call(NamedTuple):
    """A collective call whose arguments are right on this rank.

    Attributes:
        name: the name of the call, with options that must be equal.
        rows: the number of rows of hidden states.
        batch: the batch of these rows; None if the call takes none.
        positions: int64 [B], or None.
        num_samples: draws per row. Some calls have another number here that must be equal on all
            ranks (`_OWN_NAMES`).
        token_ids: int64, the tokens in the arguments of the call, or None.
        hidden_states: [B, D] that the first calls compare, or None.
        position_bytes: the positions as bytes, where the host reads them.
        draft_logits: [B, K, V_local], the law of the drafts of a verification; None if they were
            certain, and for other calls.
    """

    name: str
    rows: int = 0
    batch: StepBatch | BatchView | None = None
    positions: Tensor | None = None
    num_samples: int = 1
    token_ids: Tensor | None = None
    hidden_states: Tensor | None = None
    position_bytes: bytes = b""
    draft_logits: Tensor | None = None

    def drawn_states(self) -> Tensor | None:
        """Return the hidden states of the drawn rows; those of other rows may differ."""
        undrawn = getattr(self.batch, "_undrawn_rows", None)
        if self.hidden_states is None or undrawn is None:
            return self.hidden_states
        return self.hidden_states[~undrawn.rows]

    def parts(self, sampler: int, step: int, seeds_drawn: int) -> dict[str, Any]:
        """Return all that decides the result, by name. A message names the first that differs.

        Args:
            sampler: the number of the sampler within its group.
            step: the number of the sampler's step before this call.
            seeds_drawn: how many seeds this rank has drawn for rows without one.
        """
        parts: dict[str, Any] = {
            "call": self.name,
            "sampler": sampler,
            "step": step,
            "hidden_states rows": self.rows,
            "num_samples": self.num_samples,
        }
        batch = self.batch
        if batch is not None:
            parts["batch"] = batch.plan
        if isinstance(batch, StepBatch):
            parts["rows without a seed"] = f"{batch.unseeded} after {seeds_drawn} drawn seeds"
            parts["slots"] = "no selection"  # named before seeds, which follow from the slots
        if batch is not None:
            parts |= {"seeds": batch.seed, "temperatures": batch.temperature}
        parts |= {"positions": self.positions, "token_ids": self.token_ids}
        if isinstance(batch, StepBatch):
            parts |= batch._state()
        return parts


class StepAgreement:
    """Compares the steps of a sampler's ranks.

    A call runs in a `with` statement, which lets one call in at a time. If the body raises, the
    peers, who wait for this rank, are told why it cannot go on. Samplers over the same connections
    take turns, so that the messages of two threads are not mixed up. Other threads are kept out of
    the batch of the call until the body ends (`hold`).

    Args:
        ranks: the ranks of the sampler.
        exchange: sends the digest of a call to the other ranks if it is a `SwapExchange`.
        seeds: the source of seeds for rows without one, once all ranks agree on a call.

    Attributes:
        steps_to_compare: how many steps are still to compare their hidden states.
    """

    def __init__(self, ranks: Ranks, exchange: Exchange, seeds: SeedSource) -> None:
        self._ranks, self._seeds = ranks, seeds
        ranks.seeds = seeds
        self._swap = exchange if isinstance(exchange, SwapExchange) else None
        way_out = "build a sampler per thread, or queue the calls"
        self.thread = OneCall("sampler", way_out, ranks.require_own_process)
        self._held: list[OneThread] = []  # of batches
        self._turn = ranks.shared.turn if ranks.world_size > 1 else None
        self.reset()

    def __enter__(self) -> None:
        """Begin what the peers take part in.

        Raises:
            RuntimeError: this thread is in the middle of a call; another thread is in one of a rank
                alone; or this process was forked by that of the ranks.
            RankMismatch: another thread of one of several ranks is in a call; all raise it.
        """
        if not self.thread.enter(sys._getframe(1)):
            self._refuse_thread(self.refuse)
        if self._turn is None:
            return
        try:
            self._turn.acquire()
        except BaseException as error:  # an interrupt, while another sampler sends
            self._tell_peers(error)
            self.thread.__exit__()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._tell_peers(error)
        finally:
            while self._held:
                batch = self._held.pop()
                batch.body = None
                batch.__exit__()
            if self._turn is not None:
                self._turn.release()
            self.thread.__exit__(None, error)

    def hold(self, batch: OneThread) -> None:
        """Keep changes and other threads out of a batch until the `with` statement ends.

        Raises:
            RuntimeError: another thread is in it, or another sampler's call of this thread.
        """
        if batch.body is not None:
            batch.changing()
        batch.__enter__()
        batch.body = self.thread.body
        self._held.append(batch)

    def _tell_peers(self, error: BaseException) -> None:
        """Tell the peers of an error that ends a call here, unless they know it."""
        if isinstance(error, PeerLost):
            self._ranks.counters.lost_ranks.update(error.ranks)
        elif self._left is None and not isinstance(error, (Desync, RankMismatch)):
            self.leave(kind_and_text(error), refused=False)

    def reset(self) -> None:
        """Forget that a step was left, and count steps from 0 again; all ranks do so together.

        So they do with calls of refresh, which one rank may have refused.
        """
        self._left: str | None = None
        self._refreshed = 0
        self.compare_next_states()
        self._ranks.shared.left = None
        # A call that is not yet compared, or the error in its place, and which step was before it.
        self._open: tuple[Call | None, Exception | None, int] | None = None
        if self._swap is not None:
            self._swap.ranks.roll.step = -1

    def check_on_all_ranks(
        self, check: Callable[..., Call], *arguments: Any, words_follow: bool = False
    ) -> Call:
        """Run ``check(*arguments)`` on every rank, and return its result if all ranks agree.

        Only then are seeds drawn for the rows of the batch that wait for one.

        Args:
            words_follow: whether the caller sends the words of the step and then calls `compare`.
                If so, the digest travels with the words where possible, and is compared there.

        Raises:
            RankMismatch: the call is wrong or differs on some of several ranks; all raise it.
            Exception: `check` raised it, on a rank alone or without a process group.
        """
        ranks, swap = self._ranks, self._swap
        # Another sampler may have left a call half done, over the same connections.
        if (left := self._left or ranks.shared.left) is not None:
            raise RankMismatch(f"{left}; call reset() on every rank first")
        call, error = None, None
        digest = 1
        try:
            call = check(*arguments)
            if swap is not None:
                digest = _digest(self._parts(call, swap.ranks.roll.step))
        except Exception as wrong:  # of whatever kind: the other ranks must hear of it
            error = wrong
        if swap is not None:
            roll = swap.ranks.roll
            assert roll.step is not None
            self._open = call, error, roll.step
            # `PeerLost.step` counts steps and verifications.
            roll.step += call is None or call.name.startswith(("step", "verify"))
            swap.set_digest(digest)
            unseeded = call and isinstance(call.batch, StepBatch) and call.batch._table.unseeded
            if call is None or not call.rows or unseeded or not words_follow:
                swap.publish(0, 0)
                self.compare()
        elif error is not None:
            if ranks.world_size > 1 and ranks.roll is not None:
                text = f"rank {ranks.rank}: {text_of(error)}"
                self.leave(text, refused=True)
                raise RankMismatch(text) from error
            raise error
        assert call is not None
        if isinstance(call.batch, StepBatch) and call.batch._table.unseeded:
            call.batch._table.draw_seeds(self._seeds)
        return call

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error on every rank, as the one for a wrong argument of a call."""
        with self:
            self.tell(error)

    def tell(self, error: Exception) -> NoReturn:
        """Raise an error on every rank, in a call that waits for no rank and has begun here.

        The others raise it in their next call.
        """
        self.check_on_all_ranks(raise_error, error)
        raise error

    def refuse_reset(self, error: Exception) -> NoReturn:
        """Raise an error in a reset of every rank, which then has not recovered."""
        with self.in_reset(partial(raise_error, error)):
            raise error

    def _refuse_thread(self, refuse: Callable[[Exception], object]) -> NoReturn:
        """Refuse a call while another thread is in one. Peers are told after that one has ended."""
        error = self.thread.busy()
        if self._turn is not None:
            with self.thread.lock:
                refuse(error)
        raise error

    @contextmanager
    def in_reset(self, check: Callable[[], None]) -> Iterator[None]:
        """Let one thread in for a reset, unless `check` raises on a rank, whose error all raise."""
        if not self.thread.enter(sys._getframe(2)):
            self._refuse_thread(self._ranks.renew)
        try:
            try:
                check()
            except Exception as wrong:
                self._ranks.renew(wrong)
            yield
        finally:
            self.thread.__exit__()

    def refreshed(self) -> None:
        """Note that the weight was taken anew, which every rank must do alike."""
        self._refreshed += 1
        self.compare_next_states()

    def compare_next_states(self) -> None:
        """Let the next steps compare hidden states, which a model may compute wrong on a rank."""
        several = self._ranks.world_size > 1 and self._ranks.roll is not None
        self.steps_to_compare = several * (FIRST_STEPS if self._swap is not None else 1)

    def must_compare_states(self, call: Call) -> bool:
        """Return whether the ranks must gather digests of the hidden states of this call.

        This is for `steps_to_compare`, where no message of the call carries a digest to the other
        ranks. It returns True once.
        """
        if self._swap is not None or call.hidden_states is None:
            return False
        if capturing(call.hidden_states.device):  # the host may not wait
            return False
        self.steps_to_compare = 0
        return True

    def compare(self) -> None:
        """Wait for the peers' digests, and raise if their calls differ from this rank's.

        It does nothing if this call has been compared.

        Raises:
            RankMismatch: the call is wrong or differs on some of several ranks; all raise it.
        """
        if self._open is None or self._swap is None:
            return
        (call, error, step_before), self._open = self._open, None
        if self._swap.agrees() and error is None:
            if self.steps_to_compare and call is not None and call.hidden_states is not None:
                self.steps_to_compare -= 1
            return
        try:
            parts = {} if call is None else self._parts(call, step_before)
            if call is not None:  # a rank that is behind looks at no hidden states
                parts.setdefault("refreshes", self._refreshed)
            named = {} if call is None else _named_by_caller(call)
            of = _of_rows(call)
            texts = {named.get(name, name): _text(part, of) for name, part in parts.items()}
            require_equal(gather_or_raise(self._ranks, texts, error), _EXPECTED)
            raise RankMismatch(f"batch: {SAME}, got other parts of it")
        finally:  # no rank takes this step
            self._swap.ranks.roll.step = step_before

    def _parts(self, call: Call, step: int | None) -> dict[str, Any]:
        """Return what decides the result of a call that follows a step."""
        assert self._swap is not None and step is not None
        parts = call.parts(self._swap.ranks.roll.number, step, self._seeds.drawn)
        states = call.drawn_states() if self.steps_to_compare else None
        if states is not None:
            parts["refreshes"] = self._refreshed
            parts["hidden_states"] = f"{digest_bits(states) & (2**64 - 1):016x}"
        return parts

    def leave(self, text: str, *, refused: bool) -> None:
        """Tell the peers, who may wait for this rank, that it has left their step."""
        roll = self._ranks.roll
        if roll is not None and self._ranks.world_size > 1:
            roll.write_reason(text, refused=refused)
            self._left = self._ranks.shared.left = text


def raise_error(error: Exception) -> NoReturn:
    """Raise an error, as a check of arguments does."""
    raise error


def _digest(parts: dict[str, Any]) -> int:
    """Return a digest of parts, which are tensors on a CPU or are compared by `str`."""
    for name, part in parts.items():
        if isinstance(part, Tensor):
            parts[name] = digest_bits(part)
        elif isinstance(part, BatchPlan):
            parts[name] = part.digest
    return digest_text(str(parts))


FIRST_STEPS = 3
"""How many steps compare their hidden states after a sampler is built, reset or refreshed."""

_EXPECTED = {
    "call": SAME_CALL,
    "sampler": SAME_SAMPLER,
    "refreshes": f"{SAME}; call refresh() where it was called less often, and from then on on all "
    "ranks alike",
    "batch: read from": f"{SAME}; step inside torch.compile on every rank, or on none",
    "hidden_states": f"{SAME}, by digest; look for a missing all-reduce or broadcast before the LM "
    "head",
    "rows without a seed": f"{SAME}, and so must be how many seeds were drawn before; call "
    "reset() on all ranks",
    "positions": f"{SAME}; a rank that skipped a step has others",
    "draft_token_ids": f"{SAME}, and so must be lengths=, behind which a row has -1",
    "tokens so far": f"{SAME}, by digest; every rank appends the same tokens as often",
}
"""The text by which a message says what a part must be; without an entry it must be the same."""

_OWN_NAMES = {
    "sample_draft": {"hidden_states rows": "draft_logits rows", "num_samples": "index"},
    "verify": {"num_samples": "drafts of a row", "token_ids": "draft_token_ids"},
    "prompt_logprobs": {"num_samples": "top", "token_ids": "next_token_ids"},
}
"""By the first word of a call's name, the arguments of its caller that are named otherwise here."""


def _named_by_caller(call: Call) -> dict[str, str]:
    """Return the names of parts in messages, as far as they differ from the names in `parts`."""
    named = _OWN_NAMES.get(call.name.partition(" ")[0], {})
    if " from " in call.name:
        named = {"hidden_states rows": "local_logits rows"} | named
    return named


_WIDE = 8
"""Numbers of a row that a message shows together."""


def _of_rows(call: Call | None) -> str:
    """Return what a message calls the requests of a batch: a selection names its rows by slot."""
    by_slot = call is not None and isinstance(call.batch, StepBatch) and call.batch._names_slots
    return "slot" if by_slot else "row"


def _text(part: Any, of: str) -> Any:
    """Return a part as JSON values by name: of rows, and of fields or of many columns.

    Args:
        of: as of `_of_rows`.
    """
    if isinstance(part, BatchPlan):
        names = [field.name for field in fields(SamplingParams) if field.name != "seed"]
        texts = [
            {"request": "none" if request is NO_REQUEST else "one"}
            | {name: repr(getattr(request, name)) for name in names}
            for request in part.requests
        ]
        known = part.requests or not part.num_rows
        source = {"read from": "its requests" if known else "a graph of torch.compile"}
        source["taken"] = "by slot" if of == "slot" else "whole"
        options = {"kept_cap": part.kept_cap, "fixed_rounds": part.fixed_rounds}
        stored = {"stored rows": str(part.stored_list)}
        return source | _named(of, texts) | options | stored
    if not isinstance(part, Tensor):
        return part if isinstance(part, int) else str(part)
    if part.is_floating_point():  # nine digits tell any two numbers of fp32 apart
        digits = 9 if part.itemsize <= 4 else 17
        return _named("row", [f"{number:.{digits}g}" for number in part.tolist()])
    wide = part.ndim > 1 and part.shape[1] > _WIDE
    return _named("row", [_named("column", row) if wide else row for row in part.tolist()])


def _named(of: str, values: list[Any]) -> dict[str, Any]:
    return {f"{of} {index}": value for index, value in enumerate(values)}
