"""Runs a benchmark, which yields result rows, and keeps what it measured.

The result is written after every row, so a run that is cut short keeps what it measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import machine, quiet
from benchmarks.lab.problem import Candidate, NearTies, Problem, WrongToken, make_weight
from benchmarks.lab.results import Result, Row, View
from benchmarks.lab.shapes import BATCHES, SHAPES, TINY, TINY_BATCHES, Shape
from benchmarks.lab.timing import Timing, measure, prepare
from tpsample.distributed import Job


class OutOfTime(Exception):
    """The deadline of a run has passed: no further point is measured."""


class NotCaptured(RuntimeError):
    """A step of tpsample was not captured in a CUDA graph: its times are the host's."""


@dataclass(frozen=True)
class Benchmark:
    """A question that is answered by rows, and the views of them.

    Attributes:
        by_default: whether `benchmarks.run` takes it where none is named. A benchmark that takes
            minutes, or needs root or a model, is not.
    """

    name: str
    question: str
    views: list[View]
    rows: Callable[[Run], Iterator[Row]]
    by_default: bool = True


@dataclass
class Run:
    """The settings of a benchmark, and the facts that it has beside its rows.

    Attributes:
        tiny: short runs for a CPU. With the tiny shape they say nothing about speed.
        deadline: no point is begun after this `time.monotonic()`.
        notes, measured: go into the result as they are.
        checked_rows, near_ties: what the gate has seen.
        uncaptured: steps of tpsample that were timed without a CUDA graph, and why.
    """

    job: Job = field(default_factory=Job)
    shapes: tuple[Shape, ...] = SHAPES
    batches: tuple[int, ...] = BATCHES
    repeats: int = 50
    tiny: bool = False
    deadline: float = float("inf")
    notes: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    checked_rows: int = 0
    near_ties: NearTies = field(default_factory=NearTies)
    uncaptured: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def small(job: Job | None = None, **changes: Any) -> Run:
        """The sizes of `--tiny`."""
        settings: dict[str, Any] = {
            "shapes": (TINY,),
            "batches": TINY_BATCHES,
            "repeats": 3,
            "tiny": True,
        }
        return Run(job or Job(), **(settings | changes))

    @property
    def device(self) -> torch.device:
        return self.job.device

    def note(self, *lines: str) -> None:
        """Add lines to the result, each once."""
        self.notes += [line for line in lines if line not in self.notes]

    def weight(self, shape: Shape) -> Tensor:
        return make_weight(shape.vocab_size, shape.hidden_size, self.device)

    def time(
        self,
        steps: Mapping[str, Callable[[], object]],
        align: Callable[[], object] | None = None,
        own: Collection[str] = (),
        eager: Collection[str] = (),
    ) -> dict[str, Timing]:
        """Return interleaved times; of several ranks the slowest, repeat by repeat.

        A step that raises on a rank is noted and has no time.

        Args:
            own: names of tpsample's steps.
            eager: names of steps that are not to be captured.

        Raises:
            RuntimeError: one of `own` raises.
        """
        prepared = {
            name: prepare(step, self.device, name not in eager) for name, step in steps.items()
        }
        for failures in self.job.gather({n: p.why for n, p in prepared.items() if p.step is None}):
            for name, why in failures.items():
                if name in own:
                    raise RuntimeError(f"{name}: {why}")
                self.note(f"{name}: not measured, {why}")
                prepared.pop(name, None)
        mine = measure(prepared, self.device, repeats=self.repeats, align=align)
        ranks = self.job.gather(
            {name: [each.times_us, each.graph, prepared[name].why] for name, each in mine.items()}
        )
        for name, why in [(name, rank[name][2]) for rank in ranks for name in rank]:
            if why is not None:
                self.note(f"{name}: timed without a CUDA graph, {why}")
                self.uncaptured |= {name: why} if name in own else {}
        return {
            name: Timing.slowest([Timing(tuple(rank[name][0]), rank[name][1]) for rank in ranks])
            for name in mine
        }

    def check(self, problem: Problem, token_ids: Tensor, logits: Tensor | None = None) -> None:
        """The gate of ids that are timed next.

        Raises:
            WrongToken: they are not the oracle's.
            OutOfTime: it is too late to time them.
        """
        self._still_in_time()
        self.near_ties += problem.check(token_ids, logits)
        self.checked_rows += problem.rows

    def time_checked(
        self,
        candidates: dict[str, Candidate],
        others: Mapping[str, Callable[[], object]],
        align: Callable[[], object] | None = None,
    ) -> dict[str, Timing]:
        """Gate the candidates, time them among `others`, and see that replays gave the same ids.

        Raises:
            WrongToken: a candidate's ids are not the oracle's, or a timed step's are others.
            OutOfTime: it is too late to begin.
        """
        self._still_in_time()
        gated = {}
        for name, candidate in candidates.items():
            self.near_ties += candidate.check()
            self.checked_rows += candidate.problem.rows
            gated[name] = candidate.token_ids.clone()
            candidate.token_ids.fill_(-1)
        steps = {name: candidate.step for name, candidate in candidates.items()}
        eager = [name for name, candidate in candidates.items() if not candidate.graph]
        times = self.time({**steps, **others}, align, own=candidates, eager=eager)
        for name, candidate in candidates.items():
            if not torch.equal(candidate.token_ids, gated[name]):
                raise WrongToken(f"{name}: the timed steps gave other tokens than the checked one")
        return times

    def require_graphs(self) -> None:
        """Raises `NotCaptured`, naming the steps of tpsample that were timed without a graph."""
        if self.uncaptured:
            steps = "; ".join(f"{name}: {why}" for name, why in self.uncaptured.items())
            raise NotCaptured(f"not captured in a CUDA graph: {steps}")

    def _still_in_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def session() -> dict[str, Any]:
    """Return how a session of measurements begins: its command, when, and the machine's load."""
    return {"command": machine.command(), "started": now(), "before": quiet.load()}


