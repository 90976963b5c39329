"""Finds out who is still there, through the store of the process group, once an exchange failed.

A collective that fails does not say who is missing. On some ranks it does not fail at all, because
not every rank waits for the dead one. So a rank that notices a failure writes into the store, and a
rank that waits reads it now and then. All ranks that write within GRACE_S are alive. Once the ranks
have met, nothing is read or written while no exchange fails. A store that does not answer within
GRACE_S is itself lost.

    <prefix>/alive/<rank>  changes while this rank works or waits; see `meet`
    <prefix>/ready/<rank>  this rank has come to the meeting
    <prefix>/called        an exchange has failed
    <prefix>/here/<rank>   the step in which this rank gave up, and whom its device did not hear
    <prefix>/said/<rank>   why this rank left a step by itself
    <prefix>/anew/<rank>   this rank is ready to begin anew, under the next prefix, and its record
    <prefix>/decided       how the wait for all ranks ended: they have come, or one has given up
    waits/<rank>           the sampler in which this rank gave up last, whichever that is, and when

A sampler that was reset, or that has two levels, has connections of its own. Ranks that call
different ones wait for each other in vain, and find out so by `waits`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpsample.core.repeated import repeated
from tpsample.core.tensors import capturing
from tpsample.errors import PeerLost, RankMismatch
from tpsample.ranks.bounded_store import BoundedStore
from tpsample.ranks.channel import Awaited
from tpsample.ranks.lost import EXCHANGE, RESET, names, peer_lost

GRACE_S = 1.5
"""How long survivors wait for one another after a failure. With the store's calls before and after,
a rank ends within two seconds of its timeout."""
BEAT_S = 0.3
"""Seconds between signs of life of a rank that works before it meets the others."""
_SLICE = timedelta(seconds=0.25)
_MAX_RETRY_S = 120.0  # the longest that Linux waits before TCP sends again
_MAX_TEXT = 1000
_RECENT_S = 10.0  # between clocks of two hosts

_MET, _GIVEN_UP = "all ranks have come", "a rank has given up"

SAME_SAMPLER = "every rank must call the same one, in the same order; they are numbered as built"


class RollCall:
    """The ranks of one sampler; built in the same order on all of them.

    Args:
        call: what begins the texts of errors: the call that others may have lost.

    Attributes:
        number: the number of this sampler among those of the group; 0 before it is built.
        step: number of the step this rank is in, -1 before the first; None if it is not counted.
        way_out: the advice of an error, for ranks that are alive.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, world_size: int, call: str = EXCHANGE
    ) -> None:
        self.number = 0
        self._call = call
        store = dist.distributed_c10d._get_process_group_store(group)
        prefix = "tpsample" if call == EXCHANGE else f"tpsample/{call}"
        self._store = BoundedStore(dist.PrefixStore(prefix, store), GRACE_S)
        self._rank, self._world_size = rank, world_size
        self._generation = 0
        self._lost_at: float | None = None
        self.step: int | None = None
        self.way_out = RESET

    def store(self, name: str) -> dist.Store:
        """Return a store that no earlier generation has written to, the same on every rank."""
        return dist.PrefixStore(self._key(name), self._store.store)

    def meet(self, work: Callable[[], object], timeout_s: float) -> None:
        """Work, and wait for all ranks, however long their work takes. Collective.

        While this rank works it reports that it is alive, and answers ranks that call the roll.

        Raises:
            PeerLost: a rank gave no sign of life for so long.
        """

        def say_alive() -> None:
            self._store.set(self._key("alive", self._rank), str(time.monotonic()))
            if self._store.has(self._key("called")):
                self._answer(None)

        with repeated(say_alive, BEAT_S):
            work()
        everybody = range(self._world_size)
        ready = [self._key("ready", rank) for rank in everybody]
        heard: list[tuple[str | None, float]] = [(None, time.monotonic()) for _ in everybody]
        next_s, pause_s = time.monotonic() + BEAT_S, 0.0002
        met = self._store.set(ready[self._rank], "", beside=ready)
        while not met:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            if time.monotonic() > next_s:
                say_alive()
                for rank in everybody:
                    # One by one, because many answers may take longer than the store is given.
                    text = self._store.texts([self._key("alive", rank)])[0]
                    if text != heard[rank][0]:
                        heard[rank] = text, time.monotonic()
                next_s = time.monotonic() + BEAT_S
            limit = time.monotonic() - timeout_s
            if min(at for _, at in heard) < limit or self._store.has(self._key("called")):
                raise self.lost()
            met = self._store.has(*ready)

    def wait(self, work: Awaited | dist.Work | None) -> None:
        """Wait on the host for a collective, as `work.wait()` does, and see lost peers meanwhile.

        Raises:
            PeerLost: the collective failed here or elsewhere, or took longer than the group allows.
        """
        closed_at = math.inf
        while work is not None:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                # The wait has its own words; those of the collective's timeout are different.
                only_slice = str(error).startswith("Operation timed out")
                if not only_slice or self._store.has(self._key("called")):
                    raise self.lost() from error
                # Words that a rank sent before it closed its sampler may still be on their way.
                if self._store.has(self._key("closed")):
                    closed_at = min(closed_at, time.monotonic())
                if time.monotonic() > closed_at + GRACE_S:
                    raise self.lost() from error

    def wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait on the host for a GPU, with a timeout that a GPU itself does not have.

        Raises:
            PeerLost: the GPU was not done in time.
            RankMismatch: a rank refused the step.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            self.reasons()
            if time.monotonic() > deadline:
                raise self.lost()
            time.sleep(0.002)

    def close(self) -> None:
        """Tell ranks that wait for this one from now on that its sampler is closed."""
        self.leave("closed its sampler")

    def leave(self, text: str) -> None:
        """Tell ranks that wait for this one, now or later, why it does not come."""
        self.write_reason(text, refused=False)
        self._store.set(self._key("closed"), "")

    @contextmanager
    def called_on_error(self, device: torch.device) -> Iterator[None]:
        """Raise PeerLost if the body cannot start a collective, because then a peer is lost.

        An error during a graph capture is raised unchanged, because it comes from the capture.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if capturing(device):
                raise
            raise self.lost() from error

    def write_reason(self, text: str, *, refused: bool) -> None:
        """Write down why this rank leaves a step; `refused` says that its arguments are wrong."""
        said = json.dumps({"text": text[:_MAX_TEXT], "refused": refused})
        self._store.set(self._key("said", self._rank), said)

    def reasons(self) -> dict[int, str]:
        """Return why ranks left a step, by rank.

        Raises:
            RankMismatch: some had wrong arguments; the text is that of their errors.
        """
        texts, refusals = {}, []
        for rank, said in enumerate(self._texts("said")):
            if said is not None:
                answer = json.loads(said)
                texts[rank] = str(answer["text"])
                if answer["refused"] is True:
                    refusals.append(texts[rank])
        if refusals:
            raise RankMismatch("; ".join(refusals))
        return texts

    def lost(
        self,
        unheard: Sequence[int] | None = None,
        reporting: Sequence[int] = (),
        step: int | None = None,
    ) -> PeerLost:
        """Call the roll, and return the error that says who is missing, equal on all that answer.

        Args:
            unheard: ranks whose words did not reach the device in time. None where ranks meet on
                the host; there a rank is missing if it is silent in this roll call.
            reporting: ranks whose words said that they had lost a rank.
            step: the first step that this rank's own device lost; None if it lost none itself.

        Raises:
            RankMismatch: nobody is lost, but a rank refused the step (see `reasons`), or ranks wait
                for each other in different samplers.
        """
        self._lost_at = time.monotonic()
        on_host = unheard is None
        step, unheard = (self.step, ()) if unheard is None else (step, unheard)
        step = None if step == -1 else step
        self._answer(step, unheard)
        # Words tell the ranks that meet on the device; a call would stop them in what they finish.
        if on_host and not self._store.set(self._key("called"), ""):
            return self._store_lost(step)
        own = {"sampler": self.number, "at": time.time()}
        self._store.set(f"waits/{self._rank}", json.dumps(own))
        hoped = [self._key("here", rank) for rank in range(self._world_size) if rank not in unheard]
        deadline = time.monotonic() + GRACE_S
        while not (everybody := self._store.has(*hoped)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not everybody:
            time.sleep(0.1)  # who came last saw the others, and they see it
        texts = self._texts("here")
        if on_host and texts[self._rank] is None:  # it is the store that has lost words
            return self._store_lost(step)
        silent = [rank for rank, text in enumerate(texts) if text is None]
        self._require_one_sampler(silent)
        answers = [json.loads(text) for text in texts if text is not None]
        steps = [answer["step"] for answer in answers if answer["step"] is not None]
        first = min(steps, default=step)
        since = " since the last reset" if self._generation else ""
        how: dict[str, Any] = {"since": since, "way_out": self.way_out, "call": self._call}
        if on_host:
            alone = 1 < len(silent) == self._world_size - 1
            return peer_lost(silent, (), first, self.reasons(), alone=alone, **how)
        # A rank that is unheard but answers here was too late, or gave up before it sent.
        late = sorted({*unheard, *(rank for answer in answers for rank in answer["unheard"])})
        missing = [rank for rank in late if rank in silent]
        return peer_lost(missing, late or reporting, first, self.reasons(), **how)

    def begin_anew(
        self, timeout_s: float, record: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Wait for all ranks, then forget who was missing. Return every rank's record. Collective.

        An attempt is over when all ranks have come, or when one gives up. Ranks that still wait go
        on to the next attempt, so that a rank that has left is never counted as present.
        The wait is long enough for a rank that began a step just before another one came here.
        After a loss it is longer by the time since the loss. TCP may wait as long as the network
        was away before it tries again.

        Raises:
            PeerLost: some ranks, or the store, did not come in time; it names them.
        """
        now = time.monotonic()
        limit_s = 2 * (timeout_s + GRACE_S)
        if self._lost_at is not None:
            limit_s += min(now - self._lost_at + timeout_s, _MAX_RETRY_S)
        while self._store.has(self._key("decided")):
            self._generation += 1
        came: set[int] = set()
        own = json.dumps(record or {})
        while not self._met(now + limit_s, limit_s, came, own):
            self._generation += 1
        texts = self._texts("anew")  # where the store is silent all at once, it changes nothing
        self._store.set(f"waits/{self._rank}", "")
        self._generation += 1
        self._lost_at = None
        return [json.loads(text or own) for text in texts]

    def _met(self, deadline: float, limit_s: float, came: set[int], record: str) -> bool:
        """Wait for all ranks in this attempt; return False if one of them has given up.

        Args:
            came: gets the ranks that were here.
            record: of this rank, as JSON.

        Raises:
            PeerLost: this rank gives up.
        """
        keys, decided = self._keys("anew"), self._key("decided")
        silent = PeerLost(
            f"reset: {self._store} did not answer within {limit_s:.0f} s. If the network is "
            "back, call reset() on every rank again, because TCP may need as long as it was "
            "away; else restart the job",
            self._keepers(),
        )
        if not self._store.set(keys[self._rank], record, limit_s):
            raise silent
        missing, late = [], False
        while not self._store.has(*keys):
            time.sleep(0.02)
            late = time.monotonic() > deadline
            if late or self._store.has(decided):
                missing = [rank for rank, key in enumerate(keys) if not self._store.has(key)]
                came.update({*range(self._world_size)} - {*missing})
                if late and self._rank in missing:  # which has written
                    raise silent
                break
        own = _GIVEN_UP if missing else _MET
        decision = self._store.first(decided, own) or own  # a store that is silent changes nothing
        if late and missing and decision != _MET:
            missing = [rank for rank in missing if rank not in came] or missing
            raise PeerLost(
                f"reset: {names(missing)} did not come within {limit_s:.0f} s; call reset() on "
                "every rank again, or restart the job without the lost ones",
                missing,
            )
        return decision == _MET

    def _require_one_sampler(self, silent: Sequence[int]) -> None:
        """Raise if ranks that do not answer wait in another sampler."""
        texts = self._store.texts([f"waits/{rank}" for rank in range(self._world_size)])
        waits = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
        since = time.time() - _RECENT_S
        samplers = {rank: wait["sampler"] for rank, wait in waits.items() if wait["at"] > since}
        if any(samplers.get(rank, self.number) != self.number for rank in silent):
            listed = ", ".join(
                f"rank {rank} in sampler {samplers[rank]}" for rank in sorted(samplers)
            )
            raise RankMismatch(
                f"sampler: {SAME_SAMPLER}; {listed} waited for the others; call reset() of both on "
                "every rank"
            )

    def _store_lost(self, step: int | None) -> PeerLost:
        """Return the error for a store that is gone, or that has not what this rank wrote."""
        return PeerLost(
            f"{self._call}: failed, and {self._store} does not answer either. If all ranks live "
            f"and the network is back, {self.way_out}. Else the process that holds the store, "
            "usually rank 0, is lost; restart the job",
            self._keepers(),
            step,
        )

    def _keepers(self) -> tuple[int, ...]:
        """Return the rank that usually holds the store; none if it is this rank."""
        return (0,) if self._rank else ()

    def _answer(self, step: int | None, unheard: Sequence[int] = ()) -> None:
        answer = json.dumps({"step": step, "unheard": unheard})
        self._store.set(self._key("here", self._rank), answer)

    def _texts(self, name: str) -> list[str | None]:
        """Return what every rank has written under a name, in rank order."""
        return self._store.texts(self._keys(name))

    def _keys(self, name: str) -> list[str]:
        """Return what every rank writes under for a name, in rank order."""
        return [self._key(name, rank) for rank in range(self._world_size)]

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"{self.number}/{self._generation}/{name}" + ("" if rank is None else f"/{rank}")
