"""`tpsample doctor`, alone and on ranks, without a GPU; and why "auto" chooses what it does."""

import pytest

pytest.importorskip("rich", reason="needs the extra cli")
from typer.testing import CliRunner

import tpsample.cli.doctor
from tests.commands import run_command
from tests.test_distributed import STARTERS
from tests.test_peer_processes import _report
from tpsample.cli.app import app
from tpsample.exchange.choice import choose_exchange, explain_auto
from tpsample.ranks.ranks import Ranks


def test_alone():
    shown = CliRunner().invoke(app, ["doctor", "--seconds", "0.1"])
    assert shown.exit_code == 0, shown.output
    assert "1 rank, started by hand" in shown.output
    assert "exchange auto  none: one rank" in shown.output
    assert "self-check none: ok; " in shown.output
    assert "hint: no GPU is visible" in shown.output


def test_wrong_tokens_are_an_error(monkeypatch):
    sample = tpsample.cli.doctor.reference.sample

    def other(*args):
        out = sample(*args)
        out.token_ids.add_(1)
        return out

    monkeypatch.setattr(tpsample.cli.doctor.reference, "sample", other)
    shown = CliRunner().invoke(app, ["doctor", "--seconds", "0"])
    assert shown.exit_code == 1
    assert "self-check none: 4 TOKENS DIFFER FROM THE ORACLE" in shown.output


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(tpsample.cli.doctor._PACKAGES, "no-such-package", "hf")
    shown = CliRunner().invoke(app, ["doctor", "--seconds", "0"])
    assert "hint: no-such-package missing: pip install 'tpsample[hf]'" in shown.output


@pytest.mark.parametrize("source", STARTERS)
def test_on_two_ranks(source):
    command = (*STARTERS[source], "-m", "tpsample.cli", "doctor", "--seconds", "0.2")
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    assert f"2 ranks, started by {source}" in done.stdout
    assert "exchange auto  collective: the ranks are CPUs" in done.stdout
    for exchange in ("collective", "p2p"):
        assert f"self-check {exchange}: ok; " in done.stdout
    assert "rank 1  " in done.stdout and "DIFFERS" not in done.stdout


@pytest.mark.parametrize(
    ("reports", "exchange", "reason"),
    [
        ([_report(0, [])], "none", "one rank"),
        ([_report(0, [1]), _report(1, [0])], "peer", "NVLink connects all"),
        ([_report(0, [1]), _report(1, [])], "collective", "does not connect all"),
        ([_report(0, [1]), _report(1, [0], host="b")], "collective", "several hosts"),
        ([_report(0, [1]), _report(1, [0], obstacle="no")], "collective", "rank 1: no"),
    ],
)
def test_the_reason_fits_the_choice(reports, exchange, reason):
    ranks = Ranks()
    ranks.world_size = len(reports)
    assert choose_exchange("auto", ranks, reports) == exchange
    assert reason in explain_auto(ranks, reports)
