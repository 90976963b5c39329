"""Stories of random steps: rows that take different ways together, in a batch that changes.

A story keeps its own list of what every row asks for and has been told, applies each change to that
list and to the batch, and judges each step by `tests.support.oracle`. It is the same on every rank
for the same seed.

    story = Story(random.Random(seed), shards, sampler_of)
    story.run(20)
    story.tally
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support import oracle
from tests.support.oracle import Answer, Context, Request, Verified
from tests.support.random_batches import (
    POSITIONS,
    THEMES,
    ModelHead,
    OneRank,
    Row,
    Tally,
    Theme,
    VirtualRanks,
    request,
    surroundings,
    take_head,
    tokens_so_far,
)
from tpsample import (
    RankMismatch,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    reference,
)
from tpsample.speculative.output import VerifyOutput

ORDERS = ("sequential", "joint", "min_p_last")
EARLIER = 12
"""Outputs that are looked at again at the end of a story."""


class Story:
    """A batch whose rows come, go, move and change between steps.

    Args:
        judge: whether a step of this number is compared here; ranks take turns.

    Attributes:
        taken: rows that the ranks have sampled together.
    """

    def __init__(
        self,
        pick: random.Random,
        head: ModelHead,
        ranks: OneRank | VirtualRanks,
        theme: Theme = THEMES["mixed"],
        *,
        max_rows: int,
        rounds: int = 10,
        name: str = "",
        judge: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.pick, self.head, self.ranks, self.theme = pick, head, ranks, theme
        self.max_rows = max_rows = min(max_rows, theme.most_rows)
        self.rounds, self.name, self.judge = rounds, name, judge
        self.tally, self.number, self.taken = Tally(), 0, 0
        self.moved = False
        self.log: deque[str] = deque(maxlen=8)
        self.earlier: list[tuple[Any, Any]] = []
        self.rows = [self._row() for _ in range(pick.randint(1, max_rows))]
        self.kept_cap = pick.choice([None, None, None, 1, 8, 1000])
        with surroundings(pick) as around:
            self.log.append(f"{len(self.rows)} rows, built in {around or 'nothing'}")
            outputs = [list(row.output) for row in self.rows]
            self.batch = SamplingBatch.from_params(
                [row.params for row in self.rows],
                vocab_size=head.size,
                prompt_token_ids=[list(row.prompt) for row in self.rows],
                output_token_ids=outputs,
                max_rows=max_rows,
                kept_cap=self.kept_cap,
                fixed_rounds=self.kept_cap is None and pick.random() < 0.4,
            )
            for output in outputs:  # the batch has taken what it was given
                output.append(0)

    def run(self, steps: int) -> Tally:
        """So many steps with changes between them."""
        try:
            for _ in range(steps):
                self._turn()
        except Exception as error:
            so_far = "; ".join(self.log)
            raise AssertionError(f"{self.name}, step {self.number}: {so_far}") from error
        for output, before in self.earlier:
            if not _same(output, before):
                self.tally.differ(f"{self.name}: an earlier {type(output).__name__} changed")
        return self.tally

    def _turn(self) -> None:
        for _ in range(self.pick.choice(self.theme.changes)):
            change = self.pick.choice(self._changes())
            with surroundings(self.pick) as around:
                self._note(f"{change.__name__} in {around or 'nothing'}")
                change()
        (self._verify if self.pick.random() < self.theme.verified else self._sample)()

    # changes

    def _changes(self) -> list[Callable[[], None]]:
        """Those that are possible now."""
        found = [self._set_grammar, self._clear_grammar, self._set_forced, self._clear_forced]
        found += [self._permute, self._copy, self._other_weight]
        if self.rows:
            found += [self._drop, self._update, self._update, self._write, self._refill]
        if len(self.rows) < self.max_rows:
            found += [self._add, self._add]
        if self.pick.random() < 0.1:
            found += [self._drop_all]
        return found

    def _row(self) -> Row:
        fields = request(self.pick, self.head.size, self.theme)
        prompt, output = (tokens_so_far(self.pick, self.head.size, prompt=p) for p in (True, False))
        temperature = fields.get("temperature", 1.0)
        return Row(fields, fields["seed"], prompt, output, temperature)

    def _add(self) -> None:
        self.moved = True
        row = self._row()
        self.rows.append(row)
        so_far = {"prompt_token_ids": row.prompt, "output_token_ids": list(row.output)}
        assert self.batch.add(row.params, **so_far) == len(self.rows) - 1

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

    def _copy(self) -> None:
        """Go on with a copy, and make steps of the old batch refuse or draw something else."""
        old = self.batch
        ways = [copy.deepcopy, copy.copy, lambda batch: pickle.loads(pickle.dumps(batch))]
        with torch.inference_mode(False):
            self.batch = self.pick.choice(ways)(old)
            old.temperature.fill_(7.0)
            old.seed.fill_(1)
            old.drop(range(len(self.rows)))

    def _other_weight(self) -> None:
        self.head = self.head.other(self.pick)
        with torch.inference_mode(False):
            take_head(self.ranks, self.pick, self.head)

    def _refill(self) -> None:
        """A request leaves its slot, and another takes it."""
        self.moved = True
        at = self.pick.randrange(len(self.rows))
        old, new = self.rows[at], self._row()
        self.rows[at] = new
        new.grammar, new.forced = old.grammar, old.forced
        self.batch.free(at)
        so_far = {"prompt_token_ids": [new.prompt], "output_token_ids": [list(new.output)]}
        self.batch.put(at, new.params, **so_far)

    def _update(self) -> None:
        self.moved = True
        at = self.pick.randrange(len(self.rows))
        old, new = self.rows[at], self._row()
        new.output, new.prompt = old.output, old.prompt
        new.grammar, new.forced = old.grammar, old.forced
        self.rows[at] = new
        so_far = {"prompt_token_ids": new.prompt, "output_token_ids": list(new.output)}
        self.batch.update(at, new.params, **so_far)

    def _write(self) -> None:
        """Temperatures and seeds may be written between steps."""
        row = self.pick.randrange(len(self.rows))
        self.rows[row].temperature = self.pick.choice([0.0, 0.7, 1.0, 20.0])
        self.batch.temperature[row] = self.rows[row].temperature
        if self.rows[row].seed is not None:
            seed = self.pick.randrange(2**63)
            self.rows[row].seed = self.batch.seed[row] = seed

    def _set_grammar(self) -> None:
        """In place where there is one, sometimes."""
        for row in self.rows:
            row.grammar = self._grammar(row) if self.pick.random() < 0.6 else None
        found = _grammar_tensor([row.grammar for row in self.rows], self.head.size)
        written = self.batch.grammar_bitmask
        if written is not None and written.shape == found.shape and self.pick.random() < 0.5:
            written.copy_(found)
        else:
            self.batch.grammar_bitmask = found

    def _clear_grammar(self) -> None:
        for row in self.rows:
            row.grammar = None
        self.batch.grammar_bitmask = None

    def _set_forced(self) -> None:
        for row in self.rows:
            row.forced = self._forced()
        found = _forced_tensor([row.forced for row in self.rows])
        written = self.batch.forced_token_ids
        if written is not None and written.shape == found.shape and self.pick.random() < 0.5:
            written.copy_(found)
        else:
            self.batch.forced_token_ids = found

    def _clear_forced(self) -> None:
        for row in self.rows:
            row.forced = -1
        self.batch.forced_token_ids = None

    def _grammar(self, row: Row) -> tuple[int, ...]:
        size = self.head.size
        ids: Sequence[int] = range(size)
        if row.fields.get("stop_token_ids") and self.pick.random() < 0.3:
            ids = row.fields["stop_token_ids"]  # the structure is complete
        else:
            ids = self.pick.sample(ids, self.pick.choice([size, 1, 0, max(1, size // 2)]))
        return oracle.bits(ids, size)

    def _forced(self) -> int:
        size = self.head.size
        return self.pick.choice([-1, -1, -1, self.pick.randrange(size), 0, size, 2**40])

    # steps

    def _sample(self) -> None:
        if self.kept_cap is None and self.rows and self.pick.random() < 0.3:
            self._sample_slots()
        else:
            self._sample_rows(self.batch)

    def _sample_slots(self) -> None:
        """A step of some slots, which are those of the rows; changes come after `select`, too."""
        rows = self._selected()
        if self.pick.random() < 0.4:
            self._note("a change after select")
            self.pick.choice([self._permute, self._refill, self._update, self._drop])()
            refused = self._refused(rows)
            if refused != "call batch.select again":
                self._wrong(-1, f"a selection of rows that changed: {refused}")
            if not self.rows:
                return
            rows = self._selected()
        self._assign_masks()
        whole, self.rows = self.rows, [self.rows[i] for i in self.chosen]
        self._sample_rows(rows)
        self.rows = whole

    def _selected(self) -> Any:
        count = len(self.rows)
        self.chosen = self.pick.sample(range(count), self.pick.randint(1, count))
        dtype = self.pick.choice([torch.int32, torch.int64])
        return self.batch.select(torch.tensor(self.chosen, dtype=dtype))

    def _refused(self, rows: Any) -> str:
        try:
            self.ranks.sample(self.head.hidden_states(self.pick, rows.rows), rows, 0)
        except ValueError as error:
            return str(error)[-len("call batch.select again") :]
        return "taken"

    def _sample_rows(self, batch: Any) -> None:
        count = len(self.rows)
        hidden_states = self.head.hidden_states(self.pick, count)
        positions, given = self._positions()
        samples, also_reference = self.pick.choice([None] * 4 + [1, 3]), self.pick.random() < 0.2
        with surroundings(self.pick) as around:
            self._note(f"sample {count} rows × {samples} in {around or 'nothing'}")
            step = partial(self.ranks.sample, hidden_states, batch, given)
            outs = self._taken(partial(step, num_samples=samples))
        for out in outs:
            self._remember(out)
            self._learn_seeds(out.seeds)
        if self.judge(self.number) and count:
            raw = self.head.raw(hidden_states)
            answers = [self._answers(r, raw[r], positions[r], samples or 1) for r in range(count)]
            for out in outs:
                self._judge(out, answers)
                self._judge_kept(out, answers)
            if also_reference:
                logits = torch.from_numpy(np.stack(raw))
                how = {"num_samples": samples, "philox_rounds": self.rounds}
                self._judge(reference.sample(logits, batch, given, **how), answers)
        self._append(outs[0].token_ids, batch)
        self.number, self.taken = self.number + 1, self.taken + count

    def _verify(self) -> None:
        count, num_drafts = len(self.rows), self.pick.choice(self.theme.drafts)
        method = self.pick.choice([*["coupled"] * 3, "rejection", "block"])
        hidden_states = self.head.hidden_states(self.pick, count, num_drafts + 1)
        positions, given = self._positions()
        self._draw_seeds()
        width = num_drafts + 1
        own = [(row.grammar, row.forced) for row in self.rows]
        masked = num_drafts > 0 and any(mask != (None, -1) for mask in own)
        if num_drafts > 0:
            masked |= self.batch.grammar_bitmask is not None
            masked |= self.batch.forced_token_ids is not None
        masks = [(row.grammar, row.forced) for row in self.rows for _ in range(width)]
        if masked:
            masks = self._masks_of_positions(width)
        contexts = [
            Context(tuple(row.prompt), tuple(row.output), *masks[r * width + i])
            for r, row in enumerate(self.rows)
            for i in range(width)
        ]
        raw = self.head.raw(hidden_states)
        drafts = self._drafts(raw, contexts, positions, num_drafts)
        with surroundings(self.pick) as around:
            self._note(f"verify {count} rows, {num_drafts} drafts, in {around or 'nothing'}")
            tensor = torch.tensor(drafts, dtype=torch.int64).view(count, num_drafts)
            step = partial(self.ranks.verify, hidden_states, tensor, self.batch, given)
            outs = self._taken(partial(step, method=method))
        for out in outs:
            self._remember(out)
            self._learn_seeds(out.seeds)
        if self.judge(self.number) and count:
            found = [
                self._expected(r, raw, drafts[r], contexts, positions[r]) for r in range(count)
            ]
            for out in outs:
                for r, expected in enumerate(found):
                    self.tally.rows += 1
                    if method == "coupled" or self.rows[r].request.greedy:
                        self._judge_verified(r, out, expected, width)
                    else:
                        self._judge_by_ratio(r, out, raw, drafts[r], contexts, method)
        if masked:
            self._clear_grammar()
            self._clear_forced()
        self._append(outs[0].token_ids, self.batch)
        self.number, self.taken = self.number + 1, self.taken + count

    def _taken(self, step: Callable[[], list[Any]]) -> list[Any]:
        """Take a step. After a change of rows the masks are those of the same rows still,
        or the step is refused until they are assigned anew: never another row's."""
        if self.moved and self.pick.random() < 0.5:
            self._assign_masks()
        try:
            return step()
        except ValueError as refused:
            if not (self.moved and "assign it anew" in str(refused)):
                raise
        self._assign_masks()
        return step()

    def _assign_masks(self) -> None:
        self.moved = False
        if self.batch.grammar_bitmask is not None:
            grammars = [row.grammar for row in self.rows]
            self.batch.grammar_bitmask = _grammar_tensor(grammars, self.head.size)
        if self.batch.forced_token_ids is not None:
            self.batch.forced_token_ids = _forced_tensor([row.forced for row in self.rows])

    def _masks_of_positions(self, width: int) -> list[tuple[tuple[int, ...] | None, int]]:
        """Masks of every position, set in the batch; some taken away."""
        rows = [row for row in self.rows for _ in range(width)]
        grammars = [self._grammar(row) if self.pick.random() < 0.3 else None for row in rows]
        forced = [self._forced() if self.pick.random() < 0.2 else -1 for _ in rows]
        self.batch.grammar_bitmask = self.batch.forced_token_ids = None
        self.moved = False
        if self.pick.random() < 0.7:
            self.batch.grammar_bitmask = _grammar_tensor(grammars, self.head.size)
        else:
            grammars = [None] * len(rows)
        if self.pick.random() < 0.7:
            self.batch.forced_token_ids = _forced_tensor(forced)
        else:
            forced = [-1] * len(rows)
        return list(zip(grammars, forced, strict=True))

    def _drafts(
        self,
        raw: list[np.ndarray],
        contexts: list[Context],
        positions: list[int],
        num_drafts: int,
    ) -> list[list[int]]:
        """Return what plain decoding draws, up to a position; then other ids, -1, or no ids."""
        found = []
        for r, row in enumerate(self.rows):
            good = self.pick.randint(0, num_drafts)
            drafts: list[int] = []
            for i in range(num_drafts):
                guess = self.pick.choice([self.pick.randrange(self.head.size), -1, self.head.size])
                if i < good:
                    at = r * (num_drafts + 1) + i
                    how = {"seed": row.seed or 0, "position": positions[r] + i}
                    so_far = contexts[at].after(drafts)
                    guess = oracle.draw(
                        raw[at], row.request, so_far, rounds=self.rounds, **how
                    ).token
                drafts.append(guess)
            found.append(drafts)
        return found

    def _draw_seeds(self) -> None:
        """Drafts can only be guessed for rows whose seed is known."""
        for r, row in enumerate(self.rows):
            if row.seed is None:
                row.seed = self.pick.getrandbits(64)
                row.fields = row.fields | {"seed": row.seed}
                so_far = {"prompt_token_ids": row.prompt, "output_token_ids": list(row.output)}
                row.temperature = row.fields.get("temperature", 1.0)
                self.moved = True
                self.batch.update(r, row.params, **so_far)

    def _positions(self) -> tuple[list[int], Tensor | int]:
        count = len(self.rows)
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

    def _append(self, token_ids: Tensor, batch: Any) -> None:
        """Tell the batch what was drawn, or something else; rows may be left out by -1."""
        count = len(self.rows)
        if self.pick.random() < 0.3 and count:
            size, columns = self.head.size, self.pick.choice([1, 2])
            ids = [
                self.pick.choice([-1, self.pick.randrange(size)]) for _ in range(count * columns)
            ]
            token_ids = torch.tensor(ids, dtype=torch.int64).view(count, columns)
        self.batch.prepare(VocabShard(0, self.head.size))  # the reference comes later
        with surroundings(self.pick) as around:
            self._note(f"append {list(token_ids.shape)} in {around or 'nothing'}")
            batch.append(token_ids)
        for row, drawn in zip(self.rows, token_ids.tolist(), strict=True):
            drawn = [drawn] if isinstance(drawn, int) else drawn
            row.output = row.output + [v for v in drawn if v >= 0]

    # judging

    def _answers(self, r: int, raw: np.ndarray, position: int, samples: int) -> list[Answer]:
        row = self.rows[r]
        how = {"seed": row.seed or 0, "position": position, "rounds": self.rounds}
        return [oracle.draw(raw, row.request, row.context, sample=s, **how) for s in range(samples)]

    def _judge(self, out: SampleOutput, answers: list[list[Answer]]) -> None:
        tokens = out.token_ids.view(len(answers), -1).tolist()
        if out.token_ids.requires_grad or out.token_ids.dtype != torch.int64:
            self._wrong(-1, f"tokens of {out.token_ids.dtype}")
        for r, (drawn, expected) in enumerate(zip(tokens, answers, strict=True)):
            self.tally.rows += 1
            status = Status(out.status[r].item()).name
            if status != expected[0].status:
                self._wrong(r, f"status {status} for {expected[0].status}")
            elif self._token_differs(drawn, expected):
                self._wrong(r, f"tokens {drawn} for {[a.token for a in expected]}")
            elif out.logprobs is not None:
                self._judge_logprobs(r, out.logprobs, r, expected[0], drawn)

    def _token_differs(self, drawn: list[int], expected: list[Answer]) -> bool:
        pairs = [(t, a) for t, a in zip(drawn, expected, strict=True) if t != a.token]
        if not all(answer.near_tie(token) for token, answer in pairs):
            return True
        self.tally.near_ties += bool(pairs)
        return False

    def _judge_logprobs(self, r: int, told: Any, at: int, answer: Answer, drawn: list[int]) -> None:
        asked = self.rows[r].request
        if asked.logprobs is None and asked.logprob_token_ids is None:
            return
        if answer.status != oracle.OK or not _ordinary(answer, asked):
            return
        report = oracle.report(answer, asked, drawn)
        ids = told.token_ids[at].tolist()
        there = [i for i, v in enumerate(ids) if v >= 0]
        entries = report.entries
        if [ids[i] for i in there] != [v for v, *_ in entries]:
            self._wrong(r, f"logprobs of {[ids[i] for i in there]} for {[e[0] for e in entries]}")
            return
        ranks = told.ranks[at, there].tolist()
        if ranks != [rank for *_, rank in entries]:
            self._wrong(r, f"ranks {ranks} for {[rank for *_, rank in entries]}")
        values = told.values[at, there].numpy()
        wanted = np.array([value for _, value, _ in entries])
        if not np.allclose(values, wanted, rtol=1e-6, atol=1e-5):
            self._wrong(r, f"{asked.logprobs_mode} {values} for {wanted}")
        if not abs(told.entropies[at].item() - report.entropy) < 1e-4:
            self._wrong(r, f"entropy {told.entropies[at].item()} for {report.entropy}")

    def _judge_kept(self, out: SampleOutput, answers: list[list[Answer]]) -> None:
        """Kept sets: of every row with a filter that is on, in order."""
        if self.kept_cap is None:
            return
        told = {} if out.kept is None else {r: i for i, r in enumerate(out.kept.rows.tolist())}
        for r, (answer, *_) in enumerate(answers):
            asked = self.rows[r].request
            on = 0 < asked.top_k < self.head.size or asked.top_p < 1 or asked.min_p > 0
            if r not in told:
                if on and not asked.greedy:
                    self._wrong(r, "no kept set")
                continue
            if asked.greedy or answer.status != oracle.OK:
                continue
            kept, at = out.kept, told[r]
            assert kept is not None
            wanted = [v for v in oracle.order_of(answer.logits).tolist() if answer.kept[v]]
            ids = kept.token_ids[kept.offsets[at] : kept.offsets[at + 1]].tolist()
            over = len(wanted) > self.kept_cap
            if kept.sizes[at] != len(wanted) or bool(kept.overflow[at]) != over:
                self._wrong(r, f"kept {kept.sizes[at]} for {len(wanted)}")
            elif ids != ([] if over else wanted):
                self._wrong(r, f"kept {ids} for {wanted}")

    def _expected(
        self, r: int, raw: list[np.ndarray], drafts: list[int], contexts: list[Context], first: int
    ) -> Verified:
        here = slice(r * (len(drafts) + 1), (r + 1) * (len(drafts) + 1))
        how = {"seed": self.rows[r].seed or 0, "position": first, "rounds": self.rounds}
        return oracle.verify_coupled(raw[here], drafts, self.rows[r].request, contexts[here], **how)

    def _judge_verified(self, r: int, out: VerifyOutput, expected: Verified, width: int) -> None:
        told = [v for v in out.token_ids[r].tolist() if v >= 0]
        wanted = [v for v in expected.tokens if v >= 0]
        status, accepted = Status(out.status[r].item()).name, out.num_accepted[r].item()
        if (told, accepted, status) == (wanted, expected.num_accepted, expected.status):
            for i, answer in enumerate(expected.answers if out.logprobs is not None else ()):
                self._judge_logprobs(r, out.logprobs, r * width + i, answer, [answer.token])
            return
        at = next((i for i, (a, b) in enumerate(zip(told, wanted, strict=False)) if a != b), -1)
        if at >= 0 and expected.answers[at].near_tie(told[at]):
            self.tally.near_ties += 1
            return
        end = f"{wanted}, {expected.status}; {accepted} accepted"
        self._wrong(r, f"verified {told}, {status} for {end}")

    def _judge_by_ratio(
        self,
        r: int,
        out: VerifyOutput,
        raw: list[np.ndarray],
        drafts: list[int],
        contexts: list[Context],
        method: str,
    ) -> None:
        """Check what holds for all draws if drafts are certain: accepted drafts are in the kept
        set, and a rejected one is not emitted, nor rejected where nothing else is kept."""
        row, accepted = self.rows[r], int(out.num_accepted[r].item())
        told, status = out.token_ids[r].tolist(), Status(out.status[r].item()).name
        first = r * (len(drafts) + 1)
        answers = [
            oracle.draw(
                raw[first + i],
                row.request,
                contexts[first + i].after(drafts[:i]),
                seed=0,
                position=0,
            )
            for i in range(accepted + 1)
        ]
        last, token = answers[-1], told[accepted]
        holds = {
            "prefix": told[:accepted] == drafts[:accepted],
            "kept": all(a.kept[v] for a, v in zip(answers, told[:accepted], strict=False)),
            "end": set(told[accepted + 1 :]) <= {-1},
            "status": status == last.status,
            "token": token == -1 if last.status != oracle.OK else bool(last.kept[token]),
        }
        if accepted < len(drafts) and last.status == oracle.OK:
            draft = drafts[accepted]
            holds["rejected"] = token != draft
            if method == "rejection" and 0 <= draft < self.head.size and last.kept[draft]:
                holds["certain"] = last.kept.sum() > 1
        if failed := [name for name, is_so in holds.items() if not is_so]:
            self._wrong(r, f"{method} {told}, {status}, of {drafts}: not so: {failed}")

    def _learn_seeds(self, seeds: Tensor) -> None:
        """A row that asked for any seed keeps the one it was given; the others have their own."""
        for r, (row, seed) in enumerate(zip(self.rows, seeds.tolist(), strict=True)):
            if row.seed is None:
                row.seed = seed
            elif (row.seed - seed) % 2**64:
                self._wrong(r, f"seed {seed} for {row.seed}")

    def _remember(self, out: Any) -> None:
        self.earlier.append((out, _copy(out)))
        self.earlier = self.earlier[-EARLIER:]

    def _note(self, line: str) -> None:
        self.log.append(line)

    def _wrong(self, r: int, what: str) -> None:
        asked = self.rows[r].fields if r >= 0 else ""
        so_far = "; ".join(list(self.log)[-4:])
        where = f"{self.name}, step {self.number}, row {r}"
        self.tally.differ(f"{where}: {what}\n  {asked}\n  {so_far}")


