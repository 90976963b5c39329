"""Outputs of random rows beside the answers of the oracle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, int64

from tests.fuzz.changing_batch import KEPT_CAP
from tests.support import oracle
from tests.support.oracle import Answer, Context, Request
from tests.support.rows import Row
from tpsample import KeptSets, Logprobs, SampleOutput, Status, VerifyOutput


@dataclass
class Tally:
    """Counts of what was compared, and of what was wrong."""

    rows: int = 0
    wrong: int = 0
    near_ties: int = 0
    notes: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        self.rows, self.wrong = self.rows + other.rows, self.wrong + other.wrong
        self.near_ties += other.near_ties
        self.notes += other.notes
        return self

    def differ(self, note: str) -> None:
        self.wrong += 1
        self.notes.append(note)

    def require_none_wrong(self, what: str) -> None:
        line = f"{self.rows} rows, {self.wrong} differ from the oracle, {self.near_ties} near ties"
        print(f"fuzz, {what}: {line}")
        assert not self.wrong, "\n".join([line, *self.notes[:20]])
        assert self.near_ties * 2000 <= max(self.rows, 2000), line


@dataclass
class Judge:
    """Compares outputs with the oracle, row by row, and notes what differs.

    Attributes:
        name: of the story.
        size: V.
        number: of the step.
        log: what was done last, which a difference shows.
    """

    name: str
    size: int
    tally: Tally = field(default_factory=Tally)
    number: int = 0
    log: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def wrong(self, row: Row | None, what: str) -> None:
        so_far = "; ".join(list(self.log)[-4:])
        fields = "" if row is None else row.fields
        self.tally.differ(f"{self.name}, step {self.number}: {what}\n  {fields}\n  {so_far}")

    def answers(
        self, rows: Sequence[Row], raw: Sequence[np.ndarray], positions: Sequence[int], samples: int
    ) -> list[list[Answer]]:
        """The oracle's, by row and sample."""
        return [
            [
                oracle.draw(
                    logits,
                    row.request,
                    row.context,
                    sample=sample,
                    seed=row.seed or 0,
                    position=position,
                )
                for sample in range(samples)
            ]
            for row, logits, position in zip(rows, raw, positions, strict=True)
        ]

    def drawn(self, out: SampleOutput, undrawn: Sequence[str]) -> SampleOutput:
        """Return the rows before those that are not drawn, whose statuses must be these."""
        count = len(out.status) - len(undrawn)
        found = [Status(status).name for status in out.status[count:].tolist()]
        if found != list(undrawn) or (out.token_ids[count:] != -1).any():
            self.wrong(None, f"{found}, {out.token_ids[count:].tolist()} for {undrawn}")
        first = {name: getattr(out, name)[:count] for name in ("token_ids", "status", "seeds")}
        return replace(out, **first)

    def sampled(self, rows: Sequence[Row], out: SampleOutput, answers: list[list[Answer]]) -> None:
        """Compare tokens, statuses and logprobs."""
        by_row = out.token_ids if out.token_ids.ndim == 2 else out.token_ids.unsqueeze(1)
        tokens = by_row.tolist()
        if out.token_ids.requires_grad or out.token_ids.dtype != int64:
            self.wrong(None, f"tokens of {out.token_ids.dtype}")
        for r, (row, drawn, expected) in enumerate(zip(rows, tokens, answers, strict=True)):
            self.tally.rows += 1
            status = Status(out.status[r].item()).name
            if status != expected[0].status:
                self.wrong(row, f"row {r}: status {status} for {expected[0].status}")
            elif self._differ(drawn, expected):
                self.wrong(row, f"row {r}: tokens {drawn} for {[a.token for a in expected]}")
            else:
                if out.logprobs is not None:
                    self._logprobs(row, out.logprobs, r, expected[0], drawn)
                if out.kept is not None:
                    self._kept(row, out.kept, r, expected[0])

    def _differ(self, drawn: list[int], expected: list[Answer]) -> bool:
        pairs = [(t, a) for t, a in zip(drawn, expected, strict=True) if t != a.token]
        if not all(answer.near_tie(token) for token, answer in pairs):
            return True
        self.tally.near_ties += bool(pairs)
        return False

    def _logprobs(
        self, row: Row, told: Logprobs, at: int, answer: Answer, drawn: list[int]
    ) -> None:
        asked = row.request
        if asked.logprobs is None and asked.logprob_token_ids is None:
            return
        if answer.status != oracle.OK or not _ordinary(answer, asked):
            return
        report = oracle.report(answer, asked, drawn)
        ids = told.token_ids[at].tolist()
        there = [i for i, v in enumerate(ids) if v >= 0]
        entries = report.entries
        if [ids[i] for i in there] != [v for v, *_ in entries]:
            self.wrong(row, f"logprobs of {[ids[i] for i in there]} for {[e[0] for e in entries]}")
            return
        ranks = told.ranks[at, there].tolist()
        if ranks != [rank for *_, rank in entries]:
            self.wrong(row, f"ranks {ranks} for {[rank for *_, rank in entries]}")
        values = told.values[at, there].numpy()
        wanted = np.array([value for _, value, _ in entries])
        if not np.allclose(values, wanted, rtol=1e-6, atol=1e-5):
            self.wrong(row, f"{asked.logprobs_mode} {values} for {wanted}")
        if not abs(told.entropies[at].item() - report.entropy) < 1e-4:
            self.wrong(row, f"entropy {told.entropies[at].item()} for {report.entropy}")

    def _kept(self, row: Row, told: KeptSets, at: int, answer: Answer) -> None:
        """Compare a kept set. One that ends at a near tie may have either of its tokens."""
        order = np.argsort(-answer.logits.astype(np.float64), kind="stable")
        wanted = [v for v in order.tolist() if answer.kept[v]] if answer.status == oracle.OK else []
        wanted = wanted[:1] if row.request.greedy else wanted
        first, last = told.offsets[at : at + 2].tolist()
        ids, size = told.token_ids[first:last].tolist(), told.sizes[at].item()
        listed = len(wanted) <= KEPT_CAP and len(wanted) < self.size
        if (size, ids) == (len(wanted), wanted if listed else []):
            return
        unlike = order[min(size, len(wanted)) - 1 : max(size, len(wanted)) + 1]
        if size and np.ptp(answer.logits[unlike]) < oracle.NEAR_TIE:
            self.tally.near_ties += 1
        else:
            self.wrong(row, f"row {at}: kept {size}, {ids[:9]} for {len(wanted)}, {wanted[:9]}")

    def verified(
        self,
        row: Row,
        r: int,
        out: VerifyOutput,
        raw: list[np.ndarray],
        drafts: list[int],
        contexts: list[Context],
        position: int,
    ) -> None:
        """Compare row r of a coupled verification with plain decoding along its drafts."""
        how = {"seed": row.seed or 0, "position": position}
        expected = oracle.verify_coupled(raw, drafts, row.request, contexts, **how)
        told = [v for v in out.token_ids[r].tolist() if v >= 0]
        wanted = [v for v in expected.tokens if v >= 0]
        status, accepted = Status(out.status[r].item()).name, out.num_accepted[r].item()
        if (told, accepted, status) == (wanted, expected.num_accepted, expected.status):
            for i, answer in enumerate(expected.answers if out.logprobs is not None else ()):
                self._logprobs(row, out.logprobs, r * len(raw) + i, answer, [answer.token])
            return
        at = next((i for i, (a, b) in enumerate(zip(told, wanted, strict=False)) if a != b), -1)
        if at >= 0 and expected.answers[at].near_tie(told[at]):
            self.tally.near_ties += 1
            return
        end = f"{wanted}, {expected.status}; {accepted} accepted"
        self.wrong(row, f"verified {told}, {status} for {end}")

    def by_ratio(
        self,
        row: Row,
        r: int,
        out: VerifyOutput,
        raw: list[np.ndarray],
        drafts: list[int],
        contexts: list[Context],
        method: str,
    ) -> None:
        """Check all that must hold whatever was drawn, the drafts being certain.

        Accepted drafts are in the kept set, and a rejected one is neither emitted nor rejected
        where nothing else is kept.
        """
        accepted = int(out.num_accepted[r].item())
        told, status = out.token_ids[r].tolist(), Status(out.status[r].item()).name
        answers = [
            oracle.draw(raw[i], row.request, contexts[i].after(drafts[:i]), seed=0, position=0)
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
            if method == "rejection" and 0 <= draft < self.size and last.kept[draft]:
                holds["certain"] = last.kept.sum() > 1
        if failed := [name for name, is_so in holds.items() if not is_so]:
            self.wrong(row, f"{method} {told}, {status}, of {drafts}: not so: {failed}")

    def seeds(self, rows: Sequence[Row], seeds: Tensor) -> None:
        """A row without a seed keeps the one it was given; the others have their own."""
        for row, seed in zip(rows, seeds.tolist(), strict=True):
            if row.seed is None:
                row.seed = seed
            elif (row.seed - seed) % 2**64:
                self.wrong(row, f"seed {seed} for {row.seed}")


def _ordinary(answer: Answer, asked: Request) -> bool:
    """Whether logprobs are defined: a log-softmax beside +inf or NaN is nobody's definition."""
    temperature = 1.0 if asked.greedy else asked.temperature
    shown = (answer.raw, oracle.scaled(answer.logits, temperature)[answer.kept])
    return all(np.isfinite(x[~np.isneginf(x)]).all() and (x > -np.inf).any() for x in shown)
