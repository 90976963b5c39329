"""A random batch that changes: its rows come, go, move and change, and so does a list of them."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.requests import Theme, random_row, surroundings
from tests.support import oracle
from tests.support.rows import Row, forced_tensor, grammar_tensor, so_far_of
from tpsample import SamplingBatch, VocabShard

KEPT_CAP = 40
"""Most tokens of a kept set that is listed."""


class ChangingBatch:
    """A batch, and the rows that it should have.

    Args:
        size: V.
        note: takes a line on each thing that is done.

    Attributes:
        moved: whether rows changed since masks were assigned.
        empty: the row whose slot was left and not yet filled again.
    """

    def __init__(
        self,
        pick: random.Random,
        size: int,
        theme: Theme,
        *,
        max_rows: int,
        note: Callable[[str], None],
    ) -> None:
        self.pick, self.size, self.theme, self.note = pick, size, theme, note
        self.max_rows, self.moved = min(max_rows, theme.most_rows), False
        self.empty: int | None = None
        self.rows = [self._row() for _ in range(pick.randint(1, self.max_rows))]
        with surroundings(pick) as around:
            self.note(f"{len(self.rows)} rows, built in {around}")
            so_far = so_far_of(self.rows)
            self.batch = SamplingBatch.from_params(
                [row.params for row in self.rows],
                vocab_size=size,
                device="cpu",
                max_rows=self.max_rows,
                fixed_rounds=pick.random() < 0.4,
                kept_cap=pick.choice((None, None, None, KEPT_CAP)),
                **so_far,
            )
            for output in so_far["output_token_ids"]:  # the batch has taken what it was given
                output.append(0)

    def change(self) -> None:
        """Change something that can be changed now."""
        change = self.pick.choice(self._changes())
        with surroundings(self.pick) as around:
            self.note(f"{change.__name__} in {around}")
            change()

    def change_rows(self) -> None:
        """Change rows, so that a selection of them is refused. `fill` has to be called later."""
        ways = [self._permute, self._refill, self._free, self._free, self._update, self._drop]
        self.pick.choice(ways)()

    def _changes(self) -> list[Callable[[], None]]:
        """Those that are possible now."""
        found = [self._set_grammar, self._set_forced, self._permute, self._copy]
        found += [self.clear_masks, self._arrange]
        if self.rows:
            found += [self._drop, self._update, self._update, self._write, self._refill]
        if len(self.rows) < self.max_rows:
            found += [self._add, self._add]
        if self.pick.random() < 0.1:
            found += [self._drop_all]
        return found

    def _row(self) -> Row:
        return random_row(self.pick, self.size, self.theme)

    def _add(self) -> None:
        self.moved = True
        row = self._row()
        self.rows.append(row)
        assert self.batch.add(row.params, **row.so_far) == len(self.rows) - 1

    def _drop(self) -> None:
        self.moved = True
        gone = set(self.pick.sample(range(len(self.rows)), self.pick.randint(1, len(self.rows))))
        if len(gone) > 3:
            gone = {gone.pop()}
        self.rows = [row for i, row in enumerate(self.rows) if i not in gone]
        self.batch.drop(gone.pop() if len(gone) == 1 else sorted(gone))

    def _drop_all(self) -> None:
        self.moved = True
        self.batch.drop(range(len(self.rows)))
        self.rows = []

    def _permute(self) -> None:
        self.moved = True
        order = self.pick.sample(range(len(self.rows)), len(self.rows))
        self.rows = [self.rows[i] for i in order]
        self.batch.permute(order)

    def _arrange(self) -> None:
        """Rows leave, join and move in one pass."""
        self.moved = True
        joining = [self._row() for _ in range(self.pick.randint(0, min(4, self.max_rows)))]
        most, there = self.max_rows - len(joining), range(len(self.rows))
        stay = self.pick.sample(there, self.pick.randint(0, min(len(there), most)))
        order = [*stay, *range(len(there), len(there) + len(joining))]
        self.pick.shuffle(order)
        self.rows = [[*self.rows, *joining][i] for i in order]
        self.batch.arrange(order, [row.params for row in joining], **so_far_of(joining))

    def _copy(self) -> None:
        """Go on with a copy, and make steps of the old batch refuse or draw something else."""
        old = self.batch
        ways = [copy.deepcopy, copy.copy, lambda batch: pickle.loads(pickle.dumps(batch))]
        with torch.inference_mode(False):
            self.batch = self.pick.choice(ways)(old)
            old.temperature.fill_(7.0)
            old.seed.fill_(1)
            old.drop(range(len(self.rows)))

    def _replace(self, at: int, same: tuple[str, ...]) -> Row:
        """Return a new request for a row, which keeps some of what the old one had."""
        self.moved = True
        old, new = self.rows[at], self._row()
        for name in same:
            setattr(new, name, getattr(old, name))
        self.rows[at] = new
        return new

    def _refill(self) -> None:
        """A request leaves its slot, and another takes it."""
        self._free()
        self.fill()

    def _free(self) -> None:
        self.moved, self.empty = True, self.pick.randrange(len(self.rows))
        self.batch.free(self.empty)

    def fill(self) -> None:
        """Let another request take the slot that one has left, if there is such a slot."""
        if self.empty is None:
            return
        at, self.empty = self.empty, None
        new = self._replace(at, ("grammar", "forced"))
        self.batch.put(at, new.params, **{name: [ids] for name, ids in new.so_far.items()})

    def _update(self) -> None:
        at = self.pick.randrange(len(self.rows))
        new = self._replace(at, ("grammar", "forced", "prompt", "output"))
        self.batch.update(at, new.params, **new.so_far)

    def _write(self) -> None:
        """Temperatures and seeds may be written between steps."""
        row = self.pick.randrange(len(self.rows))
        self.rows[row].temperature = self.pick.choice(self.theme.written)
        self.batch.temperature[row] = self.rows[row].temperature
        if self.rows[row].seed is not None:
            seed = self.pick.randrange(2**63)
            self.rows[row].seed = self.batch.seed[row] = seed

    def _set_grammar(self) -> None:
        for row in self.rows:
            row.grammar = self._grammar(row) if self.pick.random() < 0.6 else None
        found = grammar_tensor([row.grammar for row in self.rows], self.size)
        self._set("grammar_bitmask", found)

    def _set_forced(self) -> None:
        for row in self.rows:
            row.forced = self._forced()
        self._set("forced_token_ids", forced_tensor([row.forced for row in self.rows]))

    def _set(self, name: str, found: Tensor) -> None:
        """In place where there is one, sometimes."""
        written = getattr(self.batch, name)
        if written is not None and written.shape == found.shape and self.pick.random() < 0.5:
            written.copy_(found)
        else:
            setattr(self.batch, name, found)

    def _grammar(self, row: Row) -> tuple[int, ...]:
        size = self.size
        ids: Sequence[int] = range(size)
        if row.fields.get("stop_token_ids") and self.pick.random() < 0.3:
            ids = row.fields["stop_token_ids"]  # the structure is complete
        else:
            ids = self.pick.sample(ids, self.pick.choice([size, 1, 0, max(1, size // 2)]))
        return oracle.bits(ids, size)

    def _forced(self) -> int:
        size = self.size
        return self.pick.choice([-1, -1, -1, self.pick.randrange(size), 0, size, 2**40, -2])

    def select(self) -> tuple[list[Row], list[str], Any]:
        """Return some rows in any order, the statuses of rows behind them that are not drawn, and
        the selection of all."""
        there = [slot for slot in range(len(self.rows)) if slot != self.empty]
        chosen = self.pick.sample(there, self.pick.randint(min(1, len(there)), len(there)))
        wrong = [*chosen[:1], self.max_rows, -7, *([] if self.empty is None else [self.empty])]
        other = [self.pick.choice([-1, *wrong]) for _ in range(self.pick.choice([0, 0, 1, 4]))]
        dtype = self.pick.choice([torch.int32, torch.int64])
        host = self.pick.choice([None, chosen + other])
        selection = self.batch.select(torch.tensor(chosen + other, dtype=dtype), host=host)
        undrawn = ["OK" if slot == -1 else "BAD_SLOT" for slot in other]
        return [self.rows[i] for i in chosen], undrawn, selection

    def assign_masks(self) -> None:
        self.moved = False
        if self.batch.grammar_bitmask is not None:
            grammars = [row.grammar for row in self.rows]
            self.batch.grammar_bitmask = grammar_tensor(grammars, self.size)
        if self.batch.forced_token_ids is not None:
            self.batch.forced_token_ids = forced_tensor([row.forced for row in self.rows])

    def masks_of_positions(self, width: int) -> list[tuple[tuple[int, ...] | None, int]]:
        """Masks of every position, set in the batch; some taken away."""
        rows = [row for row in self.rows for _ in range(width)]
        grammars = [self._grammar(row) if self.pick.random() < 0.3 else None for row in rows]
        forced = [self._forced() if self.pick.random() < 0.2 else -1 for _ in rows]
        self.batch.grammar_bitmask = self.batch.forced_token_ids = None
        self.moved = False
        if self.pick.random() < 0.7:
            self.batch.grammar_bitmask = grammar_tensor(grammars, self.size)
        else:
            grammars = [None] * len(rows)
        if self.pick.random() < 0.7:
            self.batch.forced_token_ids = forced_tensor(forced)
        else:
            forced = [-1] * len(rows)
        return list(zip(grammars, forced, strict=True))

    def draw_seeds(self) -> None:
        """Drafts can only be guessed for rows whose seed is known."""
        for r, row in enumerate(self.rows):
            if row.seed is None:
                row.seed = self.pick.getrandbits(64)
                row.fields = row.fields | {"seed": row.seed}
                row.temperature = row.fields.get("temperature", 1.0)
                self.moved = True
                self.batch.update(r, row.params, **row.so_far)

    def clear_masks(self) -> None:
        for row in self.rows:
            row.grammar, row.forced = None, -1
        self.batch.grammar_bitmask = self.batch.forced_token_ids = None

    def append(self, rows: list[Row], token_ids: Tensor, batch: Any) -> None:
        """Tell the batch its tokens, or others; rows may be left out by -1. Behind `rows` there may
        be others that were not drawn, whose tokens are none."""
        count = len(token_ids)
        if self.pick.random() < 0.3 and count:
            size, columns = self.size, self.pick.choice([1, 2])
            ids = [
                self.pick.choice([-1, self.pick.randrange(size)]) for _ in range(count * columns)
            ]
            token_ids = torch.tensor(ids, dtype=torch.int64).view(count, columns)
        self.batch.prepare(VocabShard(0, self.size))  # the reference comes later
        with surroundings(self.pick) as around:
            self.note(f"append {list(token_ids.shape)} in {around}")
            # Three columns may be the samples of a step, which are no text: here they become one.
            for part in token_ids.unbind(1) if token_ids.shape[1:] == (3,) else [token_ids]:
                batch.append(part)
        by_row = token_ids.unsqueeze(1) if token_ids.ndim == 1 else token_ids
        for row, drawn in zip(rows, by_row.tolist(), strict=False):
            row.output = row.output + [v for v in drawn if v >= 0]