def _ordinary(answer: Answer, asked: Request) -> bool:
    """Whether logprobs are defined: a log-softmax beside +inf or NaN is nobody's definition."""
    temperature = 1.0 if asked.greedy else asked.temperature
    shown = (answer.raw, oracle.scaled(answer.logits, temperature)[answer.kept])
    return all(np.isfinite(x[~np.isneginf(x)]).all() and (x > -np.inf).any() for x in shown)


def one_request_for_all(pick: random.Random, head: ModelHead, ranks: Any, name: str) -> Tally:
    """Steps of one request over any number of rows; what was set counts for them, or is refused.

    A refusal is a ValueError, on every rank.
    """
    size, tally = head.size, Tally()
    fields = request(pick, size) | {"seed": pick.getrandbits(64)}
    prompt, output = (tokens_so_far(pick, size, prompt=p) for p in (True, False))
    batch = SamplingBatch.from_params(
        SamplingParams(**fields),
        vocab_size=size,
        prompt_token_ids=[prompt],
        output_token_ids=[output],
    )
    temperature = fields.get("temperature", 1.0)
    if pick.random() < 0.3:
        batch.temperature[0] = temperature = pick.choice([0.0, 3.0])
    for number, count in enumerate([1, 3, 2, 3, 5]):
        hidden_states, position = head.hidden_states(pick, count), pick.getrandbits(20)
        grammar = oracle.bits(range(0, size, 2), size) if pick.random() < 0.5 else None
        forced = pick.randrange(size) if pick.random() < 0.5 else -1
        try:
            batch.grammar_bitmask = batch.forced_token_ids = None
            if grammar is not None:
                batch.grammar_bitmask = _grammar_tensor([grammar] * count, size)
            if forced >= 0:
                batch.forced_token_ids = _forced_tensor([forced] * count)
            outs = ranks.sample(hidden_states, batch, position)
        except ValueError:
            continue
        asked = Request(**fields | {"temperature": temperature})
        context = Context(tuple(prompt), tuple(output), grammar, forced)
        for r, raw in enumerate(head.raw(hidden_states)):
            answer = oracle.draw(raw, asked, context, seed=fields["seed"], position=position)
            for out in outs:
                tally.rows += 1
                token, status = out.token_ids[r].item(), Status(out.status[r].item()).name
                if status != answer.status or (
                    token != answer.token and not answer.near_tie(int(token))
                ):
                    found = f"{token}, {status} for {answer.token}, {answer.status}"
                    tally.differ(f"{name}, step {number} of {count} rows: {found}\n  {fields}")
    return tally