def now() -> str:
    """Return the time, with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def execute(
    benchmark: Benchmark,
    run: Run,
    path: Path | None,
    *,
    on_row: Callable[[Row], None] = lambda row: None,
    seconds: float = float("inf"),
) -> Result:
    """Run a benchmark and keep its result in the JSON file `path`.

    Args:
        path: None writes nothing (ranks other than 0).
        on_row: called after each row.
        seconds: no point is begun after this long; the result then says so.

    Raises:
        WrongToken: after the result was marked as aborted.
        NotCaptured: after everything was measured.
        OSError: the file cannot be written; likewise.
    """
    run.deadline = time.monotonic() + seconds
    result = Result(
        benchmark=benchmark.name,
        question=benchmark.question,
        machine=machine.describe(run.device, run.job.world_size),
        settings={
            "shapes": [shape.name for shape in run.shapes],
            "batches": list(run.batches),
            "repeats": run.repeats,
            "tiny": run.tiny,
        },
        views=[vars(view) for view in benchmark.views],
        notes=run.notes,
        measured=run.measured,
        sessions=[session()],
    )

    unwritten: OSError | None = None

    def flush() -> None:
        nonlocal unwritten
        result.checks = run.near_ties.checks(run.checked_rows)
        unwritten = None
        try:
            if path is not None:
                result.save(path)
        except OSError as error:  # it costs the file, not what is measured next
            unwritten = error

    try:
        for row in benchmark.rows(run):
            result.rows.append(row)
            flush()
            on_row(row)
        run.require_graphs()
    except OutOfTime:
        run.note(f"Stopped after {seconds:.0f} s; what is missing was not measured.")
        run.require_graphs()
    except WrongToken as error:
        result.aborted = str(error)
        raise
    finally:
        result.sessions[0] |= {"ended": now(), "after": quiet.load()}
        flush()
    if unwritten is not None:
        raise unwritten
    return result
