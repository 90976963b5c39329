"""The answers of a batch: padded rows, rows that ended, positions, and a row without a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tpsample import SampleOutput, SamplingParams, Status
from tpsample.cli import report
from tpsample.cli.answers import Row, decode
from tpsample.cli.model import Model

TRANSFORMERS = pytest.importorskip("transformers", reason="needs the extra hf")


def test_greedy_rows_are_what_transformers_generates(tiny: Path, tiny_model: Model) -> None:
    greedy = SamplingParams(temperature=0)
    rows = [Row(tiny_model, prompt, greedy) for prompt in ([5], [7, 8, 9, 10, 11])]
    decode(tiny_model, rows, tiny_model.lm_head.sampler(max_rows=2, backend="torch"), 6)

    causal_lm = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for row in rows:
        ids = torch.tensor([row.prompt])
        theirs = causal_lm.generate(ids, max_new_tokens=6, do_sample=False)
        assert theirs[0].tolist() == row.prompt + row.answer


class Scripted:
    """A sampler that draws what it is told, and keeps the positions it was asked for."""

    def __init__(self, model: Model, script: list[list[int]], status: Status = Status.OK) -> None:
        self.script, self.status, self.seen = script, int(status), list[list[int]]()
        self.sampler = model.lm_head.sampler(max_rows=2, backend="torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, hidden_states: Any, batch: Any, positions: torch.Tensor) -> SampleOutput:
        token_ids = torch.tensor(self.script[len(self.seen)])
        self.seen.append(positions.tolist())
        status = torch.full((len(token_ids),), self.status, dtype=torch.int32)
        return SampleOutput(token_ids, status, torch.zeros(len(token_ids)))


def test_ended_rows_collect_nothing_and_positions_ignore_padding(tiny_model: Model) -> None:
    eos = next(iter(tiny_model.eos_token_ids))
    script: Any = Scripted(tiny_model, [[1, 2], [eos, 3], [4, 5], [6, eos], [7, 8]])
    rows = [Row(tiny_model, prompt, SamplingParams()) for prompt in ([9, 9, 9], [9])]
    steps: list[None] = []
    decoded = decode(tiny_model, rows, script, 5, on_step=lambda: steps.append(None))
    assert [row.answer for row in rows] == [[1], [2, 3, 5]]
    assert script.seen == [[3, 1], [4, 2], [5, 3], [6, 4]]
    assert decoded.forwards == len(steps) == 4
    assert [row.drawn for row in rows] == [[1, eos], [2, 3, 5, eos]]
    assert [len(row.states) for row in rows] == [2, 4]


def test_no_token_stops_decoding(tiny_model: Model) -> None:
    broken: Any = Scripted(tiny_model, [[-1]], Status.NAN)
    row = Row(tiny_model, [9], SamplingParams(), stop=["w5"])
    with pytest.raises(RuntimeError, match="row 0 has no token 0 behind its prompt, status NAN"):
        decode(tiny_model, [row], broken, 5)


def test_the_rate_begins_behind_the_first_step_which_may_compile(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Scripted):
        """The first step takes 60 s, and each later one 2 s."""

        def __call__(self, *arguments: Any) -> SampleOutput:
            times.append(times[-1] + (2 if self.seen else 60))
            return super().__call__(*arguments)

    times = [0.0]
    monkeypatch.setattr("tpsample.cli.answers.time.perf_counter", lambda: times[-1])
    for tokens, said in (
        (4, {"tokens per second": "0.5 (all 1 rows, behind the first step)",
             "time": "60.0 s for the first step, 6.0 s for 3 tokens in 3 more"}),
        (1, {"time": "60.0 s for the first step"}),
    ):  # fmt: skip
        script: Any = Slow(tiny_model, [[1], [2], [3], [4]])
        decoded = decode(tiny_model, [Row(tiny_model, [9], SamplingParams())], script, tokens)
        assert (decoded.first_s, decoded.seconds) == (60, 2 * (tokens - 1))
        assert dict(report.speed(decoded)) == said
