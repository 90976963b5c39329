"""Finding and joining a job, and the scripts that start one."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import outcome
from tests.support.commands import run_command, starter
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import distributed
from tpsample.distributed import Job, LaunchError, from_environment, join
from tpsample.ranks.addresses import answers

ENVIRONMENTS = {
    "nothing": ({}, Job()),
    "torchrun": (
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        Job(5, 8, 1, 4, "torchrun"),
    ),
    "openmpi": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        },
        Job(1, 2, 0, 1, "Open MPI"),
    ),
    "mpich": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        Job(3, 4, 1, 2, "MPICH"),
    ),
    "srun": (
        {
            "SLURM_PROCID": "6",
            "SLURM_STEP_NUM_TASKS": "11",
            "SLURM_LOCALID": "2",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
        },
        Job(6, 11, 2, 4, "Slurm"),
    ),
    "batch-script-without-srun": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        Job(),
    ),
    "torchrun-inside-srun": (
        {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
        },
        Job(0, 1, 0, 1, "torchrun"),
    ),
}


@pytest.mark.parametrize(("env", "place"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_place_from_environment(env: dict[str, str], place: Job) -> None:
    assert from_environment(env) == place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE: not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK: not set"),
        ({"RANK": "two"}, "RANK='two': expected a number"),
        ({"RANK": "-1"}, "RANK='-1': expected a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='': expected a number"),
        ({"RANK": "8"}, "RANK=8: expected less than WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: expected the number"),
        ({"WORLD_SIZE": "9" * 20}, "WORLD_SIZE='9+': expected a number >= 0, below 10"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=str '9+ .*: expected a number >= 0"),
        ({"LOCAL_RANK": "8"}, "LOCAL_RANK=8: expected less than LOCAL_WORLD_SIZE=8"),
    ],
)
def test_broken_environment_names_the_variable(change: dict[str, str | None], message: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", **change}
    with pytest.raises(LaunchError, match=message):
        from_environment({name: value for name, value in env.items() if value is not None})


def test_launcher_without_address_raises_instead_of_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ENVIRONMENTS["srun"][0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(LaunchError, match="MASTER_ADDR: not set"), join():
        pass


@pytest.mark.parametrize("port", ["abc", "", "65536", "-1", "9" * 5000])
def test_a_port_that_is_none_names_the_variable(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENTS["srun"][0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with (
        pytest.raises(LaunchError, match=f"MASTER_PORT=.*{port[-1:]}.*: expected a free port"),
        join(),
    ):
        pass


def test_a_port_that_is_taken_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        told = f"MASTER_PORT={port}: another program .* set another free port"
        with pytest.raises(LaunchError, match=told), join(timeout_s=4):
            pass


@pytest.mark.parametrize(
    "answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "a web server"]
)
def test_a_rank_that_meets_another_program_names_the_port_in_time(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    """Torch's client waits for ever for a program that takes the call and says nothing."""
    place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    with socket.create_server(("127.0.0.1", 0)) as other, ExitStack() as calls:

        def serve() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    call = calls.enter_context(other.accept()[0])
                    if answer is not None:
                        call.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        port = other.getsockname()[1]
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        began = time.monotonic()
        told = f"^MASTER_PORT={port}: what listens there at 127.0.0.1 does not answer as rank 0"
        with pytest.raises(LaunchError, match=told), join(timeout_s=2):
            pass
        assert time.monotonic() - began < 2 + slowness()


def test_a_first_rank_that_nobody_hears_ends_the_wait_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}.items():
        monkeypatch.setenv(name, str(value))
    began = time.monotonic()
    told = r"rank 1 does not reach all others.* nobody listened at 127.0.0.1:\d+ within 4 s"
    with pytest.raises(LaunchError, match=told), join(timeout_s=4):
        pass
    assert time.monotonic() - began < 4 + slowness()


def test_a_rank_that_reaches_itself_has_reached_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client does now and then, whose own port is the one that it calls."""

    def reach_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
        own.connect(address)
        return own

    monkeypatch.setattr(socket, "create_connection", reach_itself)
    assert not answers("127.0.0.1", _free_port(), 0.2)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "60", True])
def test_a_timeout_is_a_number_of_seconds(timeout_s):
    with pytest.raises(ValueError, match=r"^timeout_s: expected seconds above 0, up to 1000000000"):
        join(timeout_s=timeout_s).__enter__()


def test_alone_there_is_no_group() -> None:
    with join() as job:
        assert (job.rank, job.world_size, job.source) == (0, 1, "alone")
        assert not torch.distributed.is_initialized()
        assert job.gather("x") == ["x"]


@pytest.mark.parametrize(("local_rank", "local_world_size"), [(0, 3), (2, 3)])
def test_more_ranks_than_gpus_raises_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, local_world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = Job(local_rank, 3, local_rank, local_world_size, "torchrun")
    with pytest.raises(LaunchError, match="3 ranks on this machine, 2 GPUs"):
        distributed.device_of(place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as where they are hidden
    assert distributed.device_of(place).type == "cpu"


def test_store_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert distributed.host_address(Job(0, 2, 0, 2)) == "127.0.0.1"
    assert distributed.host_address(Job(0, 4, 0, 2)) not in ("", "0.0.0.0")
    monkeypatch.setenv("MASTER_ADDR", "node-7")
    assert distributed.host_address(Job(0, 4, 0, 2)) == "node-7"


BODY = """
import sys, torch, torch.distributed as dist
from tpsample.distributed import join
with join(timeout_s=20) as job:
    if sys.argv[1] == "rank 1 fails" and job.rank == 1:
        raise RuntimeError("planted")
    total = torch.tensor([job.rank + 1])
    dist.all_reduce(total)
    ranks = job.gather(job.local_rank)
    assert dist.get_backend() == "gloo" and job.device.type == "cpu"
    if job.rank == 0:
        print("joined", job.world_size, job.source, int(total), ranks)
