"""Stories of random steps: rows with unlike requests together, in a batch that changes.

A story keeps its own list of each row's request and tokens, and applies each change to that list
and to the batch. It judges each step by `tests.support.oracle`. A seed makes the same story on
every rank.

    story = Story(random.Random(seed), head, ranks)
    story.run(20)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.changing_batch import ChangingBatch
from tests.fuzz.heads import EveryRank, ModelHead, OneRank
from tests.fuzz.judge import Judge, Tally
from tests.fuzz.requests import THEMES, Theme, surroundings
from tests.support import oracle
from tests.support.oracle import Context
from tests.support.rows import Row
from tpsample import reference

POSITIONS = (0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 9)
EARLIER = 12
"""Outputs that are looked at again at the end of a story."""


class Story:
    """Steps of random rows, with changes of their batch between them.

    Args:
        judged: whether a step of this number is compared here; ranks take turns.

    Attributes:
        taken: rows that the ranks have sampled together.
    """

    def __init__(
        self,
        pick: random.Random,
        head: ModelHead,
        ranks: OneRank | EveryRank,
        theme: Theme = THEMES["mixed"],
        *,
        max_rows: int,
        name: str = "",
        judged: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.pick, self.head, self.ranks, self.theme = pick, head, ranks, theme
        self.judge, self.judged, self.taken = Judge(name, head.size), judged, 0
        self.note = self.judge.log.append
        self.earlier: list[tuple[Any, Any]] = []
        self.its = ChangingBatch(pick, head.size, theme, max_rows=max_rows, note=self.note)

    def run(self, steps: int) -> Tally:
        """So many steps with changes between them."""
        judge = self.judge
        try:
            for _ in range(steps):
                self._turn()
        except Exception as error:
            so_far = "; ".join(judge.log)
            raise AssertionError(f"{judge.name}, step {judge.number}: {so_far}") from error
        for output, before in self.earlier:
            if not _same(output, before):
                judge.wrong(None, f"an earlier {type(output).__name__} changed")
        return judge.tally

    def _turn(self) -> None:
        for _ in range(self.pick.choice(self.theme.changes)):
            self.its.change()
        (self._verify if self.pick.random() < self.theme.verified else self._sample)()
        self.judge.number += 1

    def _sample(self) -> None:
        if self.its.rows and self.pick.random() < 0.3:
            self._sample_slots()
        else:
            self._sample_rows(self.its.rows, self.its.batch)

    def _sample_slots(self) -> None:
        """A step of some slots, which are those of the rows; changes come after `select`, too."""
        rows, undrawn, selection = self.its.select()
        if self.pick.random() < 0.4:
            self.note("a change after select")
            self.its.change_rows()
            self._refused(selection, "call batch.select again")
            if self.its.empty is not None:
                self._refused(self.its.batch, "by batch.select, or drop these")
            if not self.its.rows:
                return
            rows, undrawn, selection = self.its.select()
        self.its.assign_masks()
        if self.pick.random() < 0.5:
            self._sample_rows(rows, selection, undrawn)
        else:
            self.note("slots that the host does not read, or was told of, as on a GPU")
            with patch("tpsample.core.tensors.READ_ON", ()):
                self._sample_rows(rows, selection, undrawn)
        self.its.fill()

    def _refused(self, rows: Any, way_out: str) -> None:
        """A step of these rows is refused on every rank, with this advice at the end."""
        told = "taken"
        try:
            self.ranks.sample(self.head.hidden_states(self.pick, rows.rows), rows, 0)
        except ValueError as error:
            told = str(error)
        if not told.endswith(way_out):
            self.judge.wrong(None, f"rows that changed, without {way_out}: {told}")

    def _sample_rows(self, rows: list[Row], batch: Any, undrawn: Sequence[str] = ()) -> None:
        """A step of `rows`, and of others behind them that are not drawn."""
        drawn = len(rows)
        count = drawn + len(undrawn)
        hidden_states = self.head.hidden_states(self.pick, count)
        positions, given = self._positions(count)
        samples, also_reference = self.pick.choice(self.theme.samples), self.pick.random() < 0.2
        step = partial(self.ranks.sample, hidden_states, batch, given, num_samples=samples)
        outs = self._taken(f"sample {count} rows × {samples}", rows, step)
        if self.judged(self.judge.number) and count:
            raw = self.head.raw(hidden_states)
            answers = self.judge.answers(rows, raw[:drawn], positions[:drawn], samples or 1)
            if also_reference:
                logits = torch.from_numpy(np.stack(raw))
                found = reference.sample(logits, batch, given, num_samples=samples)
                self.judge.sampled(rows, self.judge.drawn(found, undrawn), answers)
            for out in outs:
                self.judge.sampled(rows, self.judge.drawn(out, undrawn), answers)
        self.its.append(rows, outs[0].token_ids, batch)

    def _verify(self) -> None:
        its, num_drafts = self.its, self.pick.choice(self.theme.drafts)
        method = self.pick.choice([*["coupled"] * 3, "rejection", "block"])
        count, width = len(its.rows), num_drafts + 1
        hidden_states = self.head.hidden_states(self.pick, count, width)
        positions, given = self._positions(count)
        its.draw_seeds()
        masks = [(row.grammar, row.forced) for row in its.rows for _ in range(width)]
        masked = num_drafts > 0 and (
            any(mask != (None, -1) for mask in masks)
            or its.batch.grammar_bitmask is not None
            or its.batch.forced_token_ids is not None
        )
        if masked:
            masks = its.masks_of_positions(width)
        raw = self.head.raw(hidden_states)
        by_row = []
        for r, row in enumerate(its.rows):
            here = slice(r * width, (r + 1) * width)
            so_far = (tuple(row.prompt), tuple(row.output))
            contexts = [Context(*so_far, *mask) for mask in masks[here]]
            drafts = self._drafts(row, raw[here], contexts, positions[r])
            by_row.append((raw[here], drafts, contexts))
        drafted = torch.tensor([drafts for _, drafts, _ in by_row]).long().view(count, num_drafts)
        step = partial(self.ranks.verify, hidden_states, drafted, its.batch, given, method=method)
        outs = self._taken(f"verify {count} rows, {num_drafts} drafts", its.rows, step)
        for out in outs if self.judged(self.judge.number) else ():
            for r, (row, of_row) in enumerate(zip(its.rows, by_row, strict=True)):
                self.judge.tally.rows += 1
                if method == "coupled" or row.request.greedy:
                    self.judge.verified(row, r, out, *of_row, positions[r])
                else:
                    self.judge.by_ratio(row, r, out, *of_row, method)
        if masked:
            its.clear_masks()
        its.append(its.rows, outs[0].token_ids, its.batch)

    def _taken(self, what: str, rows: list[Row], step: Callable[[], list[Any]]) -> list[Any]:
        """Take a step. After a change of rows the masks are those of the same rows still, or the
        step is refused until they are assigned anew: never another row's."""
        its = self.its
        if its.moved and self.pick.random() < 0.5:
            its.assign_masks()
        with surroundings(self.pick) as around:
            self.note(f"{what} in {around}")
            try:
                outs = step()
            except ValueError as refused:
                if not (its.moved and "assign it anew" in str(refused)):
                    raise
                its.assign_masks()
                outs = step()
        for out in outs:
            self.earlier = [*self.earlier, (out, _copy(out))][-EARLIER:]
            self.judge.seeds(rows, out.seeds[: len(rows)])
        self.taken += len(rows)
        return outs

    def _drafts(
        self, row: Row, raw: list[np.ndarray], contexts: list[Context], position: int
    ) -> list[int]:
        """Return the tokens of plain decoding, up to a position; then other ids, -1, or no ids."""
        good, drafts = self.pick.randint(0, len(raw) - 1), list[int]()
        for i in range(len(raw) - 1):
            guess = self.pick.choice([self.pick.randrange(self.head.size), -1, self.head.size])
            if i < good:
                how = {"seed": row.seed or 0, "position": position + i}
                guess = oracle.draw(raw[i], row.request, contexts[i].after(drafts), **how).token
            drafts.append(guess)
        return drafts

    def _positions(self, count: int) -> tuple[list[int], Tensor | int]:
        if self.pick.random() < 0.2:
            one = self.pick.choice(POSITIONS)
            return [one] * count, one
        found = [
            self.pick.choice(POSITIONS) if self.pick.random() < 0.2 else self.pick.getrandbits(20)
            for _ in range(count)
        ]
        tensor = torch.tensor(found, dtype=torch.int64)
        if self.pick.random() < 0.3:
            tensor = torch.stack([tensor, tensor], dim=1)[:, 0]  # strided
        return found, tensor


def _copy(out: Any) -> Any:
    """The tensors of an output, and of what is in it, as they are now."""
    if isinstance(out, Tensor):
        return out.clone()
    if is_dataclass(out):
        return {each.name: _copy(getattr(out, each.name)) for each in fields(out)}
    return out


def _same(out: Any, before: Any) -> bool:
    if isinstance(out, Tensor):
        return torch.equal(out.nan_to_num(), before.nan_to_num())
    if isinstance(before, dict):
        return all(_same(getattr(out, name), value) for name, value in before.items())
    return out == before
