"""`tpsample doctor` shows what a job has, which exchange it will use and why, and tries it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import time
import warnings
from typing import Annotated, Any

import torch
import typer
from rich.filesize import decimal as size

import tpsample
from tpsample import reference
from tpsample.agreement.arguments import BackendName
from tpsample.agreement.construction import default_backend
from tpsample.backends.screening.int8_copy import NUMBERS
from tpsample.cli import report
from tpsample.core.machine import amd, compiler_doubt, how_to_install, numba_missing
from tpsample.core.vocab_shard import VocabShard
from tpsample.distributed import Job, join
from tpsample.exchange.choice import choose_exchange, explain_auto, reach
from tpsample.integrations import TRIED, check_version
from tpsample.ranks.process import ranks_of
from tpsample.record.format import Record
from tpsample.record.verify import sampled_again
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler

_HEADS = ((128256, 8192), (151936, 4096))
"""Vocabulary and hidden size of heads whose 8-bit copies are weighed."""
_VOCAB_SIZE, _HIDDEN_SIZE, _ROWS = 1003, 32, 4
PACKAGES = {
    "transformers": "hf",
    "safetensors": "hf",
    "mpi4py": "mpi",
    "matplotlib": "bench",
}


def doctor(
    seconds: Annotated[float, typer.Option(min=0, max=60, help="Of sampling, per exchange.")] = 2,
) -> None:
    """Show GPUs, links, versions and the exchange that "auto" chooses, and sample on all ranks.

    Alone, under torchrun or under mpirun. Each exchange that can work here samples for a while, and
    every token is compared with the oracle's. Exit status 1 if a rank is missing or a token is
    wrong.
    """
    with report.errors(RuntimeError), join() as job:
        ok = _examine(job, seconds)
    if not ok:
        raise typer.Exit(1)


def _examine(job: Job, seconds: float) -> bool:
    shown = report.Report(job.rank)
    backend = default_backend(job.device)
    ranks = ranks_of(None)
    records = ranks.gather(reach(backend, job.device) | _about(job))
    chosen = choose_exchange("auto", ranks, records)

    reason = numba_missing() if backend == "torch" and job.device.type == "cpu" else None
    slow = "" if reason is None else ", the slow definition, because Numba is missing"

    shown.table([("job", report.started(job)), *_machines(records)])
    shown.table(
        [
            *_versions(records),
            ("backend", f"{backend} on {job.device.type}{slow}"),
            ("exchange auto", f"{chosen}: {explain_auto(ranks, records)}"),
            ("8-bit copy", _copies(job.world_size)),
            *_cache(backend),
        ]
    )
    ok = True
    tried = [chosen] if job.world_size == 1 else ["collective", "p2p"]
    if job.world_size > 1 and not any(record["obstacle"] for record in records):
        tried.append("peer")
    if len({record["host"] for record in records}) > 1:
        tried.append("two_level")
    for name in tried:
        line, right = _self_check(job, name, backend, seconds)
        shown.verdict(line, right)
        ok &= right
    hints = _hints(job, records)
    if reason is not None:
        hints.insert(0, reason)
    for hint in hints:
        shown.verdict(f"hint: {hint}", True)
    return ok


def _about(job: Job) -> dict[str, Any]:
    """Return what a rank tells of itself beside its reach, as JSON values."""
    gpu = "CPU"
    if job.device.type == "cuda":
        properties = torch.cuda.get_device_properties(job.device)
        gpu = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    versions = {"Python": platform.python_version(), "tpsample": tpsample.__version__}
    for package in dict.fromkeys(("torch", "triton", "numba", *PACKAGES, *TRIED)):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in PACKAGES or package not in TRIED:
                versions[package] = "missing"
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"shown": f"{job.device}: {gpu}", "versions": versions}


def _machines(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a line per rank: host, device, and the ranks that NVLink connects with it."""
    lines = []
    for rank, record in enumerate(records):
        linked = [
            other
            for other, theirs in enumerate(records)
            if other != rank
            and theirs["host"] == record["host"]
            and theirs["device"][1] in record["linked"]
        ]
        links = ""
        if record["device"][0] == "cuda":
            links = f", NVLink to ranks {linked}" if linked else ", no NVLink to another rank"
        lines.append((f"rank {rank}", f"{record['host']} {record['shown']}{links}"))
    return lines