def engine_tensors(pick: random.Random, head: ModelHead, ranks: Any, rank: int, name: str) -> Tally:
    """Steps over an engine's own tensors, by every order; ranks with other orders are told so."""
    size, tally, count = head.size, Tally(), pick.randint(1, 8)
    with torch.inference_mode(False):
        its = {
            "temperature": torch.ones(count),
            "seed": torch.zeros(count, dtype=torch.int64),
            "top_k": torch.zeros(count, dtype=torch.int32),
            "top_p": torch.ones(count, dtype=torch.float64),
            "min_p": torch.zeros(count, dtype=torch.float64),
        }
    choices: dict[str, Any] = {
        "temperature": [0.0, 0.5, 1.0, 30.0],
        "seed": [pick.getrandbits(62) for _ in range(9)],
        "top_k": [0, -1, 1, 2, 20, size],
        "top_p": [1.0, 0.01, 0.5, 0.9],
        "min_p": [0.0, 0.0, 0.1, 0.9],
    }
    for step in range(4):
        orders = [pick.choice(ORDERS) for _ in range(8)]
        if step % 2:
            orders = orders[:1] * 8
        for key, values in choices.items():  # in place, as an engine does
            its[key].copy_(torch.tensor([pick.choice(values) for _ in range(count)]))
        batch = SamplingBatch.over(vocab_size=size, **its, filter_order=orders[rank])
        chosen = pick.sample(range(count), pick.randint(1, count))
        rows = batch.select(torch.tensor(chosen)) if pick.random() < 0.5 else batch
        chosen = chosen if rows is not batch else list(range(count))
        hidden_states, position = head.hidden_states(pick, len(chosen)), pick.getrandbits(20)
        forced = [pick.randrange(size) if pick.random() < 0.2 else -1 for _ in chosen]
        if pick.random() < 0.3:
            rows.forced_token_ids = _forced_tensor(forced)
        else:
            forced = [-1] * len(chosen)
        differ = len(set(orders[: len(head.shards)])) > 1
        try:
            outs = ranks.sample(hidden_states, rows, position)
        except RankMismatch as error:
            if not differ or not str(error).startswith("filter_order: must be the same"):
                tally.differ(f"{name}, over, step {step}, orders {orders}: {error}")
            continue
        if differ:
            tally.differ(f"{name}, over, step {step}: orders {orders} were taken for one")
            continue
        for r, raw in enumerate(head.raw(hidden_states)):
            fields = {key: its[key][chosen[r]].item() for key in its if key != "seed"}
            asked = Request(**fields, filter_order=orders[0])
            how = {"seed": its["seed"][chosen[r]].item(), "position": position}
            answer = oracle.draw(raw, asked, Context((), (), None, forced[r]), **how)
            for out in outs:
                tally.rows += 1
                token, status = out.token_ids[r].item(), Status(out.status[r].item()).name
                if status != answer.status or (
                    token != answer.token and not answer.near_tie(int(token))
                ):
                    found = f"{token}, {status} for {answer.token}, {answer.status}"
                    tally.differ(f"{name}, over, step {step}: {found}\n  {asked}")
    return tally


@torch.inference_mode(False)  # it is written again, wherever that may be
def _grammar_tensor(grammars: list[tuple[int, ...] | None], size: int) -> Tensor:
    words = -(-size // 32)
    rows = [(-1,) * words if grammar is None else grammar for grammar in grammars]
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), words)


@torch.inference_mode(False)
def _forced_tensor(forced: list[int]) -> Tensor:
    return torch.tensor(forced, dtype=torch.int64)


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
