"""The scripts that start processes: what they print in a dry run, what they refuse, and that
shellcheck has nothing to say."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.support.commands import BIN, ROOT, need_mpirun, run_command
from tpsample.ranks import addresses

SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh"))
RUN_BY_HAND = [name for name in SCRIPTS if name != "common.sh"]
ALLOCATION = {"SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_ID": "123456"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scontrol that knows two nodes; it is found behind what `run_command` puts first."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node-7\\nnode-8\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def _dry(script: str, *words: str, **env: str) -> str:
    done = run_command(f"launch/{script}", "--dry-run", *words, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr.rstrip()


def test_nodes() -> None:
    line = _dry("nodes.sh", "generate", "--prompt", "a b", FIRST="n1", NNODES="3", NPROC="8")
    assert line == (
        "torchrun --nnodes 3 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id tpsample "
        "--rdzv-endpoint n1:29400 --rdzv-conf is_host=0 --local-addr 10.0.0.2 -m tpsample.cli "
        r"generate --prompt a\ b"
    )
    assert "--local-addr 10.0.0.1 -m" in _dry("nodes.sh", FIRST="n1", NNODES="1", ADDR="10.0.0.1")
    assert "--rdzv-endpoint n1:5 " in _dry("nodes.sh", FIRST="n1:5", NNODES="1", NPROC="1")


def test_mpi_takes_a_host_file_and_brings_its_path_there() -> None:
    need_mpirun()
    line = _dry("mpi.sh", "doctor", HOSTFILE="my hosts", NPROC="4")
    assert line.startswith("mpirun -np 4 ") and line.endswith(" -m tpsample.cli doctor")
    assert r"my\ hosts" in line and ("--hostfile" not in line or " -x PATH " in line)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("node-nowhere.invalid", "FIRST=node-nowhere.invalid: .*; give the address of one of"),
        ("192.0.2.77", "FIRST=192.0.2.77:29400: .* did not answer .* within 1 s"),
    ],
)
def test_a_first_machine_that_is_not_there_is_one_line(first: str, said: str) -> None:
    done = run_command("launch/nodes.sh", env={"FIRST": first, "NNODES": "2", "WAIT": "1"})
    assert done.returncode == 1
    assert re.fullmatch(f"nodes.sh: {said}.*\n", done.stderr), done.stderr


def test_an_address_of_this_machine_is_the_first_and_a_longer_wait_finds_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    addresses.main("127.0.0.1:29400", "1", "127.0.0.1")
    assert capsys.readouterr().out == "1 127.0.0.1 127.0.0.1\n"
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        assert not addresses.answers("127.0.0.1", port, 0.1)
        threading.Timer(0.2, first.listen).start()
        assert addresses.answers("127.0.0.1", port, 60)


def test_a_machine_knows_its_own_addresses() -> None:
    assert addresses.is_own("127.0.0.1") and addresses.is_own("127.0.1.1")
    assert not addresses.is_own("198.51.100.1")
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("198.51.100.1") is None
    own = addresses.address_towards("127.0.1.1")
    assert addresses.is_own(own) and addresses.interface_of(own)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NNODES": "2"}, "nodes.sh: FIRST is not set"),
        ({"FIRST": "n1"}, "nodes.sh: NNODES is ''"),
        ({"FIRST": "n1", "NNODES": "two"}, "nodes.sh: NNODES is 'two'"),
        ({"FIRST": "n1", "NNODES": "2", "NPROC": "0"}, "nodes.sh: NPROC is '0'"),
        ({"FIRST": "n1:70000", "NNODES": "2"}, "nodes.sh: FIRST is 'n1:70000'"),
        ({"FIRST": "n1", "NNODES": "2", "WAIT": "long"}, "nodes.sh: WAIT is 'long'"),
    ],
)
def test_nodes_says_what_is_missing(env: dict[str, str], message: str) -> None:
    done = run_command("launch/nodes.sh", "--dry-run", env=env)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, "1"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "4"),
        ({"SLURM_GPUS_PER_NODE": "h200:8"}, "8"),
        ({"SLURM_NTASKS_PER_NODE": "2(x2)", "SLURM_GPUS_ON_NODE": "4"}, "2"),
        ({"SLURM_GPUS_ON_NODE": "4", "NPROC": "3"}, "3"),
    ],
)
def test_slurm(slurm: None, env: dict[str, str], ranks: str) -> None:
    assert _dry("slurm.sh", "doctor", **ALLOCATION, **env) == (
        f"env MASTER_ADDR=node-7 MASTER_PORT=23456 srun --ntasks-per-node {ranks} "
        "--kill-on-bad-exit=1 python -m tpsample.cli doctor"
    )


def test_slurm_as_the_copy_that_sbatch_runs(slurm: None, tmp_path: Path) -> None:
    shutil.copy(ROOT / "launch/slurm.sh", tmp_path / "slurm_script")
    env = {**ALLOCATION, "SLURM_SUBMIT_DIR": str(ROOT)}
    done = run_command(tmp_path / "slurm_script", "--dry-run", env=env)
    assert done.stderr.rstrip().endswith("python -m tpsample.cli generate"), done.stderr


def test_slurm_outside_an_allocation() -> None:
    done = run_command("launch/slurm.sh")
    assert done.returncode == 1
    assert "slurm.sh: not in an allocation; start it with salloc or sbatch" in done.stderr


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("nodes.sh", "torchrun --nnodes 2 .* --rdzv-endpoint node-1:29400 .* -m tpsample.cli"),
        ("slurm.sh", "env MASTER_ADDR=node-1 MASTER_PORT=20000 srun --ntasks-per-node 1"),
    ],
)
def test_a_dry_run_outside_a_cluster_shows_what_would_run(script: str, shown: str) -> None:
    note, command = _dry(script, "doctor").splitlines()
    assert re.match(shown, command) and command.endswith(" doctor")
    assert f"{script}: " in note and "node-1" in note and "stand" in note


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_clean(script: str) -> None:
    path = ROOT / "launch" / script
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:/usr/bin:/usr/local/bin")
    checker = [shellcheck, "--external-sources"] if shellcheck else ["bash", "-n"]
    done = subprocess.run([*checker, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", RUN_BY_HAND)
def test_scripts_can_be_run_and_say_how(script: str) -> None:
    path = ROOT / "launch" / script
    assert path.stat().st_mode & 0o111
    assert "[--dry-run]" in path.read_text()