def _versions(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a line per package, with every rank's version where they differ."""
    lines = []
    for name, version in records[0]["versions"].items():
        versions = [record["versions"].get(name) for record in records]
        same = len(set(versions)) == 1
        lines.append((name, version if same else f"DIFFERS BETWEEN RANKS: {versions}"))
    return lines


def _cache(backend: str) -> list[tuple[str, str]]:
    """Say whether steps find the kernels of a CPU compiled."""
    if backend != "numba":
        return []
    from tpsample.backends.numba_.kernels.compiled_ahead import (  # needs Numba
        SECONDS_EACH,
        entries,
        missing_of,
    )

    states = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.empty(1, 1, dtype=dtype, device="cpu")
        every, missing = len(entries(weight)), len(missing_of(weight))
        state = "warm"
        if missing:
            state = f"{missing} of {every} to be compiled, about {missing * SECONDS_EACH} s"
        states.append(f"{str(dtype).removeprefix('torch.')} {state}")
    return [("kernel cache", f"{', '.join(states)}; once per machine")]


def _copies(world_size: int) -> str:
    """Say what memory the copies of some heads would take on each rank."""
    of_heads = []
    for vocab_size, hidden_size in _HEADS:
        copied = size(vocab_size * (hidden_size + NUMBERS) // world_size)
        head = size(vocab_size * hidden_size * 2 // world_size)
        of_heads.append(f"{copied} beside {head} of bf16 weights for {vocab_size} x {hidden_size}")
    return f"with screening=int8 takes, per rank, {', '.join(of_heads)}"


def _self_check(job: Job, exchange: str, backend: BackendName, seconds: float) -> tuple[str, bool]:
    """Sample by one exchange. Return a line to show, and whether every token was right."""
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float32 if job.device.type == "cpu" else torch.bfloat16
    weight = torch.randn(_VOCAB_SIZE, _HIDDEN_SIZE, generator=generator).to(job.device, dtype)
    hidden_states = torch.randn(_ROWS, _HIDDEN_SIZE, generator=generator).to(job.device, dtype)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(temperature=0.7, seed=2),
        SamplingParams(top_k=20, top_p=0.9, seed=3),
    ]
    shard = VocabShard.even(_VOCAB_SIZE, job.rank, job.world_size)
    options: dict[str, Any] = {"exchange": "auto" if exchange == "none" else exchange}
    sampler = LMHeadSampler(
        weight[shard.start : shard.stop], shard=shard, max_rows=_ROWS, backend=backend, **options
    )
    batch = SamplingBatch.from_params(params, vocab_size=_VOCAB_SIZE, device=job.device)
    logits = reference.logits(hidden_states, weight)
    wrong = steps = 0
    took, began = list[float](), time.perf_counter()
    while True:
        start = time.perf_counter()
        out = sampler(hidden_states, batch, steps)
        sampler.check()
        took.append(time.perf_counter() - start)
        given = {"hidden_states": hidden_states, "positions": torch.full_like(out.seeds, steps)}
        drawn = {"seeds": out.seeds, "status": out.status, "token_ids": out.token_ids}
        record = Record({**given, **drawn}, params, {}, {})
        exact = job.device.type == "cpu"
        verdicts = sampled_again(record, range(_ROWS), logits, exact=exact)
        wrong += sum(not verdict.confirmed for verdict in verdicts)
        steps += 1
        # All ranks stop in the same step: when the first of them says so.
        stop = torch.tensor([int(time.perf_counter() - began > seconds)], device=job.device)
        if sampler.ranks.sum_integers(stop).item():
            break
    sampler.compare()
    sampler.close()
    verdict = "ok" if not wrong else f"{wrong} TOKENS DIFFER FROM THE ORACLE"
    count = f"{steps} step{'s' * (steps != 1)}, {steps * _ROWS} tokens"
    # The first one may compile kernels.
    slowest = f", slowest behind the first {max(took[1:]) * 1e3:.1f} ms" if took[1:] else ""
    return f"self-check {exchange}: {verdict}; {count}{slowest}", not wrong


def _hints(job: Job, records: list[dict[str, Any]]) -> list[str]:
    """Say what is missing, and the way to it."""
    hints = []
    lacks = [name for name, version in records[0]["versions"].items() if version == "missing"]
    for extra in dict.fromkeys(PACKAGES.values()):
        if packages := [name for name in lacks if PACKAGES.get(name) == extra]:
            hints.append(f"{', '.join(packages)} missing: {how_to_install(extra)}")
    for engine in TRIED:
        if (version := records[0]["versions"].get(engine, "missing")) != "missing":
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                try:
                    check_version(engine, version)
                except (ImportError, UserWarning) as error:
                    hints.append(str(error))
    if "triton" in lacks:
        hints.append("triton missing: GPUs and the interpreter need it: pip install triton")
    elif job.device.type == "cuda" and not amd():
        major, minor = torch.cuda.get_device_capability(job.device)
        if doubt := compiler_doubt(10 * major + minor, records[0]["versions"]["triton"]):
            hints.append(doubt)
    if job.device.type == "cpu":
        hints.append(
            "no GPU is visible: everything runs on the CPU; if there is one, see nvidia-smi, "
            "CUDA_VISIBLE_DEVICES and whether torch was built for CUDA"
        )
    if job.world_size == 1:
        hints.append(
            "one rank: start two with torchrun --standalone --local-addr 127.0.0.1 "
            "--nproc-per-node 2 -m tpsample.cli doctor"
        )
    return hints