assert not dist.is_initialized()
"""


@pytest.fixture
def body(tmp_path: Path) -> Path:
    path = tmp_path / "body.py"
    path.write_text(BODY)
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("asked", "taken"), [(None, [7, 8]), ("8", [])])
def test_a_process_started_by_hand_leaves_a_core_to_others(asked, taken, monkeypatch):
    threads: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with join() as job:
        assert job.source == "alone"
    assert threads == taken


@pytest.mark.parametrize("source", ["mpi4py", *long("torchrun")])
def test_two_ranks_join(source: str, body: Path) -> None:
    done = run_command(*starter(source), body, "all work")
    assert done.returncode == 0, done.stderr
    assert f"joined 2 {source} 3 [0, 1]" in done.stdout


@pytest.mark.parametrize("source", ["mpi4py", *long("torchrun")])
def test_a_rank_that_fails_ends_the_job(source: str, body: Path) -> None:
    done = run_command(*starter(source), body, "rank 1 fails")
    assert done.returncode != 0
    assert "planted" in done.stderr + done.stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_variables_of_a_launcher_and_an_address_are_enough(body: Path) -> None:
    env = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    both = 'for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done; wait'
    done = run_command(*("bash", "-c", both, "bash", sys.executable, body, "all work"), env=env)
    assert "joined 2 Slurm 3 [0, 1]" in done.stdout, done.stderr


def _leaves(port: int) -> tuple[int, dict[str, str]]:
    """Join as one of two machines; return torch's threads, and what is new among the variables."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(RANK=f"{rank}", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    torch.set_num_threads(5)
    before = dict(os.environ)
    with join() as job:
        assert len(job.gather(os.environ["GLOO_SOCKET_IFNAME"])) == 2
    return torch.get_num_threads(), {n: v for n, v in os.environ.items() if before.get(n) != v}


def test_a_job_that_has_ended_leaves_the_process_as_it_was() -> None:
    assert run_ranks(2, _leaves, _free_port()) == [(5, {})] * 2


def _by_interface(ports: tuple[int, int]) -> list[str]:
    """Join by an interface that is not there, then by the right one."""
    rank, found = dist.get_rank(), []
    dist.destroy_process_group()
    os.environ.update(RANK=f"{rank}", WORLD_SIZE="2", LOCAL_RANK=f"{rank}", LOCAL_WORLD_SIZE="2")
    for name, port in zip(("nowhere0", "lo"), ports, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", GLOO_SOCKET_IFNAME=name)
        try:
            with join() as job:
                found += job.gather(name)
        except LaunchError as error:
            found.append(str(error))
    return found


def test_ranks_that_do_not_reach_each_other_are_told_the_variable() -> None:
    for said, *names in run_ranks(2, _by_interface, (_free_port(), _free_port())):
        assert "its interface is nowhere0. Set GLOO_SOCKET_IFNAME to the" in said
        assert names == ["lo", "lo"]


def test_importing_tpsample_imports_no_extra() -> None:
    program = (
        "import sys, tpsample, tpsample.distributed, tpsample.cli\n"
        "print({'mpi4py', 'typer', 'rich', 'transformers', 'triton'} & set(sys.modules))"
    )
    done = run_command(sys.executable, "-c", program)
    assert done.stdout.strip() == "set()", done.stderr


def _gather_what_json_has_not() -> tuple[list[str], list[int]]:
    job = Job(rank := dist.get_rank(), 2)
    told = [
        outcome(lambda: job.gather({1} if rank else "x"))[1],
        outcome(lambda: job.gather(*[1, 2][: 1 + rank]))[1],  # type: ignore[arg-type]
    ]
    return told, job.gather(rank)


def test_a_value_that_cannot_be_gathered_is_told_to_every_rank() -> None:
    told = [
        "rank 1: Object of type set is not JSON serializable",
        "rank 1: Job.gather() takes 2 positional arguments but 3 were given; call it as "
        "Job.gather(value)",
    ]
    assert run_ranks(2, _gather_what_json_has_not, group_timeout_s=10) == [(told, [0, 1])] * 2
    with pytest.raises(TypeError):
        Job().gather({1})
