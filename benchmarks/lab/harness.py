"""Runs a benchmark, which yields the rows of each point, and keeps what it measured.

The result is written after every point, so a run that is cut short keeps what it measured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import machine
from benchmarks.lab.problem import DTYPES, Candidate, Compared, WrongToken, make_weight
from benchmarks.lab.results import Result, Row, View
from benchmarks.lab.shapes import BATCHES, SHAPES, TINY, TINY_BATCHES, Shape
from benchmarks.lab.timing import Timing, measure, one_line, prepare
from tpsample.distributed import Job


class OutOfTime(Exception):
    """The deadline of a run has passed: no further point is measured."""


class NotCaptured(RuntimeError):
    """A step of tpsample was not captured in a CUDA graph: its times are the host's."""


@dataclass(frozen=True)
class Benchmark:
    """A question that is answered by rows, and the views of them.

    Attributes:
        rows: yields the rows of a point in a list, which is written as a whole. A row with `why` is
            a candidate that is left out.
        by_default: whether `benchmarks.run` takes it where none is named. A benchmark that takes
            minutes, or needs root or a model, is not.
    """

    name: str
    question: str
    views: list[View]
    rows: Callable[[Run], Iterator[list[Row]]]
    by_default: bool = True


@dataclass
class Run:
    """The settings of a benchmark, and the facts that it has beside its rows.

    Attributes:
        dtype: of the weights, a name in `DTYPES`.
        tiny: short runs for a CPU. With the tiny shape they say nothing about speed.
        options: settings of one benchmark alone.
        command: that the user gave, also on ranks that it has started.
        deadline: no point is begun after this `time.monotonic()`.
        done: points that were measured earlier, as `Result.points` has them.
        notes, measured: go into the result as they are, and so does what the gate has `compared`.
        uncaptured: steps of tpsample that were timed without a CUDA graph, and why.
    """

    job: Job = field(default_factory=Job)
    shapes: tuple[Shape, ...] = SHAPES
    batches: tuple[int, ...] = BATCHES
    dtype: str = "bf16"
    repeats: int = 50
    tiny: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    command: str = field(default_factory=machine.command)
    deadline: float = float("inf")
    done: set[tuple[Any, ...]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    compared: Compared = field(default_factory=Compared)
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
        dtype = DTYPES[self.dtype]
        return make_weight(shape.vocab_size, shape.hidden_size, self.device, dtype)

    def time(
        self,
        steps: Mapping[str, Callable[[], object]],
        align: Callable[[], object] = lambda: None,
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
        with warnings.catch_warnings():
            # A repeat is the same step again on purpose.
            warnings.filterwarnings("ignore", "positions: the rows draw again")
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

    def time_checked(
        self,
        candidates: Mapping[str, Candidate],
        others: Mapping[str, Callable[[], object]],
        align: Callable[[], object] = lambda: None,
        left_out: dict[str, str] | None = None,
    ) -> dict[str, Timing]:
        """Gate the candidates, time them among `others`, and see that replays gave the same ids.

        Args:
            left_out: takes the names of candidates that are wrong or raise on any rank, and why;
                they have no time then. Without it that is an error.

        Raises:
            WrongToken: a candidate's ids are not the oracle's, or a timed step's are others.
            OutOfTime: it is too late to begin.
        """
        if self.job.gather(time.monotonic() > self.deadline)[0]:
            raise OutOfTime
        wrong = {} if left_out is None else left_out
        gated = {}
        for name, candidate in candidates.items():
            found, why = Compared(), None
            try:
                found = candidate.check()
            except Exception as error:
                if left_out is None:
                    raise
                why = one_line(error)
            if said := [each for each in self.job.gather(why) if each is not None]:
                wrong[name] = said[0]
                continue
            self.compared += found
            gated[name] = candidate.token_ids.clone()
            candidate.token_ids.fill_(-1)
        steps = {name: candidates[name].step for name in gated}
        eager = [name for name in gated if not candidates[name].graph]
        own = gated if left_out is None else ()
        times = self.time({**steps, **others}, align, own=own, eager=eager)
        for name, token_ids in gated.items():
            if name not in times:
                wrong[name] = "its step raises; see the notes"
            elif not all(self.job.gather(torch.equal(candidates[name].token_ids, token_ids))):
                wrong[name] = "the timed steps gave other tokens than the checked one"
                del times[name]
        if left_out is None:
            for name, why in wrong.items():
                raise WrongToken(f"{name}: {why}")
        return times

    def require_graphs(self) -> None:
        """Raises `NotCaptured`, naming the steps of tpsample that were timed without a graph."""
        if self.uncaptured:
            steps = "; ".join(f"{name}: {why}" for name, why in self.uncaptured.items())
            raise NotCaptured(f"not captured in a CUDA graph: {steps}")


def unmeasured(benchmark: Benchmark, run: Run) -> Result:
    """Return the result of a benchmark before anything is measured."""
    return Result(
        benchmark=benchmark.name,
        question=benchmark.question,
        machine=machine.describe(run.device, run.job.world_size),
        settings={
            "shapes": [shape.name for shape in run.shapes],
            "batches": list(run.batches),
            "dtype": run.dtype,
            "repeats": run.repeats,
            "tiny": run.tiny,
            **run.options,
        },
        views=[vars(view) for view in benchmark.views],
        notes=run.notes,
        measured=run.measured,
        checks=vars(run.compared),
    )


def execute(
    benchmark: Benchmark,
    run: Run,
    path: Path | None,
    *,
    on_rows: Callable[[list[Row]], None] = lambda rows: None,
    seconds: float = float("inf"),
    earlier: Result | None = None,
) -> Result:
    """Run a benchmark and keep its result in the JSON file `path`.

    Args:
        path: None writes nothing (ranks other than 0).
        on_rows: called with the rows that were just written.
        seconds: no point is begun after this long, by the clock of rank 0; the result then says so.
        earlier: the result that goes on, on rank 0.

    Raises:
        WrongToken: after the result was marked as aborted.
        NotCaptured: after everything was measured.
        OSError: the file cannot be written; likewise.
    """
    run.deadline = time.monotonic() + seconds
    result = unmeasured(benchmark, run) if earlier is None else earlier
    run.notes, run.measured, run.compared = result.notes, result.measured, Compared(**result.checks)
    run.done = {tuple(point) for point in run.job.gather(result.points())[0]}

    def flush() -> OSError | None:
        """Write what there is. An error costs the file, not what is measured next."""
        result.checks = vars(run.compared)
        try:
            if path is not None:
                result.save(path)
        except OSError as error:
            return error
        return None

    try:
        with result.session(run.command):
            for rows in benchmark.rows(run):
                result.rows += [row for row in rows if "why" not in row]
                result.left_out += [row for row in rows if "why" in row]
                flush()
                on_rows(rows)
        run.require_graphs()
    except OutOfTime:
        run.note(f"Stopped after {seconds:.0f} s; what is missing was not measured.")
        run.require_graphs()
    except WrongToken as error:
        result.aborted = str(error)
        raise
    finally:
        unwritten = flush()
    if unwritten is not None:
        raise unwritten
    return result
