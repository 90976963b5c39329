"""`tpsample doctor`, alone and on ranks, without a GPU."""

import pytest

pytest.importorskip("rich", reason="needs the extra cli")

import tpsample.cli.doctor
from tests.support.commands import STARTERS, invoke, run_command
from tests.support.tiers import long


def test_alone():
    shown = invoke("doctor", "--seconds", 0.1)
    assert shown.exit_code == 0, shown.output
    assert "1 rank, started by hand" in shown.output
    assert "exchange auto  none: one rank" in shown.output
    copied = " ".join(shown.output.split())
    assert "per rank, 1.1 GB beside 2.1 GB of bf16 weights for 128256 x 8192" in copied
    assert "self-check none: ok; " in shown.output
    assert "hint: no GPU is visible" in shown.output


def test_wrong_tokens_are_an_error(monkeypatch):
    sample = tpsample.cli.doctor.reference.sample

    def other(*args, **named):
        out = sample(*args, **named)
        out.token_ids.add_(1)
        return out

    monkeypatch.setattr(tpsample.cli.doctor.reference, "sample", other)
    shown = invoke("doctor", "--seconds", 0)
    assert shown.exit_code == 1
    assert "self-check none: 4 TOKENS DIFFER FROM THE ORACLE" in shown.output


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(tpsample.cli.doctor.PACKAGES, "no-such-package", "hf")
    shown = invoke("doctor", "--seconds", 0)
    hint = "hint: no-such-package missing: in a clone of tpsample, pip install '.[hf]'"
    assert hint in shown.output


@pytest.mark.parametrize("source", ["torchrun", *long("mpi4py")])
def test_on_two_ranks(source):
    command = (*STARTERS[source], "-m", "tpsample.cli", "doctor", "--seconds", "0.2")
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    assert f"2 ranks, started by {source}" in done.stdout
    assert "exchange auto  collective: the ranks are CPUs" in done.stdout
    for exchange in ("collective", "p2p"):
        assert f"self-check {exchange}: ok; " in done.stdout
    assert "rank 1  " in done.stdout and "DIFFERS" not in done.stdout
