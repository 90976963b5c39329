"""The serving loop: slots go on like the model itself, everyone is served, wrong tokens stop it."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.lab import machine, whole_logits
from benchmarks.lab.harness import execute
from benchmarks.lab.problem import WrongToken
from benchmarks.lab.results import RESULT
from benchmarks.serving import candidates, command, experiment, loop, trace
from benchmarks.serving.slots import Slots
from tpsample.distributed import Job

CPU = torch.device("cpu")


def tiny_run(**changes):
    settings = {"shapes": (), "batches": (2,), "repeats": 1, "requests": 5, "scale": 0.02}
    model = experiment.tiny_model(CPU)
    return experiment.ServingRun(tiny=True, model=model, **settings | changes)


def test_arrivals_are_those_of_the_rate_and_lengths_those_of_the_trace():
    made = trace.requests(2000, 0.1, 4.0, 50)
    assert made == trace.requests(2000, 0.1, 4.0, 50)
    assert made[0].arrival_s == 0
    assert made[-1].arrival_s == pytest.approx(500, rel=0.1)
    assert [(len(r.prompt), r.output_tokens) for r in made[:3]] == [(37, 4), (40, 11), (88, 6)]
    assert made[65].output_tokens == made[1].output_tokens
    assert len({r.seed for r in made}) == 2000
    assert {r.arrival_s for r in trace.requests(9, 1.0, float("inf"), 50)} == {0.0}


@torch.inference_mode()
def test_slots_go_on_as_the_model_does_alone():
    """Requests of several lengths join late, leave, and take slots that others had."""
    model = experiment.tiny_model(CPU)
    trunk = model.trunk.float()
    texts = {slot: torch.randint(1003, (n,)).tolist() for slot, n in ((2, 7), (0, 4), (1, 11))}
    slots = Slots(trunk, 3, 20)

    def prefill(slot, ids):
        positions = torch.arange(len(ids))[None]
        return slots.hidden_states(torch.tensor([slot]), torch.tensor([ids]), positions)

    def alone(ids):
        return trunk(torch.tensor([ids])).last_hidden_state[:, -1]

    for slot, ids in texts.items():
        torch.testing.assert_close(prefill(slot, ids), alone(ids))
    for step, order in enumerate(([0, 1, 2], [2, 0], [1, 2])):
        if step == 2:
            texts[0] = [5, 6, 7]
            prefill(0, texts[0])
            order = [0, *order]
        for slot in order:
            texts[slot].append(17 * step + slot)
        last = torch.tensor([[texts[slot][-1]] for slot in order])
        positions = torch.tensor([[len(texts[slot]) - 1] for slot in order])
        got = slots.hidden_states(torch.tensor(order), last, positions)
        torch.testing.assert_close(got, torch.cat([alone(texts[slot]) for slot in order]))


class Counting:
    """Draws 1, 2, 3 … for every request, whatever place it has."""

    name, kind = "counting", "tpsample"

    def begin(self):
        self.rows, self.most = [], 0

    def arrange(self, order, joining):
        pool = self.rows + [[request.seed, 0] for request in joining]
        self.rows = [pool[row] for row in order]
        self.most = max(self.most, len(self.rows))

    def step(self, hidden_states, positions):
        assert len(hidden_states) == len(positions) == len(self.rows)
        for row in self.rows:
            row[1] += 1
        return torch.tensor([drawn for _, drawn in self.rows])

    def check(self, problem, token_ids):
        pass


@pytest.mark.parametrize("rate", [float("inf"), 200.0])
def test_everyone_is_served_in_turn_with_the_state_of_his_own(rate):
    model, candidate = experiment.tiny_model(CPU), Counting()
    found = trace.requests(9, 0.03, rate, 1003)
    slots = Slots(model.trunk, 3, max(len(r.prompt) + r.output_tokens for r in found))
    done = loop.serve(Job(), slots, found, candidate, keep_steps=2)
    assert [each.request for each in done.served] == found
    for each in done.served:
        assert each.token_ids == list(range(1, each.request.output_tokens + 1))
        assert each.times_s == sorted(each.times_s) and each.first_s > 0
    assert candidate.most == 3 if rate == float("inf") else candidate.most <= 3
    assert done.tokens == sum(r.output_tokens for r in found)
    assert 0 < done.sampling_s < done.seconds
    assert len(done.steps) == 2
    first = done.steps[0]
    assert first.positions[0] == len(found[0].prompt) and first.seeds[0] == found[0].seed


def test_a_run_checks_and_measures_both_loads():
    run = tiny_run()
    rows = list(experiment.rows(run))
    assert [(r["shape"], r["kind"]) for r in rows] == [
        (f"tiny, {load}", kind)
        for load in (experiment.AT_ONCE, experiment.POISSON)
        for kind in ("tpsample", "baseline")
    ]
    assert run.checked_rows >= 6
    for each in rows:
        assert each["tokens_per_s"] > 0 and each["per_token_p99_us"] >= each["median_us"]
        assert 0 < each["sampling_share"] < 1


def _other_tokens(step):
    return lambda self, *states: (step(self, *states) + 1) % 1003


def _other_logits(logits):
    return lambda self, states: logits(self, states).roll(1, 1)


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "said"),
    [
        (candidates.TPSample, "step", _other_tokens, "the oracle says"),
        (whole_logits.AllGather, "logits", _other_logits, "logits differ"),
    ],
)
def test_wrong_tokens_stop_it(owner, name, wrong, said, monkeypatch, tmp_path):
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    path = tmp_path / RESULT
    with pytest.raises(WrongToken, match=said):
        execute(experiment.BENCHMARK, tiny_run(), path)
    result = json.loads(path.read_text())
    assert said in result["aborted"] and not result["rows"]


def test_the_command_writes_a_page(tmp_path):
    words = ["--tiny", "--output", str(tmp_path)]
    assert CliRunner().invoke(command.app, words).exit_code == 0
    page = next(tmp_path.glob("serving-cpu-*/README.md")).read_text()
    assert "tiny, Poisson arrivals" in page and "AzureLLMInferenceTrace_conv" in page
    for words, said in ((["--slots", "4,x"], "slots"), (["--scale", "0"], "scale")):
        failed = CliRunner().invoke(command.app, words)
        assert failed.exit_code == 2 and said in failed.output


@pytest.mark.long
def test_two_ranks(tmp_path):
    start = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    words = ["-m", "benchmarks.serving", "--tiny", "--output", str(tmp_path)]
    subprocess.run([sys.executable, *start.split(), *words], cwd=machine.ROOT, check=True)
    result = json.loads(next(tmp_path.glob(f"serving-*/{RESULT}")).read_text())
    assert {row["candidate"] for row in result["rows"]} == {
        "tpsample",
        "all-gather + softmax + exponential race",
    }
